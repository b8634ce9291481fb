"""Finds tensors that a load cannot fill, because their memory was freed, is read-only, or holds several elements in one
place. To write into the first two kinds would end the process. The load planner calls this module before anything is
read.
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


def unusable_targets(targets: Targets) -> list[str]:
    """One text for each tensor that cannot be filled, which says why.

    Args:
        targets: tensors as :func:`local_tensors` gives them.
    """
    # A comprehension for each column, without calls of ours: this runs for each tensor of a load.
    begins = np.array([tensor.data_ptr() for _, tensor in targets], dtype=np.uint64)
    extents = np.array([tensor.nbytes for _, tensor in targets], dtype=np.uint64)
    gaps = [number for number, (_, tensor) in enumerate(targets) if not tensor.is_contiguous()]
    for number in gaps:
        _, tensor = targets[number]
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        extents[number] = (last + 1) * tensor.itemsize  # from the first element to the end of the last one
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
