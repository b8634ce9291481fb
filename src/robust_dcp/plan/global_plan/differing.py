"""Finds values that differ between the ranks that hold them under one name, in the save that makes a plan.

Only one of the copies is saved, so somebody has to say so. Objects and small chunks are compared, and main replicas
that several ranks claim. Large tensors are not: hashing them would take as long as writing them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from robust_dcp.errors import ExchangeError, ranks_in_words
from robust_dcp.plan.global_plan.columns import GlobalColumns
from robust_dcp.plan.global_plan.replicas import Replicas
from robust_dcp.plan.structure import ItemKind, Replica

__all__ = ["SMALL_NBYTES", "Differing", "compared_rows", "find_differing"]

Rows = npt.NDArray[np.intp]
UInt64 = npt.NDArray[np.uint64]

SMALL_NBYTES = 64 << 10
"""Chunks up to this size are compared, and written by the lowest rank that holds them."""


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


def compared_rows(columns: GlobalColumns, groups: Replicas, contested: Rows) -> Rows:
    """The rows that are compared: ``contested``, and objects and small chunks that several ranks hold.

    If a state dict says which replica counts, the others may differ from it, so they are not compared.
    """
    n_rows = np.diff(groups.starts)
    is_small = (columns.kind[groups.first] == ItemKind.BYTES) | (columns.nbytes[groups.first] <= SMALL_NBYTES)
    says_which = np.maximum.reduceat(columns.replica[groups.order], groups.starts[:-1]) if len(groups) else n_rows
    is_compared = (n_rows > 1) & is_small & (says_which == Replica.ANY)
    rows: Rows = np.union1d(groups.order[is_compared[groups.of]], contested)
    return rows


def find_differing(
    columns: GlobalColumns, order: Rows, compared: Rows, contested: Rows, digests: Sequence[UInt64]
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
    expected = np.bincount(columns.rank[compared], minlength=len(digests))
    wrong = [rank for rank, own in enumerate(digests) if len(own) != expected[rank]]
    if wrong:
        raise ExchangeError(
            f"{ranks_in_words(wrong)} did not send one digest for each value that is compared", ranks=wrong
        )
    digest_of = np.zeros(len(columns), dtype=np.uint64)
    digest_of[compared] = np.concatenate(list(digests))
    is_compared, is_contested = np.zeros((2, len(columns)), dtype=np.bool_)
    is_compared[compared] = True
    is_contested[contested] = True
    rows = order[is_compared[order]]
    if not len(rows):
        return []
    begins = np.ones(len(rows), dtype=np.bool_)
    begins[1:] = columns.name[rows[1:]] != columns.name[rows[:-1]]
    begins[1:] |= (columns.offset[rows[1:]] != columns.offset[rows[:-1]]).any(axis=1)
    starts = np.flatnonzero(begins)
    digest = digest_of[rows]
    lowest = np.minimum.reduceat(np.where(digest == 0, np.iinfo(np.uint64).max, digest), starts)
    differs = (lowest < np.maximum.reduceat(digest, starts)) | is_contested[rows[starts]]
    ends = np.append(starts[1:], len(rows))
    found = []
    for begin, end in zip(starts[differs].tolist(), ends[differs].tolist(), strict=True):
        same: dict[int, list[int]] = {}
        for row in rows[begin:end].tolist():
            same.setdefault(int(digest_of[row]), []).append(int(columns.rank[row]))
        row = int(rows[begin])
        offsets = tuple(columns.offset[row, : columns.ndim[row]].tolist())
        key = columns.names[columns.name[row]]
        found.append(Differing(key, offsets, tuple(map(tuple, same.values())), bool(is_contested[row])))
    return found
