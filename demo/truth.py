"""Keeps the whole tensors that were in memory at a save in one plain file, without any checkpoint code.

Owns the bit for bit comparison. The jobs that save write the file. The jobs that load read it in new processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Comparison", "Truth", "read_truth", "write_truth"]

Truth = dict[str, Any]
"""Whole tensors and objects by key."""


def write_truth(truth: Mapping[str, Any] | None, path: Path) -> None:
    """Write the file on rank 0. The other ranks pass ``None`` for ``truth`` and wait."""
    if truth is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(dict(truth), path)
    dist.barrier()


def read_truth(path: Path) -> Truth:
    """Read what :func:`write_truth` wrote."""
    truth: Truth = torch.load(path, weights_only=True, mmap=True)
    return truth


@dataclass
class Comparison:
    """Counts what this rank found equal, and names what differs."""

    n_tensors: int = 0
    n_objects: int = 0
    nbytes: int = 0
    keys: set[str] = field(default_factory=set)
    differing: list[str] = field(default_factory=list)

    def tensor(self, key: str, loaded: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare dtype, shape and every bit. So NaN equals NaN, and 0 differs from -0."""
        self.keys.add(key)
        self.n_tensors += 1
        self.nbytes += loaded.nbytes
        same = loaded.dtype == expected.dtype and loaded.shape == expected.shape
        if not same or not torch.equal(_bits(loaded), _bits(expected)):
            self.differing.append(key)

    def object(self, key: str, loaded: Any, expected: Any) -> None:
        self.keys.add(key)
        self.n_objects += 1
        if not _equal(loaded, expected):
            self.differing.append(key)

    def missing(self, key: str) -> None:
        self.differing.append(f"{key} (not in the state dict that was saved)")

    def over_all_ranks(self, truth: Truth) -> dict[str, Any]:
        """The counts of all ranks together. A key of ``truth`` that no rank compared counts as differing."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self)
        seen = set().union(*(one.keys for one in found))
        return {
            "n_tensors": sum(one.n_tensors for one in found),
            "n_objects": sum(one.n_objects for one in found),
            "nbytes": sum(one.nbytes for one in found),
            "n_keys": len(seen),
            "differing": sorted({key for one in found for key in one.differing}),
            "not_loaded": sorted(set(truth) - seen),
        }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(_bits(left), _bits(right))
    if isinstance(left, Mapping):
        return (
            isinstance(right, Mapping)
            and left.keys() == right.keys()
            and all(_equal(left[key], right[key]) for key in left)
        )
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right)
