"""Damage to the files of a checkpoint: flipped bits, and files that are cut short."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cut_short", "data_files", "flip_bit"]

_DATA = (".distcp", ".safetensors")


def data_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The files of a checkpoint that hold tensors, by name."""
    return sorted(path for path in Path(directory).iterdir() if path.suffix in _DATA)


def flip_bit(path: str | os.PathLike[str], offset: int, bit: int = 0) -> None:
    """Flip one bit of a file, as a disk or a network may. A second call undoes it.

    Args:
        path: the file.
        offset: the number of the byte. A negative number counts from the end.
        bit: the number of the bit in that byte, 0 to 7.

    Raises:
        ValueError: the file has no such byte, or a byte has no such bit.
    """
    with open(path, "r+b") as file:
        nbytes = file.seek(0, os.SEEK_END)
        place = offset if offset >= 0 else nbytes + offset
        if not 0 <= place < nbytes or not 0 <= bit < 8:
            raise ValueError(f"{os.fspath(path)} has {nbytes} bytes of 8 bits: there is no bit {bit} of byte {offset}")
        file.seek(place)
        (value,) = file.read(1)
        file.seek(place)
        file.write(bytes([value ^ (1 << bit)]))


def cut_short(path: str | os.PathLike[str], nbytes: int) -> None:
    """Remove the last ``nbytes`` bytes of a file, as if copying it had stopped early."""
    os.truncate(path, max(0, os.path.getsize(path) - nbytes))
