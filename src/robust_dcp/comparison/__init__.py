"""The difference of two checkpoints: of their structures, without torch, and of their values, piece by piece."""
