"""Finds tensors that a load cannot fill, because their memory was freed or is read-only, and tensors that share memory.

To write into the first two kinds would end the process. Of tensors that share memory the one that is filled last wins.
That is right for views that were saved together, and for nothing else, so the load says so. The load planner calls this
module before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_MAPPING: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .(.)", re.MULTILINE)

Targets = Sequence[tuple[str, torch.Tensor]]
UInt64 = npt.NDArray[np.uint64]


def local_tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that this rank holds of the values of a state dict, each with its name. Those without elements are
    left out, and those whose memory torch does not let us look at.
    """
    with torch.no_grad():
        for name, value in values.items():
            parts = [value]
            if isinstance(value, DTensor):
                parts = [value.to_local()]
            elif isinstance(value, torch.Tensor) and hasattr(value, "local_shards"):
                parts = [shard.tensor for shard in value.local_shards()]
            for part in parts:
                if type(part) in _PLAIN and part.layout is torch.strided and not part.is_meta and part.numel() > 0:
                    yield name, part


def check_targets(held: Targets) -> tuple[list[str], list[tuple[str, str]]]:
    """Find which tensors cannot be filled, and which share some of their memory.

    Args:
        held: tensors as :func:`local_tensors` gives them.

    Returns:
        One text for each tensor that cannot be filled, which says why. If there are none: pairs of names of tensors
        that overlap. A tensor that has two names is fine, as with tied weights.
    """
    # A comprehension for each column, without calls of ours: this runs for each tensor of a load.
    begins = np.array([tensor.data_ptr() for _, tensor in held], dtype=np.uint64)
    extents = np.array([tensor.nbytes for _, tensor in held], dtype=np.uint64)
    gaps = [number for number, (_, tensor) in enumerate(held) if not tensor.is_contiguous()]
    for number in gaps:
        _, tensor = held[number]
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        extents[number] = (last + 1) * tensor.itemsize  # from the first element to the end of the last one
    unusable = _unusable(held, begins, extents, gaps)
    return unusable, [] if unusable else _overlapping(held, begins, begins + extents)


def _unusable(targets: Targets, begins: UInt64, extents: UInt64, gaps: Sequence[int]) -> list[str]:
    """See :func:`check_targets`. ``gaps`` are the places of tensors that are not contiguous."""
    storages = [tensor.untyped_storage() for _, tensor in targets]
    held = np.array([storage.data_ptr() + storage.nbytes() for storage in storages], dtype=np.uint64)
    freed = [
        f"{targets[number][0]!r} cannot be loaded into: its storage holds {storages[number].nbytes()} bytes where its "
        f"data ends at byte {targets[number][1].storage_offset() * targets[number][1].itemsize + extents[number]}: its "
        "memory was freed"
        for number in np.flatnonzero((begins == 0) | (begins + extents > held)).tolist()
    ]
    if freed:
        return freed
    repeating = [
        f"{name!r} cannot be loaded into: its own elements share memory (it is expanded)"
        for name, tensor in map(targets.__getitem__, gaps)
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    ]
    read_only = [
        f"{targets[place][0]!r} cannot be loaded into: its memory may not be written to"
        for place in np.flatnonzero(_are_read_only(begins)).tolist()
        if targets[place][1].is_cpu
    ]
    return repeating + read_only


def _are_read_only(addresses: UInt64) -> npt.NDArray[np.bool_]:
    """Which addresses are in memory that may not be written to: of a file that was mapped to be read, for example."""
    mappings: list[tuple[int, int]] = []
    with suppress(OSError), open("/proc/self/maps", "rb") as file:  # other systems do not tell
        for begin, end, may_write in _MAPPING.findall(file.read()):
            if may_write != b"w":
                mappings.append((int(begin, 16), int(end, 16)))
    starts, stops = np.array(mappings or [(0, 0)], dtype=np.uint64).T
    number = np.searchsorted(starts, addresses, side="right")
    inside: npt.NDArray[np.bool_] = (number > 0) & (addresses < stops[number - 1])
    return inside


def _overlapping(targets: Targets, begins: UInt64, ends: UInt64) -> list[tuple[str, str]]:
    order = np.argsort(begins, kind="stable")
    furthest = np.maximum.accumulate(ends[order])
    found = []
    for place in (np.flatnonzero(begins[order][1:] < furthest[:-1]) + 1).tolist():
        name, tensor = targets[order[place]]
        for before in range(place - 1, -1, -1):
            if furthest[before] <= begins[order[place]]:
                break
            other_name, other = targets[order[before]]
            is_same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) == (
                other.data_ptr(),
                other.dtype,
                other.shape,
                other.stride(),
            )
            if not is_same and np.shares_memory(np.asarray(_Elements(tensor)), np.asarray(_Elements(other))):
                found.append((other_name, name))
                break
    return found


class _Elements:
    """The elements of a tensor as NumPy sees memory. Nobody reads or writes it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "typestr": f"|V{tensor.itemsize}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
        }
