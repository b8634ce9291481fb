"""Loads of the format torch_dist."""
