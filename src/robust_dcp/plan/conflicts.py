"""Finds contradictions between ranks: one name that means different things, and values that differ under one name.

The checks run on the :class:`~robust_dcp.plan.items.Items` of all ranks. A name that means different things is a
:class:`PlanConflict` that names the key, the ranks and what each of them holds. Of values that differ only one is
saved, so somebody has to say so, in the save that makes the plan. Objects and small chunks are compared, and main
replicas that several ranks claim. Large tensors are not: hashing them would take as long as writing them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from robust_dcp.errors import ExchangeError, PlanConflict, ranks_in_words
from robust_dcp.plan.items import ItemKind, Items, Path, Paths, padded

__all__ = ["Differing", "find_differing", "merged_paths", "refuse_contradictions"]

Rows = npt.NDArray[np.intp]
UInt64 = npt.NDArray[np.uint64]

_SHOWN: Final = 8
"""How many variants of one name a message describes."""


def refuse_contradictions(items: Items, order: Rows) -> None:
    """Check that all items of one name are tensors or all are not, with the same dtype, layout and global size.

    Args:
        order: the rows sorted by name.

    Raises:
        PlanConflict: some name has items that differ. The error is about the first such name.
    """
    names = items.name[order]
    same_name = names[1:] == names[:-1]
    for column, what in (
        (items.kind == ItemKind.BYTES, "a tensor on some ranks and an object on others"),
        (items.dtype, "of different dtypes"),
        (items.layout, "of different layouts"),
        (items.ndim, "of different numbers of dimensions"),
        (items.shape, "of different global sizes"),
    ):
        differs = np.zeros(len(same_name), dtype=np.bool_)
        for values in column.T if column.ndim == 2 else (column,):
            sorted_values = values[order]  # index only once, because `order` jumps from rank to rank
            differs |= sorted_values[1:] != sorted_values[:-1]
        differs &= same_name
        if differs.any():
            raise _contradiction(items, int(names[np.flatnonzero(differs)[0]]), what)


def _contradiction(items: Items, name: int, what: str) -> PlanConflict:
    rows = np.flatnonzero(items.name == name)
    holders: dict[str, list[int]] = defaultdict(list)
    for row in rows.tolist():
        # Leave out the chunk, which never contradicts. Otherwise one odd rank would hide among a thousand shards.
        holders[items.describe_whole(row)].append(int(items.rank[row]))
    held = "; ".join(f"{whole} on {ranks_in_words(ranks)}" for whole, ranks in list(holders.items())[:_SHOWN])
    if len(holders) > _SHOWN:
        held += f" and {len(holders) - _SHOWN} more"
    key = items.names[name]
    return PlanConflict(
        f"key {key!r} is {what}: {held}. A name must mean the same tensor on every rank of the group: give them "
        "different names, or pass a sharded tensor (DTensor, ShardedTensor)",
        key=key,
        ranks=sorted(set(items.rank[rows].tolist())),
    )


def merged_paths(ranks: Sequence[Items], items: Items) -> Paths | None:
    """The path of each name in the nested state dict (DCP's ``planner_data``); ``None`` if nothing was flattened.

    Args:
        ranks: the items of each rank.
        items: those of all ranks.

    Raises:
        PlanConflict: two ranks have different paths for one name (``{"a": {"b": …}}`` and ``{"a.b": …}``).
    """
    # Replicas share an object of paths; the first rank that has it stands for all of them.
    distinct = {id(each.paths): rank for rank, each in reversed(list(enumerate(ranks))) if each.names}
    held = [(rank, ranks[rank].paths) for rank in sorted(distinct.values())]
    if all(paths is None for _, paths in held):
        return None
    width = max(int(paths.counts.max()) for _, paths in held if paths is not None)
    lengths = np.zeros((len(items.names), width), dtype=np.int64)
    counts = np.full(len(items.names), -1, dtype=np.int32)  # -1: not known yet
    first = np.zeros(len(items.names), dtype=np.int32)
    place_of = {name: place for place, name in enumerate(items.names)}
    for rank, paths in held:
        names = ranks[rank].names
        places = np.fromiter(map(place_of.__getitem__, names), dtype=np.intp, count=len(names))
        rank_counts = np.zeros(len(places), dtype=np.int32) if paths is None else paths.counts
        rank_lengths = padded(rank_counts[:0] if paths is None else paths.lengths, rank_counts, width)
        known = counts[places] >= 0
        differs = known & ((counts[places] != rank_counts) | (lengths[places] != rank_lengths).any(axis=1))
        if differs.any():
            name = names[int(np.flatnonzero(differs)[0])]
            raise _other_paths(ranks, name, int(first[place_of[name]]), rank)
        first[places[~known]] = rank
        counts[places], lengths[places] = rank_counts, rank_lengths
    return Paths(items.names, counts, lengths[np.arange(width) < counts[:, None]].astype(np.int32))


def _other_paths(ranks: Sequence[Items], key: str, rank: int, other: int) -> PlanConflict:
    def path_on(each: Items) -> Path | None:
        return None if each.paths is None else each.paths[each.names.index(key)]

    return PlanConflict(
        f"key {key!r} lies at {path_on(ranks[rank])!r} in the state dict of rank {rank} and at "
        f"{path_on(ranks[other])!r} in that of rank {other}; flattened by dots both have one name: rename one of them",
        key=key,
        ranks=[rank, other],
    )


@dataclass(frozen=True)
class Differing:
    """A value that differs between ranks, or a chunk with several main replicas.

    Attributes:
        key, offsets: the name, and the offsets of the chunk; ``()`` for an object.
        ranks: the ranks that hold it, grouped by what they hold. The first group has the lowest rank.
        is_contested: whether several ranks claim the main replica.
    """

    key: str
    offsets: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    is_contested: bool = False

    def __str__(self) -> str:
        at = f" at {list(self.offsets)}" if any(self.offsets) else ""
        return f"{self.key!r}{at} ({' / '.join(ranks_in_words(list(same)) for same in self.ranks)})"


def find_differing(
    items: Items, order: Rows, compared: Rows, contested: Rows, digests: Sequence[UInt64]
) -> list[Differing]:
    """The values with digests that differ between ranks, and all chunks with several main replicas.

    Args:
        order: all rows, sorted by (name, offsets, rank).
        compared: the rows that were compared, ascending.
        contested: those of them that several ranks claim as their main replica.
        digests: for each rank the digests of its compared rows, ascending; 0 is unknown, and equals everything.

    Raises:
        ExchangeError: a rank did not send one digest for each of its rows.
    """
    expected = np.bincount(items.rank[compared], minlength=len(digests))
    wrong = [rank for rank, of_rank in enumerate(digests) if len(of_rank) != expected[rank]]
    if wrong:
        raise ExchangeError(
            f"{ranks_in_words(wrong)} did not send one digest for each value that is compared", ranks=wrong
        )
    digest_of = np.zeros(len(items), dtype=np.uint64)
    digest_of[compared] = np.concatenate(list(digests))
    is_compared, is_contested = np.zeros((2, len(items)), dtype=np.bool_)
    is_compared[compared] = True
    is_contested[contested] = True
    rows = order[is_compared[order]]
    if not len(rows):
        return []
    begins = np.ones(len(rows), dtype=np.bool_)
    begins[1:] = items.name[rows[1:]] != items.name[rows[:-1]]
    begins[1:] |= (items.offset[rows[1:]] != items.offset[rows[:-1]]).any(axis=1)
    starts = np.flatnonzero(begins)
    digest = digest_of[rows]
    lowest = np.minimum.reduceat(np.where(digest == 0, np.iinfo(np.uint64).max, digest), starts)
    differs = (lowest < np.maximum.reduceat(digest, starts)) | is_contested[rows[starts]]
    ends = np.append(starts[1:], len(rows))
    found = []
    for begin, end in zip(starts[differs].tolist(), ends[differs].tolist(), strict=True):
        same: dict[int, list[int]] = {}
        for row in rows[begin:end].tolist():
            same.setdefault(int(digest_of[row]), []).append(int(items.rank[row]))
        row = int(rows[begin])
        offsets = tuple(items.offset[row, : items.ndim[row]].tolist())
        key = items.names[items.name[row]]
        found.append(Differing(key, offsets, tuple(map(tuple, same.values())), bool(is_contested[row])))
    return found
