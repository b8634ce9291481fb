"""The names of data files, which hold the mark of their save."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["data_file", "unmarked"]


def unmarked(text: str) -> str:
    """``text`` without the marks of saves in the names of data files: ``__0_0.distcp``."""
    return re.sub(r"\.[0-9a-f]{16}(?=\.(?:distcp|safetensors))", "", text)


def data_file(directory: str | Path, name: str) -> Path:
    """The only file that is called ``name`` without its mark."""
    (found,) = (path for path in Path(directory).iterdir() if unmarked(path.name) == name)
    return found
