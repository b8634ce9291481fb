"""Finds contradictions between ranks, on the :class:`~robust_dcp.items.Items` of all of them.

A name that means different things, and chunks that do not fill their tensor exactly, are a :class:`PlanConflict` that
names the key, the ranks and what each of them holds.

Of values that differ under one name only one is saved, so somebody has to say so, in the save that makes the plan. With
its structure each rank sends digests of its objects and of its small whole tensors. Large tensors are not compared:
hashing them would take as long as writing them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.coverage import Coverage
from robust_dcp.errors import ExchangeError, PlanConflict, ranks_in_words
from robust_dcp.items import ItemKind, Items, Replica
from robust_dcp.report import listed

Rows = npt.NDArray[np.intp]
UInt64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]

SMALL_NBYTES: Final = 64 << 10
"""Chunks up to this size are compared, and written by the lowest rank that holds them."""


def refuse_contradictions(items: Items) -> None:
    """Check that all items of one name are tensors or all are not, with the same dtype, layout and global size.

    Args:
        items: sorted by name.

    Raises:
        PlanConflict: some name has items that differ. The error is about the first such name.
    """
    same_name = items.name[1:] == items.name[:-1]
    for column, what in (
        (items.kind == ItemKind.BYTES, "a tensor on some ranks and an object on others"),
        (items.numbered("dtype"), "of different dtypes"),
        (items.numbered("layout"), "of different layouts"),
        (items.shape, "of different global sizes"),
    ):
        differs = same_name & (column[1:] != column[:-1])
        if differs.any():
            name = int(items.name[np.flatnonzero(differs)[0]])
            rows = np.flatnonzero(items.name == name)
            holders: dict[str, list[int]] = defaultdict(list)
            for row in rows.tolist():
                # Leave out the chunk, which never contradicts. One odd rank would hide among a thousand shards.
                holders[items.describe_whole(row)].append(int(items.rank[row]))
            held = listed((f"{whole} on {ranks_in_words(ranks)}" for whole, ranks in holders.items()), between="; ")
            raise PlanConflict(
                f"key {items.names[name]!r} is {what}: {held}. A name must mean the same tensor on every rank of the "
                "group: give them different names, or pass a sharded tensor (DTensor, ShardedTensor)",
                key=items.names[name],
                ranks=sorted(set(items.rank[rows].tolist())),
            )


def differs_from_previous(items: Items, rows: Rows) -> Bool:
    """For each of ``rows``, whether its (name, offsets) differ from those of the row before it."""
    differs = np.ones(len(rows), dtype=np.bool_)
    name, offset = items.name[rows], items.offset[rows]
    differs[1:] = (name[1:] != name[:-1]) | (offset[1:] != offset[:-1])
    return differs


def check_bounds(ranks: Sequence[Items]) -> None:
    """Check that every chunk of every rank lies within its tensor.

    Raises:
        PlanConflict: a chunk does not. The error names key and rank of the first one.
    """
    for rank, items in enumerate(ranks):
        for row in items.outside[:1].tolist():
            key = items.names[items.name[row]]
            raise PlanConflict(
                f"a chunk of {key!r} on rank {rank} lies outside the tensor: {items.describe(row)}",
                key=key,
                ranks=[rank],
            )


def check_coverage(items: Items, kept: Rows, *, complete: bool) -> None:
    """Check the kept chunks (rows of ``items``, sorted by name and offsets, all within bounds).

    Args:
        complete: whether gaps are errors. Stock lets a single process save only its part of a sharded tensor.

    Raises:
        PlanConflict: chunks overlap or leave gaps. The error names key and ranks.
    """
    rows = kept[items.kind[kept] != ItemKind.BYTES]
    is_first = np.diff(items.name[rows], prepend=-1) != 0
    starts = np.flatnonzero(is_first)
    # Each dimension of the boxes is in one piece of memory.
    offset = np.take(items.begins.T, items.offset[rows], axis=1).T
    size = np.take(items.extents.T, items.size[rows], axis=1).T
    whole = items.extents[items.shape[rows[starts]]]
    coverage = Coverage(np.cumsum(is_first) - 1, offset, size, whole)
    for left, right in coverage.overlaps.values():
        raise overlap(items, int(rows[left]), int(rows[right]))
    short = coverage.with_gaps.tolist() if complete else []
    if not short:
        return
    worst = short[0]
    held = rows[starts[worst] : [*starts, len(rows)][worst + 1]]
    key, ranks = items.names[items.name[held[0]]], sorted(set(items.rank[held].tolist()))
    gap = coverage.gap(worst, len(items.sizes[items.shape[held[0]]]))
    more = f" ({len(short) - 1} more tensors have gaps too)" if len(short) > 1 else ""
    raise PlanConflict(
        f"the chunks of {key!r} leave gaps: {coverage.volumes[worst]} of {whole[worst].prod()} elements are there, "
        f"from {ranks_in_words(ranks)}{more}; the part {gap} is missing. A rank of the group did not pass its shard: "
        "pass it, or save with the process group that holds the whole tensor",
        key=key,
        ranks=ranks,
    )


def overlap(items: Items, left: int, right: int) -> PlanConflict:
    """The error for two items that hold the same elements of a tensor, but are no replicas."""
    key = items.names[items.name[left]]
    return PlanConflict(
        f"chunks of {key!r} overlap: rank {items.rank[left]} holds {items.describe(left)}, rank "
        f"{items.rank[right]} holds {items.describe(right)}; each element must be saved once",
        key=key,
        ranks=sorted({int(items.rank[left]), int(items.rank[right])}),
    )


class Differing(msgspec.Struct, frozen=True):
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


def is_compared(items: Items) -> Bool:
    """Which items ranks compare: objects and whole tensors up to ``SMALL_NBYTES``, and main replicas of such chunks.

    If a state dict says which replica counts, the others may differ from it, so they are not compared.
    """
    is_whole = (items.size == items.shape) | (items.replica == Replica.MAIN)
    compared: Bool = is_whole & (items.nbytes <= SMALL_NBYTES) & (items.replica != Replica.COPY)
    return compared


def find_differing(items: Items, contested: Rows, digests: Sequence[bytes]) -> list[Differing]:
    """The values with digests that differ between ranks, and all chunks with several main replicas.

    Args:
        items: those of all ranks, sorted by (name, offsets, rank).
        contested: the rows that several ranks claim as their main replica.
        digests: for each rank the digests of what it compares (:func:`is_compared`); empty if they are unknown. A
            digest of 0 is unknown too, and equals everything.

    Raises:
        ExchangeError: a rank did not send one digest for each of its rows.
    """
    if not any(digests) and not len(contested):
        return []
    is_looked_at = is_compared(items)
    compared = np.flatnonzero(is_looked_at)
    compared = compared[np.argsort(items.rank[compared], kind="stable")]
    digest_of = np.zeros(len(items), dtype=np.uint64)
    ends = np.cumsum(np.bincount(items.rank[compared], minlength=len(digests)))
    for rank, (rows, of_rank) in enumerate(zip(np.split(compared, ends[:-1]), digests, strict=True)):
        if of_rank and len(of_rank) != 8 * len(rows):
            raise ExchangeError(f"rank {rank} did not send one digest for each value that is compared", ranks=[rank])
        if of_rank:
            digest_of[rows] = np.frombuffer(of_rank, dtype="<u8")
    is_contested = np.zeros(len(items), dtype=np.bool_)
    is_contested[contested] = True
    rows = np.flatnonzero(is_looked_at | is_contested)
    starts = np.flatnonzero(differs_from_previous(items, rows))
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
        key, offsets = items.names[items.name[row]], items.sizes[items.offset[row]]
        found.append(Differing(key, offsets, tuple(map(tuple, same.values())), bool(is_contested[row])))
    return found
