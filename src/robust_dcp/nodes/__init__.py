"""Checkpoints on nodes that do not share the directory."""
