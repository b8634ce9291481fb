"""Finds contradictions between ranks: one name that means different things.

The checks run on :class:`GlobalColumns`. Each raises a :class:`PlanConflict` that names the key, the ranks and what
each of them holds.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from robust_dcp.errors import PlanConflict, ranks_in_words
from robust_dcp.plan.global_plan.columns import GlobalColumns
from robust_dcp.plan.structure import ItemKind, Path, Paths
from robust_dcp.plan.structure.ragged import padded

__all__ = ["refuse_contradictions", "refuse_other_paths"]

_SHOWN = 8
"""How many variants of one name a message describes."""

_NO_LENGTHS = np.empty(0, dtype=np.int32)


def refuse_contradictions(columns: GlobalColumns, order: npt.NDArray[np.intp]) -> None:
    """Check that all items of one name are tensors or all are not, with the same dtype, layout and global size.

    Args:
        order: the rows sorted by name.

    Raises:
        PlanConflict: some name has items that differ. The error is about the first such name.
    """
    names = columns.name[order]
    same_name = names[1:] == names[:-1]
    is_bytes = columns.kind == ItemKind.BYTES
    for column, what in (
        (is_bytes, "a tensor on some ranks and an object on others"),
        (columns.dtype, "of different dtypes"),
        (columns.layout, "of different layouts"),
        (columns.ndim, "of different numbers of dimensions"),
        (columns.shape, "of different global sizes"),
    ):
        differs = np.zeros(len(same_name), dtype=np.bool_)
        for values in column.T if column.ndim == 2 else (column,):
            sorted_values = values[order]  # index only once, because `order` jumps from rank to rank
            differs |= sorted_values[1:] != sorted_values[:-1]
        differs &= same_name
        if differs.any():
            name = int(names[np.flatnonzero(differs)[0]])
            raise _contradiction(columns, np.flatnonzero(columns.name == name), columns.names[name], what)


def _contradiction(columns: GlobalColumns, rows: npt.NDArray[np.intp], key: str, what: str) -> PlanConflict:
    holders: dict[str, list[int]] = defaultdict(list)
    for row in rows.tolist():
        rank = int(columns.rank[row])
        # Leave out the chunk, which never contradicts. Otherwise one odd rank would hide among a thousand shards.
        holders[columns.tables[rank].describe_whole(int(columns.item[row]))].append(rank)
    held = "; ".join(f"{whole} on {ranks_in_words(ranks)}" for whole, ranks in list(holders.items())[:_SHOWN])
    if len(holders) > _SHOWN:
        held += f" and {len(holders) - _SHOWN} more"
    return PlanConflict(
        f"key {key!r} is {what}: {held}. A name must mean the same tensor on every rank of the group: give them "
        "different names, or pass a sharded tensor (DTensor, ShardedTensor)",
        key=key,
        ranks=sorted({int(rank) for rank in columns.rank[rows]}),
    )


def refuse_other_paths(columns: GlobalColumns) -> Paths | None:
    """The path of each name in the nested state dict (DCP's ``planner_data``); ``None`` if nothing was flattened.

    Raises:
        PlanConflict: two ranks have different paths for one name (``{"a": {"b": …}}`` and ``{"a.b": …}``).
    """
    distinct = {id(table.paths): rank for rank, table in reversed(list(enumerate(columns.tables))) if table.names}
    ranks = sorted(distinct.values())
    held = [(rank, columns.tables[rank].paths) for rank in ranks]
    if all(paths is None for _, paths in held):
        return None
    width = max(int(paths.counts.max()) for _, paths in held if paths is not None)
    lengths = np.zeros((len(columns.names), width), dtype=np.int64)
    counts = np.full(len(columns.names), -1, dtype=np.int32)  # -1: not known yet
    first = np.zeros(len(columns.names), dtype=np.int32)
    for rank, paths in held:
        places = columns.name_places[rank]
        own_counts = np.zeros(len(places), dtype=np.int32) if paths is None else paths.counts
        own_lengths = padded(_NO_LENGTHS if paths is None else paths.lengths, own_counts, width, fill=0)
        known = counts[places] >= 0
        differs = known & ((counts[places] != own_counts) | (lengths[places] != own_lengths).any(axis=1))
        if differs.any():
            place = int(np.flatnonzero(differs)[0])
            raise _other_paths(columns, int(places[place]), int(first[places[place]]), rank)
        first[places[~known]] = rank
        counts[places], lengths[places] = own_counts, own_lengths
    ragged = lengths[np.arange(width) < counts[:, None]].astype(np.int32)
    return Paths(names=columns.names, counts=counts, lengths=ragged)


def _other_paths(columns: GlobalColumns, name: int, rank: int, other: int) -> PlanConflict:
    key = columns.names[name]
    one, two = (_path_on(columns, name, each) for each in (rank, other))
    return PlanConflict(
        f"key {key!r} lies at {one!r} in the state dict of rank {rank} and at {two!r} in that "
        f"of rank {other}; flattened by dots both have one name: rename one of them",
        key=key,
        ranks=[rank, other],
    )


def _path_on(columns: GlobalColumns, name: int, rank: int) -> Path | None:
    paths = columns.tables[rank].paths
    return None if paths is None else paths[int(np.flatnonzero(columns.name_places[rank] == name)[0])]
