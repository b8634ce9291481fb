"""The version of this package: part of every plan's signature."""

__version__ = "0.1.0"
