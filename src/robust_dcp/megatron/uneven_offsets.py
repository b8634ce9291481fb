"""Computes where every rank's part of every uneven DTensor begins, and checks that the parts make up the whole.

This is exact integer arithmetic in NumPy on the columns of all ranks. All tensors with the same spread are computed at
once. Runs on the coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.coverage import Coverage
from robust_dcp.errors import PlanConflict
from robust_dcp.megatron.uneven_parts import NOT_SHARDED, PlacedOffsets, ShardColumns, Spread, SpreadColumns

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_SHOWN = 8
"""An error message describes at most this many problems, and lists at most this many parts of a tensor."""


def solve(columns: Sequence[ShardColumns | None], ranks: Sequence[int]) -> list[PlacedOffsets]:
    """Compute the offsets of all parts, for each rank in the order of its columns.

    If a rank of a mesh does not hold a key, its part counts as empty. So an optimizer state may exist only on ranks
    with a part that is not empty. It is an error if the other parts do not make up the whole tensor.

    Args:
        columns: the columns of each rank of the group; ``None`` for a rank that holds nothing.
        ranks: the global rank of each.

    Raises:
        PlanConflict: parts overlap, leave gaps, lie out of bounds or do not add up to the global shape, or the ranks
            of a mesh disagree about the global shape. It names keys and ranks.
    """
    offsets: list[list[bytes]] = [[b""] * len(each.spreads) if each is not None else [] for each in columns]
    holders: dict[Spread, list[tuple[int, int, SpreadColumns]]] = {}
    for index, each in enumerate(columns):
        for nth, spread_columns in enumerate(each.spreads if each is not None else ()):
            holders.setdefault(spread_columns.spread, []).append((index, nth, spread_columns))
    wrong: list[tuple[_Table, int]] = []
    for spread, held in holders.items():
        table = _Table.of(spread, [(ranks[index], held_columns) for index, _, held_columns in held])
        found = prefix_offsets(table.sizes, spread)
        wrong += [(table, row) for row in np.flatnonzero(table.disputed | ~_covered(table, found)).tolist()]
        by_place = found.reshape(-1, len(table.keys), spread.ndim)
        for (index, nth, _), place, rows in zip(held, table.places, table.rows, strict=True):
            offsets[index][nth] = by_place[place][rows].astype("<i8").tobytes()
    if wrong:
        raise _conflict(wrong)
    return [PlacedOffsets(each) for each in offsets]


def prefix_offsets(sizes: Int64, spread: Spread) -> Int64:
    """Compute where each part begins. Along each sharded mesh dimension this is the sum of the parts before it.

    The innermost mesh dimension comes first.

    Args:
        sizes: int64 ``[*mesh_shape, tensors, ndim]``, the size of each part.
        spread: the spread of these tensors.

    Returns:
        int64 offsets of the same shape. ``gather_and_compute_chunk_metadata`` of ``megatron_fsdp/uneven_dtensor.py``
        computes the same.
    """
    offsets = np.zeros_like(sizes)
    sizes = sizes.copy()
    for mesh_dim in spread.order:
        along = sizes[..., spread.shard_dims[mesh_dim]]
        ends = np.cumsum(along, axis=mesh_dim)
        offsets[..., spread.shard_dims[mesh_dim]] += ends - along
        sizes[..., spread.shard_dims[mesh_dim]] = np.take(ends, [-1], axis=mesh_dim)
    return offsets


class _Table(msgspec.Struct, frozen=True):
    """All parts of the tensors of one spread.

    Attributes:
        spread: the spread of all these tensors.
        keys: the keys of the tensors.
        shapes: int64 ``[tensors, ndim]``, the global shape that the first rank with the tensor gave.
        sizes: int64 ``[*mesh_shape, tensors, ndim]``, the size of each part.
        present: bool ``[*mesh_shape, tensors]``, whether the rank holds the key.
        disputed: bool ``[tensors]``, whether ranks gave different global shapes.
        places: the row-major place in the mesh of each rank that holds tensors.
        rows: the rows of the keys of each rank that holds tensors.
        ranks: the global rank at each row-major place; -1 if no rank came.
    """

    spread: Spread
    keys: list[str]
    shapes: Int64
    sizes: Int64
    present: Bool
    disputed: Bool
    places: list[int]
    rows: list[npt.NDArray[np.intp]]
    ranks: Int64

    @classmethod
    def of(cls, spread: Spread, held: Sequence[tuple[int, SpreadColumns]]) -> _Table:
        keys = sorted(set().union(*(columns.keys for _, columns in held)))
        row_of = {key: row for row, key in enumerate(keys)}
        n_places, n_keys = len(spread.mesh_ranks), len(keys)
        shapes = np.full((n_keys, spread.ndim), -1, dtype=np.int64)
        present = np.zeros((n_places, n_keys), dtype=np.bool_)
        sizes = np.zeros((n_places, n_keys, spread.ndim), dtype=np.int64)
        disputed = np.zeros(n_keys, dtype=np.bool_)
        known = np.zeros(n_keys, dtype=np.bool_)
        ranks = np.full(n_places, -1, dtype=np.int64)
        places: list[int] = []
        rows: list[npt.NDArray[np.intp]] = []
        for rank, columns in held:
            place = int(np.ravel_multi_index(columns.place, spread.mesh_shape))
            own = np.arange(n_keys) if columns.keys == keys else np.array([row_of[key] for key in columns.keys])
            claimed = columns.shapes(columns.global_shapes)
            disputed[own] |= known[own] & (shapes[own] != claimed).any(axis=1)
            shapes[own] = np.where(known[own, None], shapes[own], claimed)
            known[own] = True
            if ranks[place] >= 0:
                raise PlanConflict(
                    f"the DTensor {columns.keys[0]!r} has two ranks at one place of its mesh of shape "
                    f"{list(spread.mesh_shape)}: the order of the mesh is not that of its process groups",
                    key=columns.keys[0],
                    ranks=sorted([int(ranks[place]), rank]),
                )
            ranks[place] = rank
            present[place, own] = True
            sizes[place, own] = columns.shapes(columns.local_shapes)
            places.append(place)
            rows.append(own)
        cut = np.isin(np.arange(spread.ndim), spread.shard_dims)
        empty = np.where(cut, 0, shapes)
        sizes = np.where(present[..., None], sizes, empty)
        mesh_shape = spread.mesh_shape
        return cls(
            spread=spread,
            keys=keys,
            shapes=shapes,
            sizes=sizes.reshape(*mesh_shape, n_keys, spread.ndim),
            present=present.reshape(*mesh_shape, n_keys),
            disputed=disputed,
            places=places,
            rows=rows,
            ranks=ranks,
        )


def _covered(table: _Table, offsets: Int64) -> Bool:
    """bool ``[tensors]``: whether the parts of each replica fill the tensor, with each element in exactly one part."""
    spread, ndim = table.spread, table.spread.ndim
    mesh_axes = range(len(spread.mesh_shape))
    cut_axes = [axis for axis in mesh_axes if spread.shard_dims[axis] != NOT_SHARDED]
    replica_axes = [axis for axis in mesh_axes if axis not in cut_axes]
    # Tensor by tensor, replica by replica, part by part.
    order = (len(spread.mesh_shape), *replica_axes, *cut_axes)
    n_replicas = int(np.prod([spread.mesh_shape[axis] for axis in replica_axes]))
    begin, size = (np.moveaxis(each, order, range(len(order))).reshape(-1, ndim) for each in (offsets, table.sizes))
    present = np.moveaxis(table.present, order, range(len(order))).reshape(len(table.keys) * n_replicas, -1)
    replica = np.repeat(np.arange(len(present)), present.shape[1])
    rows = np.flatnonzero(present)
    coverage = Coverage(replica[rows], begin[rows], size[rows], np.repeat(table.shapes, n_replicas, axis=0))
    covered = np.ones(len(present), dtype=np.bool_)
    covered[[*coverage.overlaps, *replica[rows][coverage.outside], *coverage.with_gaps]] = False
    # A replica may be missing altogether. It counts only if some rank holds a part of it.
    covered |= ~present.any(axis=1)
    return np.logical_and.reduce(covered.reshape(-1, n_replicas), axis=1)  # type: ignore[no-any-return]


def _conflict(wrong: Sequence[tuple[_Table, int]]) -> PlanConflict:
    keys = [table.keys[row] for table, row in wrong]
    lines = [_told(table, row) for table, row in wrong[:_SHOWN]]
    if len(wrong) > _SHOWN:
        lines.append(f"and {len(wrong) - _SHOWN} more keys, among them {keys[_SHOWN:][:_SHOWN]}")
    return PlanConflict(
        f"the parts of {len(wrong)} uneven DTensor(s) do not fit together: "
        + "; ".join(lines)
        + ". Every rank of a DTensor's mesh has to hold the same keys with the same global shapes and placements, but "
        "for ranks whose part is empty",
        key=keys[0],
        ranks=sorted({rank for table, _ in wrong for rank in table.spread.mesh_ranks}),
    )


def _told(table: _Table, row: int) -> str:
    """Say of one tensor which parts its ranks hold, and which ranks of the mesh do not hold it so."""
    key, spread = table.keys[row], table.spread
    places = np.flatnonzero(table.present[..., row])
    sizes = table.sizes[..., row, :].reshape(-1, spread.ndim)
    parts = ", ".join(f"rank {table.ranks[place]}: {sizes[place].tolist()}" for place in places[:_SHOWN])
    if len(places) > _SHOWN:
        parts += f" and {len(places) - _SHOWN} more"
    shape = table.shapes[row].tolist()
    if table.disputed[row]:
        what = f"has several global shapes, {shape} and another; local shapes are {parts}"
    else:
        what = f"has global shape {shape}, which these local shapes do not make up: {parts}"
    text = f"{key!r} (ranks {list(spread.mesh_ranks)[: _SHOWN * 4]}) {what}"
    missing = sorted(set(spread.mesh_ranks) - set(table.ranks[places].tolist()))
    return text + (f"; ranks {missing} do not hold this key with {spread}" if missing else "")
