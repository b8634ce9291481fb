"""Compares the values of two checkpoints, a few pieces of tensors at a time, so that memory stays bounded.

Both may be cut into chunks in any way. What is equal is decided as in a proof: by the bits of elements. How far those
are apart that differ is found out for people: integers are subtracted as integers, so that 2**53 and 2**53 + 1 differ,
and floating point values as float64, which holds every value of the smaller dtypes. Objects that would need a class of
the user are compared as bytes: nothing is executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.errors import UnsafeCheckpoint
from robust_dcp.report import shortened
from robust_dcp.storage.pieces import PieceReader, batches_of
from robust_dcp.storage.reading.comparing import elements_of
from robust_dcp.storage.records.objects import are_equal, load_object

_MEMORY_NBYTES: Final = 32 << 20
_CACHED_NUMEL: Final = 1 << 15
"""So many elements stay in the cache, and torch does not divide them among threads, which would wait for each other."""


class TensorDifference(msgspec.Struct, frozen=True):
    """The difference of two tensors, or of pieces of them.

    Attributes:
        numel: number of elements.
        differing: how many of them differ.
        max_absolute: the largest difference: 0 of 0.0 and -0.0, and of two NaN; infinity where one of two values is
            infinite or NaN and the other is not. ``None`` for dtypes that torch cannot compute with.
        max_relative: the largest difference divided by the larger of the two absolute values.
        nan, infinite: how many elements of the first and of the second tensor are NaN, or infinite.
    """

    numel: int = 0
    differing: int = 0
    max_absolute: float | None = 0.0
    max_relative: float | None = 0.0
    nan: tuple[int, int] = (0, 0)
    infinite: tuple[int, int] = (0, 0)

    def __add__(self, other: TensorDifference) -> TensorDifference:
        def larger(one: float | None, two: float | None) -> float | None:
            return None if one is None or two is None else max(one, two)

        return TensorDifference(
            self.numel + other.numel,
            self.differing + other.differing,
            larger(self.max_absolute, other.max_absolute),
            larger(self.max_relative, other.max_relative),
            (self.nan[0] + other.nan[0], self.nan[1] + other.nan[1]),
            (self.infinite[0] + other.infinite[0], self.infinite[1] + other.infinite[1]),
        )


def compare_tensors(
    first: str, second: str, names: Sequence[str], *, progress: Callable[[int, int], object]
) -> dict[str, TensorDifference]:
    """Compare the tensors among the items ``names``, which have one dtype and shape in both checkpoints.

    Args:
        first, second: the checkpoints' directories.
        progress: called with the bytes of the first checkpoint that were compared so far, and those of all.

    Returns:
        The difference of each tensor, by its name.

    Raises:
        CorruptCheckpoint, StorageError: something cannot be read.
    """
    sides = [PieceReader(path, buffer_nbytes=_MEMORY_NBYTES // 4) for path in (first, second)]
    wanted = sides[1].tensors.keys() & set(names)
    tensors = [tensor for name, tensor in sides[0].tensors.items() if name in wanted]
    total_nbytes = sum(tensor.nbytes for tensor in tensors)
    done_nbytes = 0
    totals = {tensor.name: TensorDifference() for tensor in tensors}
    for batch in batches_of(tensors, _MEMORY_NBYTES // 8):
        for piece, one, other in zip(batch, *(side.read(batch) for side in sides), strict=True):
            totals[piece.tensor.name] += _difference(one, other)
        done_nbytes += sum(piece.nbytes for piece in batch)
        progress(done_nbytes, total_nbytes)
    return totals


def compare_objects(first: str, second: str, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """The items ``names`` that differ: as bytes, and then as data. They are what :func:`compare_tensors` leaves out.

    Yields:
        The name of each, and a few words on the first and on the second.

    Raises:
        CorruptCheckpoint, StorageError: something cannot be read.
    """
    sides = [PieceReader(path, buffer_nbytes=_MEMORY_NBYTES) for path in (first, second)]
    for (name, one), (_, other) in zip(*(side.objects(names) for side in sides), strict=True):
        if one == other:
            continue
        try:
            values = [load_object(data, file=path, item=name) for data, path in ((one, first), (other, second))]
        except UnsafeCheckpoint:
            yield name, f"{len(one)} bytes", f"{len(other)} other bytes"
            continue
        if not are_equal(*values):
            one_text, other_text = (shortened(repr(each), 100) for each in values)
            yield name, one_text, other_text


def _difference(first: torch.Tensor, second: torch.Tensor) -> TensorDifference:
    """The difference of two tensors of one dtype and shape, on the CPU."""
    first, second = first.detach().contiguous().reshape(-1), second.detach().contiguous().reshape(-1)
    total = TensorDifference()
    for one, other in zip(first.split(_CACHED_NUMEL), second.split(_CACHED_NUMEL), strict=True):
        differs = elements_of(one) != elements_of(other)
        differing = int(np.count_nonzero(differs))
        apart: tuple[float | None, float | None] = (0.0, 0.0)
        nan, infinite = [0], [0]
        try:
            if one.is_floating_point() or one.is_complex():
                sides = [_as_reals(each) for each in ([one, other] if differing else [one])]
                nan = [int(each.isnan().any(dim=1).sum()) for each in sides]
                infinite = [int(each.isinf().any(dim=1).sum()) for each in sides]
                if differing:
                    apart = _apart_as_reals(*(each[torch.from_numpy(differs)] for each in sides))
            elif differing:
                apart = _apart_as_integers(one.numpy()[differs], other.numpy()[differs])
        except (RuntimeError, TypeError):  # float4_e2m1fn_x2 holds two values in one element; NumPy has no bits8
            apart = (None, None) if differing else apart
        total += TensorDifference(one.numel(), differing, *apart, (nan[0], nan[-1]), (infinite[0], infinite[-1]))
    return total


def _apart_as_integers(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> tuple[float, float]:
    """The largest difference of two arrays of integers, and the largest of those that are divided by the values."""
    low, high = np.minimum(one, other), np.maximum(one, other)
    apart = high.astype(np.uint64) - low.astype(np.uint64)  # right modulo 2**64, even if it does not fit into an int64
    scale = np.maximum(np.maximum(np.abs(low.astype(np.float64)), np.abs(high.astype(np.float64))), 1)
    return float(apart.max()), float((apart / scale).max())


def _as_reals(tensor: torch.Tensor) -> torch.Tensor:
    """Floating point or complex values as float64 ``[n, 1]``, or ``[n, 2]`` for real and imaginary parts."""
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.to(torch.float64)[:, None]


def _apart_as_reals(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """The same of values by :func:`_as_reals`."""
    apart = (one - other).masked_fill((one == other) | (one.isnan() & other.isnan()), 0)  # two infinities, for example
    apart = torch.hypot(apart[:, 0], apart[:, 1]) if apart.shape[1] > 1 else apart[:, 0].abs()
    apart.nan_to_num_(nan=math.inf, posinf=math.inf)  # a NaN or an infinity on one side only: as far as can be
    scale = torch.maximum(one.abs().amax(dim=1), other.abs().amax(dim=1))
    relative = torch.where((scale == 0) | ~scale.isfinite(), apart, apart / scale)
    return float(apart.max()), float(relative.max())
