"""Describes a rank's uneven DTensors to other ranks: how each is spread over a mesh, and how large its own part is.

Owns the description of one DTensor (:class:`Spread`, :func:`describe`) and the columns of all DTensors of a rank
(:class:`ShardColumns`). It reads only shapes and placements, and exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from robust_dcp.errors import PlanConflict

NOT_SHARDED = -1
"""Stands in place of a tensor dimension, for a mesh dimension that holds replicas."""


class Spread(msgspec.Struct, frozen=True):
    """How a DTensor is spread over a mesh. Offsets depend on this and on shapes only. Equal on all ranks of the mesh.

    Attributes:
        mesh_shape: the number of ranks along each mesh dimension.
        mesh_ranks: the global ranks of the mesh, row-major.
        shard_dims: for each mesh dimension the tensor dimension that it cuts, or ``NOT_SHARDED``.
        order: the sharded mesh dimensions, beginning with the one that cuts last. Megatron-FSDP stores this order on
            the mesh (``_shard_order``). Without it, strided shards come first, then the others in the mesh's order.
        ndim: the number of dimensions of the tensor.
    """

    mesh_shape: tuple[int, ...]
    mesh_ranks: tuple[int, ...]
    shard_dims: tuple[int, ...]
    order: tuple[int, ...]
    ndim: int

    def __str__(self) -> str:
        cuts = ["a replica" if dim == NOT_SHARDED else f"cut along tensor dimension {dim}" for dim in self.shard_dims]
        return f"{self.ndim} dimensions on a mesh of shape {list(self.mesh_shape)} ({', then '.join(cuts)})"


class LocalPart(msgspec.Struct, frozen=True):
    """One DTensor as this rank holds it.

    Attributes:
        spread: how the DTensor is spread over its mesh.
        place: this rank's position along each mesh dimension, in the order of the ranks of that dimension's group.
        global_shape: the shape of the DTensor.
        local_shape: the shape of this rank's part. An empty part may have fewer dimensions.
    """

    spread: Spread
    place: tuple[int, ...]
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """``local_shape`` in all dimensions of the DTensor. An empty part with fewer has size 0 in each cut one."""
        if len(self.local_shape) == self.spread.ndim:
            return self.local_shape
        cut = set(self.spread.shard_dims)
        return tuple(0 if dim in cut else size for dim, size in enumerate(self.global_shape))


class SpreadColumns(msgspec.Struct, frozen=True):
    """The DTensors of one spread that a rank holds, sorted by key.

    Attributes:
        spread: how each of them is spread.
        place: the place of this rank, as in :class:`LocalPart`.
        keys: the key of each DTensor.
        global_shapes, local_shapes: int64, little endian, ``[len(keys), ndim]``.
    """

    spread: Spread
    place: tuple[int, ...]
    keys: list[str]
    global_shapes: bytes
    local_shapes: bytes

    def shapes(self, data: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
        """``global_shapes`` or ``local_shapes`` as int64 ``[len(keys), ndim]``."""
        return np.frombuffer(data, dtype="<i8").reshape(len(self.keys), self.spread.ndim)


class ShardColumns(msgspec.Struct, frozen=True):
    """All DTensors of a rank."""

    spreads: list[SpreadColumns]


class PlacedOffsets(msgspec.Struct, frozen=True):
    """Where a rank's parts begin: int64, little endian, ``[len(keys), ndim]`` for each of its ``SpreadColumns``."""

    spreads: list[bytes]


def columns_of(parts: Mapping[str, LocalPart]) -> ShardColumns:
    """Make columns of ``parts``, sorted by key. The order of ``parts`` does not matter."""
    by_spread: dict[tuple[Spread, tuple[int, ...]], list[str]] = {}
    for key in sorted(parts):
        part = parts[key]
        by_spread.setdefault((part.spread, part.place), []).append(key)
    return ShardColumns(
        [
            SpreadColumns(
                spread=spread,
                place=place,
                keys=keys,
                global_shapes=np.array([parts[key].global_shape for key in keys], dtype="<i8").tobytes(),
                local_shapes=np.array([parts[key].sizes for key in keys], dtype="<i8").tobytes(),
            )
            for (spread, place), keys in by_spread.items()
        ]
    )


