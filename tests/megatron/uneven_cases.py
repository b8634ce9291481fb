"""Uneven DTensors on four ranks, drawn by hypothesis alike on all of them, and stock's functions to compare with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["Meshes", "cut", "state_dicts", "uneven"]


class Meshes:
    """The meshes of a job of four ranks, by name: all in one row, two by two, and the rows and columns of that."""

    def __init__(self) -> None:
        self.grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.ordered = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        self.ordered._shard_order = [1, 0]  # type: ignore[attr-defined]  # as Megatron-FSDP notes it
        self.by_name: dict[str, DeviceMesh] = {
            "row": init_device_mesh("cpu", (4,)),
            "grid": self.grid,
            "ordered": self.ordered,
            "dp": self.grid["dp"],
            "tp": self.grid["tp"],
        }


_LAYOUTS: list[tuple[str, list[Any]]] = [
    ("row", [Shard(0)]),
    ("row", [Shard(1)]),
    ("row", [Replicate()]),
    ("grid", [Shard(0), Shard(1)]),
    ("grid", [Shard(1), Shard(0)]),
    ("grid", [Replicate(), Shard(0)]),
    ("grid", [Shard(0), Replicate()]),
    ("grid", [Shard(0), Shard(0)]),
    ("grid", [_StridedShard(0, split_factor=2), Shard(0)]),
    ("ordered", [Shard(0), Shard(0)]),
    ("ordered", [Shard(0), Shard(1)]),
    ("dp", [Shard(0)]),
    ("tp", [Shard(1)]),
]


@st.composite
def state_dicts(draw: st.DrawFn, meshes: Meshes) -> dict[str, DTensor]:
    """Up to six DTensors; what a rank holds of each follows from the drawn cuts, which are alike on all ranks."""
    found = {}
    for nth in range(draw(st.integers(1, 6))):
        name, placements = draw(st.sampled_from(_LAYOUTS))
        mesh = meshes.by_name[name]
        shape = tuple(draw(st.lists(st.integers(0, 9), min_size=2, max_size=3)))
        edges = {}
        for dim in range(len(shape)):
            n_parts = math.prod(mesh.shape[m] for m, p in enumerate(placements) if getattr(p, "dim", None) == dim)
            inner = draw(st.lists(st.integers(0, shape[dim]), min_size=n_parts - 1, max_size=n_parts - 1))
            edges[dim] = [0, *sorted(inner), shape[dim]]
        found[f"layer.{nth}.weight"] = cut(mesh, placements, shape, edges)
    return found


def cut(mesh: DeviceMesh, placements: Sequence[Any], shape: tuple[int, ...], edges: dict[int, list[int]]) -> DTensor:
    """A DTensor of which this rank holds the part between two edges along each dimension."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = []
    for dim in range(len(shape)):
        part = 0
        for mesh_dim, placement in enumerate(placements):
            if getattr(placement, "dim", None) == dim:
                part = part * mesh.shape[mesh_dim] + coordinate[mesh_dim]
        local.append(edges[dim][part + 1] - edges[dim][part])
    return uneven(mesh, placements, shape, local)


def uneven(mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int], local: Sequence[int]) -> DTensor:
    """A DTensor of which this rank holds ``local``, whatever that may be."""
    stride = tuple(itertools.accumulate(reversed(list(shape)[1:]), lambda a, b: a * max(b, 1), initial=1))[::-1]
    part = torch.full(tuple(local), float(dist.get_rank()))
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
