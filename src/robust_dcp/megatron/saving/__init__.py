"""Saves of the format torch_dist."""
