"""Checks whether the replicas of a tensor hold the same data: what a save compares, and what the ranks found.

This module chooses what to compare, and words the warnings. Each rank sends digests to the coordinator together with
what it reports about its files. The planner computes the digests. ``plan.session`` calls this module.

| ``verify_replicas`` | what is compared in each save |
| --- | --- |
| ``"off"`` | nothing |
| ``"sample"`` | about 32 replicated chunks, at most 1 MiB of each; others in a checkpoint of another name |
| ``"all"`` | all bytes of all replicated chunks |

Main replicas that two ranks claim are compared in any mode, in the save that makes a new plan.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from robust_dcp.errors import ExchangeError, ranks_in_words
from robust_dcp.plan.structure import StructureTable

__all__ = [
    "SAMPLE_NBYTES",
    "Differing",
    "DigestItems",
    "ReplicaChecks",
    "VerifyReplicas",
    "compare",
    "digest_columns",
    "n_classes_of",
    "report",
]

logger = logging.getLogger(__name__)

Places = npt.NDArray[np.intp]
UInt64 = npt.NDArray[np.uint64]

VerifyReplicas = Literal["off", "sample", "all"]

DigestItems = Callable[[list[int], UInt64, int | None], list[int]]
"""Computes digests of items: (places in the table, identities, limit in bytes or ``None``) -> 64 bits each, 0 if
unknown."""

SAMPLE_NBYTES = 1 << 20
"""How many bytes of a sampled chunk are compared at most."""

_SAMPLED_CHUNKS = 32
_SHOWN = 8

_SAMPLED = 0
_CONTESTED = 1


_reported: set[tuple[bool, str]] = set()
"""What this process has warned of. Copies that have drifted differ in every later save too."""


def _nothing() -> Places:
    return np.empty(0, dtype=np.intp)


@dataclass(frozen=True, eq=False)
class ReplicaChecks:
    """What one rank may have to compare, as places in its table.

    Attributes:
        replicated: chunks of tensors that other ranks hold too; empty with ``verify_replicas="off"``.
        n_classes: how many classes the replicated chunks are divided into. A save compares one class.
        contested: items that claim to be the main replica, as items of other ranks do.
    """

    replicated: Places = field(default_factory=_nothing)
    n_classes: int = 1
    contested: Places = field(default_factory=_nothing)


@dataclass(frozen=True)
class Differing:
    """A chunk with contents that differ between ranks, or with several ranks that claim the main replica.

    Attributes:
        key, offsets: the name and offsets of the chunk.
        ranks: the compared ranks, grouped by what they hold. The first group holds what the lowest rank holds.
    """

    key: str
    offsets: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        at = f" at {list(self.offsets)}" if any(self.offsets) else ""
        return f"{self.key!r}{at} ({' / '.join(ranks_in_words(list(same)) for same in self.ranks)})"


def n_classes_of(n_replicated: int, mode: VerifyReplicas) -> int:
    """Choose the number of classes so that one class has about as many chunks as one save may compare."""
    return 1 if mode == "all" else max(1, -(-n_replicated // _SAMPLED_CHUNKS))


def digest_columns(
    table: StructureTable,
    checks: ReplicaChecks,
    mode: VerifyReplicas,
    checkpoint: str,
    digest: DigestItems,
    *,
    is_new: bool,
) -> bytes:
    """The digests of the chunks that this save compares: uint64 ``[n, 3]`` of identity, digest and reason.

    Every rank chooses the same chunks, because the choice depends only on the chunk and the checkpoint's name.

    Args:
        mode: the mode of all ranks.
        checkpoint: its name.
        digest: computes the digests of items.
        is_new: whether the plan was made in this save. Only then are contested replicas compared.
    """
    contested = checks.contested if is_new else _nothing()
    if not len(checks.replicated) and not len(contested):
        return b""
    identity = table.identities
    sampled = checks.replicated
    if checks.n_classes > 1:
        salt = hashlib.blake2b(checkpoint.encode(errors="surrogateescape"), digest_size=8).digest()
        turn = int.from_bytes(salt, "little") % checks.n_classes
        sampled = sampled[identity[sampled] % np.uint64(checks.n_classes) == np.uint64(turn)]
    rows = []
    for places, why, limit in ((sampled, _SAMPLED, SAMPLE_NBYTES), (contested, _CONTESTED, None)):
        own = identity[places]
        digests = digest(places.tolist(), own, limit if mode != "all" else None)
        rows.append(np.column_stack([own, np.array(digests, dtype=np.uint64), np.full(len(own), why, dtype=np.uint64)]))
    return np.concatenate(rows).astype("<u8").tobytes()


def compare(of_ranks: Sequence[bytes], tables: Sequence[StructureTable], *, contested: bool) -> tuple[Differing, ...]:
    """On the coordinator: the chunks that differ between ranks. With ``contested``: all that several ranks claim.

    Args:
        of_ranks: the :func:`digest_columns` of each rank.
        tables: the table of each rank.

    Raises:
        ExchangeError: a rank sent something that is not such columns.
    """
    if any(len(data) % 24 for data in of_ranks):
        raise ExchangeError("a rank sent digests of replicas that are not a whole number of rows")
    columns = [np.frombuffer(data, dtype="<u8").reshape(-1, 3) for data in of_ranks]
    rank = np.repeat(np.arange(len(columns)), [len(each) for each in columns])
    rows = np.concatenate(columns) if columns else np.empty((0, 3), dtype=np.uint64)
    taken = (rows[:, 2] == (_CONTESTED if contested else _SAMPLED)) & ((rows[:, 1] != 0) | contested)
    rows, rank = rows[taken], rank[taken]
    order = np.lexsort((rank, rows[:, 0]))
    rows, rank = rows[order], rank[order]
    found = []
    starts = np.flatnonzero(np.diff(rows[:, 0], prepend=rows[:1, 0] + np.uint64(1)) != 0)
    for begin, end in zip(starts.tolist(), [*starts[1:].tolist(), len(rows)], strict=False):
        digests = rows[begin:end, 1].tolist()
        if len(set(digests)) > 1 or (contested and end - begin > 1):
            same: dict[int, list[int]] = {}
            for digest, holder in zip(digests, rank[begin:end].tolist(), strict=True):
                same.setdefault(digest, []).append(holder)
            found.append(_named(tables[int(rank[begin])], int(rows[begin, 0]), same))
    return tuple(found)


def compare_replicas(
    of_ranks: Sequence[bytes], tables: Sequence[StructureTable], checkpoint: str
) -> tuple[Differing, ...]:
    """On the coordinator, after the commit: warn of chunks that differ, and return them. This never raises."""
    if not any(of_ranks):
        return ()
    try:
        differing = compare(of_ranks, tables, contested=False)
        report(differing, compare(of_ranks, tables, contested=True), checkpoint)
    except Exception as error:  # the checkpoint is committed, so the save has succeeded whatever this is
        logger.warning("%s: its replicas could not be compared: %s", checkpoint, error)
        return ()
    return differing


def _named(table: StructureTable, identity: int, same: dict[int, list[int]]) -> Differing:
    place = int(np.flatnonzero(table.identities == np.uint64(identity))[0])
    _, offsets, _ = table.dims_of(place)
    return Differing(table.names[int(table.name_ids[place])], offsets, tuple(map(tuple, same.values())))


def report(drifted: Sequence[Differing], contested: Sequence[Differing], checkpoint: str) -> None:
    """Warn of what was found. A process warns once of each key."""
    drifted = _not_told(drifted, contested=False)
    if drifted:
        logger.warning(
            "%s: %d tensor(s) are not the same on the ranks that hold copies of them (ranks that hold the same are "
            "named together): %s. One copy is saved, and all ranks will have that one after a load",
            checkpoint,
            len(drifted),
            _listed(drifted),
        )
    contested = _not_told(contested, contested=True)
    if contested:
        differing = sum(len(each.ranks) > 1 for each in contested)
        logger.warning(
            "%s: %d shard(s) have more than one main replica (replica_id 0), and the contents of %d of them differ: "
            "%s. That of the lowest rank is saved. validate_access_integrity=True refuses such a state dict: "
            "give all but one of them another replica_id",
            checkpoint,
            len(contested),
            differing,
            _listed(contested),
        )


def _not_told(found: Sequence[Differing], *, contested: bool) -> list[Differing]:
    new = [each for each in found if (contested, each.key) not in _reported]
    _reported.update((contested, each.key) for each in new)
    return new


def _listed(found: Sequence[Differing]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(map(str, found[:_SHOWN])) + more
