"""Reads pickles as data, with our own unpickler. It calls only the builders in its table."""