def describe(
    key: str, value: DTensor, known: dict[Any, tuple[Any, Spread, tuple[int, ...]]] | None = None
) -> LocalPart:
    """Describe one DTensor. This rank must be in its mesh.

    Args:
        known: what DTensors with the same mesh and equal placements have in common, for the next calls. It must not
            outlive the state dict that holds them, because it tells meshes apart by ``id()``.

    Raises:
        PlanConflict: a placement is neither ``Shard`` nor ``Replicate``, or the local tensor has another number of
            dimensions than the DTensor.
    """
    mesh, placements, global_shape = value.device_mesh, value.placements, tuple(value.shape)
    known = {} if known is None else known
    known_as = (id(mesh), placements, tuple(map(type, placements)), len(global_shape))
    if known_as not in known:
        known[known_as] = (mesh, *_spread_of(key, value))
    _, spread, place = known[known_as]
    # to_local() would make another object when gradients are on, without the chunk that is stored on this one.
    local_shape = tuple(value._local_tensor.shape)
    if len(local_shape) != len(global_shape) and value._local_tensor.numel():
        raise PlanConflict(
            f"the DTensor {key!r} has shape {list(global_shape)} and here a local tensor of shape "
            f"{list(local_shape)}, which has another number of dimensions",
            key=key,
        )
    return LocalPart(spread, place, global_shape, local_shape)


def _spread_of(key: str, value: DTensor) -> tuple[Spread, tuple[int, ...]]:
    mesh, placements = value.device_mesh, value.placements
    ndim = len(value.shape)
    shard_dims = [_shard_dim(key, placement, ndim) for placement in placements]
    # Megatron-FSDP gives replicated parameters a single placement, even on a mesh of several dimensions.
    shard_dims += [NOT_SHARDED] * (mesh.ndim - len(shard_dims))
    order = tuple(dim for dim in _innermost_first(key, value) if shard_dims[dim] != NOT_SHARDED)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not in the mesh of {key!r}")
    place = list(coordinate)
    for dim in order:
        # Parts lie in the order of the group's ranks. The order of the mesh differs if its ranks do not ascend.
        place[dim] = dist.get_rank(mesh.get_group(dim))
    ranks = tuple(mesh.mesh.flatten().tolist())
    return Spread(tuple(mesh.mesh.shape), ranks, tuple(shard_dims), order, ndim), tuple(place)


def _shard_dim(key: str, placement: Any, ndim: int) -> int:
    if isinstance(placement, Shard) or _is_strided(placement):
        return int(placement.dim) % max(ndim, 1)
    if isinstance(placement, Replicate):
        return NOT_SHARDED
    raise PlanConflict(
        f"the DTensor {key!r} has the placement {placement}, which is neither Shard nor Replicate", key=key
    )


def _innermost_first(key: str, value: DTensor) -> list[int]:
    """Mesh dimensions in the order in which stock's ``gather_and_compute_chunk_metadata`` goes through them."""
    shard_order = getattr(value.device_mesh, "_shard_order", None)
    if shard_order is not None:
        return [int(dim) for dim in reversed(shard_order)]
    strided = [dim for dim, placement in enumerate(value.placements) if _is_strided(placement)]
    if len(strided) > 1:
        raise PlanConflict(f"the DTensor {key!r} has {len(strided)} strided shards; at most one is supported", key=key)
    return strided + [dim for dim in range(len(value.placements)) if dim not in strided]


def _is_strided(placement: Any) -> bool:
    """Whether it is a ``_StridedShard``. Only in some versions of torch does that derive from ``Shard``."""
    return hasattr(placement, "split_factor")
