"""Pickles read as data: an unpickler of our own, which calls nothing but the builders that stand in its table."""
