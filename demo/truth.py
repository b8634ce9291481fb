"""Keeps the whole tensors that were in memory at a save in one plain file, without any checkpoint code.

Owns the bit for bit comparison. The jobs that save write the file. The jobs that load read it in new processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils import _pytree

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
    """What this rank compared with ``truth``, and what differed."""

    truth: Truth
    nbytes: int = 0
    keys: set[str] = field(default_factory=set)
    differing: list[str] = field(default_factory=list)

    def compare(self, key: str, loaded: Any, place: Any = ...) -> None:
        """Compare a tensor, or an object, with what was saved: structure, dtypes, shapes and every bit. So NaN equals
        NaN, and 0 differs from -0.

        Args:
            place: which part of the whole tensor ``loaded`` is, as an index.
        """
        if key not in self.truth:
            self.differing.append(f"{key} (not in the state dict that was saved)")
            return
        expected = self.truth[key]
        if isinstance(loaded, torch.Tensor):
            expected = expected[place]
            self.nbytes += loaded.nbytes
        self.keys.add(key)
        leaves, structure = _pytree.tree_flatten(loaded)
        expected_leaves, expected_structure = _pytree.tree_flatten(expected)
        if structure != expected_structure or not all(map(_are_equal, leaves, expected_leaves)):
            self.differing.append(key)

    def over_all_ranks(self) -> dict[str, Any]:
        """What all ranks found together. Keys of ``truth`` that no rank compared are ``not_loaded``."""
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (self.keys, self.nbytes, self.differing))
        keys = set().union(*(keys for keys, _, _ in ranks))
        return {
            "n_keys": len(keys),
            "nbytes": sum(nbytes for _, nbytes, _ in ranks),
            "differing": sorted({key for _, _, differing in ranks for key in differing}),
            "not_loaded": sorted(self.truth.keys() - keys),
        }


def _are_equal(left: Any, right: Any) -> bool:
    if not isinstance(left, torch.Tensor):
        return np.array_equal(left, right)
    is_alike = isinstance(right, torch.Tensor) and (left.dtype, left.shape) == (right.dtype, right.shape)
    return is_alike and torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
