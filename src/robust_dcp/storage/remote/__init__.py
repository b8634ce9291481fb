"""Places that are reached over a network by fsspec: object stores and others."""
