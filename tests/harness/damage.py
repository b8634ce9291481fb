"""Damage to the files of a checkpoint, as disks, networks and copies may do: drawn, or at a place."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

__all__ = ["DAMAGES", "data_files", "flip_bit"]

_DATA = (".distcp", ".safetensors")


def data_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The files of a checkpoint that hold tensors, by name."""
    return sorted(path for path in Path(directory).iterdir() if path.suffix in _DATA)


def flip_bit(path: str | os.PathLike[str], offset: int, bit: int = 0) -> None:
    """Flip one bit of a file, in place. A second call undoes it. A negative offset counts from the end."""
    with open(path, "r+b") as file:  # to cut it off and write it anew would wait for the disk
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ (1 << bit)]))


def _flip(data: bytearray, dice: random.Random) -> None:
    for _ in range(dice.choice((1, 1, 1, 2, 8))):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _cut(data: bytearray, dice: random.Random) -> None:
    del data[dice.choice((0, len(data) - 1, dice.randrange(len(data)))) :]


def _zero(data: bytearray, dice: random.Random) -> None:
    begin, nbytes = dice.randrange(len(data)), dice.choice((1, 16, 512, 4096, 65_536))
    data[begin : begin + nbytes] = bytes(len(data[begin : begin + nbytes]))


def _swap(data: bytearray, dice: random.Random) -> None:
    nbytes = min(dice.choice((16, 512, 4096)), len(data) // 2)
    one = dice.randrange(len(data) - 2 * nbytes + 1)
    other = dice.randrange(one + nbytes, len(data) - nbytes + 1)
    data[one : one + nbytes], data[other : other + nbytes] = data[other : other + nbytes], data[one : one + nbytes]


def _scramble(data: bytearray, dice: random.Random) -> None:
    begin = dice.randrange(len(data))
    data[begin : begin + 64] = dice.randbytes(len(data[begin : begin + 64]))


def _add(data: bytearray, dice: random.Random) -> None:
    data += dice.randbytes(dice.choice((1, 100, 5000)))


DAMAGES: dict[str, Callable[[bytearray, random.Random], object]] = {
    "bits flipped": _flip,
    "cut short": _cut,
    "range zeroed": _zero,
    "blocks swapped": _swap,
    "other bytes": _scramble,
    "bytes added": _add,
}
"""What happens to the bytes of a file, which is not empty, where the dice say."""
