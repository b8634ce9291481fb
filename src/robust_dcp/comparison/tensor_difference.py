"""How much two tensors differ, from pieces of them. Exact for every dtype.

Integers are subtracted as integers, so that 2**53 and 2**53 + 1 differ. Floating point values are compared as float64,
which holds every value of the smaller dtypes. Two NaN at the same place are equal, and so are 0.0 and -0.0. Values of
dtypes that torch cannot compute with, such as those of packed bits, are compared byte by byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["TensorDifference", "difference_of"]

Integers = npt.NDArray[Any]

_UNSIGNED = {torch.uint16: np.uint16, torch.uint32: np.uint32, torch.uint64: np.uint64}
_CACHED_NUMEL = 1 << 15
"""So many elements stay in the cache, and torch does not divide them among threads, which would wait for each other."""

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)


@dataclass(frozen=True)
class TensorDifference:
    """The difference of two tensors, or of pieces of them.

    Attributes:
        numel: number of elements.
        differing: how many of them differ; bytes for dtypes that torch cannot compute with.
        max_absolute: the largest difference; ``None`` for such dtypes. Infinity where one of two values is infinite or
            NaN and the other is not.
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
        return TensorDifference(
            self.numel + other.numel,
            self.differing + other.differing,
            _larger(self.max_absolute, other.max_absolute),
            _larger(self.max_relative, other.max_relative),
            (self.nan[0] + other.nan[0], self.nan[1] + other.nan[1]),
            (self.infinite[0] + other.infinite[0], self.infinite[1] + other.infinite[1]),
        )

    def exceeds(self, tolerance: float) -> bool:
        """Whether some values differ by more than ``tolerance``."""
        if not self.differing:
            return False
        return self.max_absolute is None or self.max_absolute > tolerance


def _larger(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one, other)


def difference_of(first: torch.Tensor, second: torch.Tensor) -> TensorDifference:
    """The difference of two tensors of one dtype and shape, on the CPU."""
    first, second = first.detach().contiguous(), second.detach().contiguous()
    if first.numel() == 0:
        return TensorDifference()
    if torch.equal(_bytes(first), _bytes(second)) and _are_finite(first):
        return TensorDifference(first.numel())
    if first.dtype in _UNSIGNED or first.dtype in _SIGNED:
        return _of_integers(_integers(first), _integers(second))
    try:
        return _of_long(first.reshape(-1), second.reshape(-1))
    except (RuntimeError, NotImplementedError):  # float4_e2m1fn_x2 holds two values in one element
        pass
    differing = int((_bytes(first) != _bytes(second)).sum())
    return TensorDifference(first.numel(), differing, None, None)


def _are_finite(tensor: torch.Tensor) -> bool:
    """Whether there is no NaN and no infinity to count. ``False`` if torch cannot say."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    try:
        return bool(torch.isfinite(tensor).all())
    except (RuntimeError, NotImplementedError):
        return False


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _integers(tensor: torch.Tensor) -> Integers:
    kind = _UNSIGNED.get(tensor.dtype)
    if kind is not None:
        return np.frombuffer(_bytes(tensor).numpy(), dtype=kind)
    return tensor.reshape(-1).to(torch.int64).numpy()


def _of_integers(first: Integers, second: Integers) -> TensorDifference:
    differs = first != second
    differing = int(differs.sum())
    if not differing:
        return TensorDifference(first.size)
    low, high = np.minimum(first, second)[differs], np.maximum(first, second)[differs]
    # Modulo 2**64 the difference is right, even if it does not fit into an int64.
    apart = high.astype(np.uint64) - low.astype(np.uint64)
    scale = np.maximum(np.abs(low.astype(np.float64)), np.abs(high.astype(np.float64)))
    return TensorDifference(
        first.size, differing, float(apart.max()), float((apart.astype(np.float64) / np.maximum(scale, 1)).max())
    )


def _of_long(first: torch.Tensor, second: torch.Tensor) -> TensorDifference:
    """The difference of two tensors with one dimension, in parts that stay in the processor's cache."""
    total = TensorDifference()
    for one, other in zip(first.split(_CACHED_NUMEL), second.split(_CACHED_NUMEL), strict=True):
        total += _of_floats(_components(one), _components(other))
    return total


def _components(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The values as float64, those of complex numbers as real and imaginary parts."""
    if not tensor.is_complex():
        return [tensor.to(torch.float64)]
    values = torch.view_as_real(tensor.to(torch.complex128))
    return [values[:, 0].contiguous(), values[:, 1].contiguous()]


def _of_floats(first: list[torch.Tensor], second: list[torch.Tensor]) -> TensorDifference:
    """The difference of two tensors, from their components."""
    nan = infinite = (0, 0)
    parts = [one - other for one, other in zip(first, second, strict=True)]
    are_finite = all(_are_finite(component) for component in (*first, *second))
    if not are_finite:
        nan = _count(first, torch.isnan), _count(second, torch.isnan)
        infinite = _count(first, torch.isinf), _count(second, torch.isinf)
        for part, one, other in zip(parts, first, second, strict=True):
            part[(one == other) | (one.isnan() & other.isnan())] = 0  # two infinities, for example
    apart = torch.hypot(*parts) if len(parts) == 2 else parts[0].abs_()
    if not are_finite:
        # A NaN or an infinity on one side only is as far away as can be.
        apart.nan_to_num_(nan=math.inf, posinf=math.inf)
    differing = int(apart.count_nonzero())
    if not differing:
        return TensorDifference(len(apart), nan=nan, infinite=infinite)
    scale = reduce(torch.maximum, (component.abs() for component in (*first, *second)))
    relative = apart / scale
    if are_finite:
        relative.nan_to_num_(nan=0.0, posinf=math.inf)  # 0 / 0 where both are zero
    else:
        relative = torch.where(relative.isnan() | scale.isinf(), apart, relative)
    return TensorDifference(len(apart), differing, float(apart.max()), float(relative.max()), nan, infinite)


def _count(components: list[torch.Tensor], is_so: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Of how many elements some component is NaN, or infinite."""
    return int(reduce(torch.logical_or, map(is_so, components)).sum())
