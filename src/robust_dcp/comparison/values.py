"""Compares the values of two checkpoints, a few pieces of tensors at a time, so that memory stays bounded.

Both checkpoints may be cut into chunks in any way. Objects are compared as bytes first, and then as data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from robust_dcp.comparison.tensor_difference import TensorDifference, difference_of
from robust_dcp.errors import UnsafeCheckpoint
from robust_dcp.storage.pieces import PieceReader, batches_of
from robust_dcp.storage.records.objects import load_object

__all__ = ["DifferingObject", "compare_objects", "compare_tensors"]


@dataclass(frozen=True)
class DifferingObject:
    """An object that is not the same in both checkpoints. ``first`` and ``second`` describe it in a few words."""

    name: str
    first: str
    second: str


def compare_tensors(
    first: str,
    second: str,
    names: Sequence[str],
    *,
    buffer_nbytes: int,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> Iterator[tuple[str, TensorDifference]]:
    """Compare tensors that have one dtype and shape in both checkpoints.

    Args:
        first, second: the checkpoints' directories.
        names: the tensors. They are compared in the order of the first checkpoint's ``.metadata``.
        buffer_nbytes: about how much memory the pieces of both may take.
        progress: called with the number of bytes of the first checkpoint that were compared so far.

    Yields:
        The name and the difference of each tensor.

    Raises:
        CorruptCheckpoint, StorageError: something cannot be read.
    """
    sides = [PieceReader(path, buffer_nbytes=buffer_nbytes // 4) for path in (first, second)]
    wanted = set(names)
    tensors = [tensor for name, tensor in sides[0].tensors.items() if name in wanted]
    done_nbytes = 0
    totals = {tensor.name: TensorDifference() for tensor in tensors}
    for batch in batches_of(tensors, buffer_nbytes // 8):
        for piece, one, other in zip(batch, *(side.read(batch) for side in sides), strict=True):
            totals[piece.tensor.name] += difference_of(one, other)
        done_nbytes += sum(piece.nbytes for piece in batch)
        progress(done_nbytes)
        for piece in batch:
            if piece.is_last:
                yield piece.tensor.name, totals.pop(piece.tensor.name)


def compare_objects(first: str, second: str, names: Sequence[str]) -> Iterator[DifferingObject]:
    """Compare objects that both checkpoints have, and yield those that differ.

    An object that needs a class of the user is compared by its bytes alone, because it is never executed.

    Raises:
        CorruptCheckpoint, StorageError: something cannot be read.
    """
    sides = [PieceReader(path, buffer_nbytes=64 << 20) for path in (first, second)]
    for name in names:
        one, other = (side.object_bytes(name) for side in sides)
        if one == other:
            continue
        try:
            values = [load_object(data, file=path, item=name) for data, path in ((one, first), (other, second))]
        except UnsafeCheckpoint:
            yield DifferingObject(name, f"{len(one)} bytes", f"{len(other)} other bytes")
            continue
        if not _are_equal(values[0], values[1]):
            yield DifferingObject(name, _brief(values[0]), _brief(values[1]))


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values that consist of data are the same. NaN is equal to NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and not difference_of(one, other).differing
    if isinstance(one, dict):
        return list(one) == list(other) and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, float):
        return one == other or (one != one and other != other)
    return repr(one) == repr(other)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:99]}…"
