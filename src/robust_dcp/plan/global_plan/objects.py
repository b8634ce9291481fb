"""Checks whether objects (items that are not tensors) that several ranks hold under one name are the same.

This module computes the digest of an object, and finds names with digests that differ. A difference is reported,
because only one of the copies is saved.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from robust_dcp.plan.global_plan.columns import GlobalColumns
from robust_dcp.plan.structure import ItemKind

__all__ = ["combined_digest", "differing_objects", "object_digest"]

UInt64 = npt.NDArray[np.uint64]


def object_digest(value: Any) -> int:
    """A 64-bit digest of an object's contents; 0 if it cannot be computed because the object does not pickle.

    The bytes are only hashed, never loaded. In rare cases two equal objects pickle differently (the order of a set of
    strings). So a difference is a reason for a warning, but no proof.
    """
    try:
        data: Any = value.getvalue() if isinstance(value, io.BytesIO) else pickle.dumps(value, protocol=4)
    except Exception:  # a user's __reduce__ may raise anything; the writer reports it if it matters
        return 0
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


def combined_digest(digests: UInt64) -> int:
    """One 64-bit digest of several digests; 0 if there are none or one of them is unknown."""
    if not len(digests) or not digests.all():
        return 0
    return int.from_bytes(hashlib.blake2b(digests.tobytes(), digest_size=8).digest(), "little") or 1


def differing_objects(columns: GlobalColumns, digests: Sequence[UInt64]) -> dict[str, tuple[int, ...]]:
    """Names of objects with digests that differ between ranks, each with the ranks that hold it.

    Args:
        digests: for each rank the digests of its objects, in table order.
    """
    rows = np.flatnonzero(columns.kind == ItemKind.BYTES)
    if not len(rows):
        return {}
    digest = np.concatenate(list(digests))
    order = np.argsort(columns.name[rows], kind="stable")
    rows, digest = rows[order], digest[order]
    names = columns.name[rows]
    starts = np.flatnonzero(np.diff(names, prepend=-1))
    # A digest of 0 is unknown, so treat it as equal to everything.
    low = np.minimum.reduceat(np.where(digest == 0, np.iinfo(np.uint64).max, digest), starts)
    high = np.maximum.reduceat(digest, starts)
    differing: dict[str, tuple[int, ...]] = {}
    for place in np.flatnonzero(low < high).tolist():
        name = int(names[starts[place]])
        differing[columns.names[name]] = tuple(sorted(columns.rank[rows[names == name]].tolist()))
    return differing
