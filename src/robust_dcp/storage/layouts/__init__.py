"""Layouts: how the items of a checkpoint lie in files. Only a layout knows what its files look like."""
