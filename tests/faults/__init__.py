"""Faults of a file system: one scripted disk, what a power cut may leave, and how files are damaged."""
