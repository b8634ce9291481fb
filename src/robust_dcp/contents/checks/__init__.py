"""Checks of a checkpoint as it lies on a disk: its structure without torch, its files and checksums with it."""
