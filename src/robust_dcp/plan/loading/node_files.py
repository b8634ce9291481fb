"""Finds out which data files each rank of a load sees, where nodes do not share the directory of the checkpoint.

This module owns the exchanges: who misses which files, who has them, whose ``.metadata`` to take. It is asked only
after a load has failed, so a load from a shared directory pays nothing for it. ``api.load`` calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import msgspec
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from robust_dcp.comm import Channel
from robust_dcp.errors import CorruptCheckpoint, RobustCheckpointError, ranks_in_words
from robust_dcp.plan.loading.fetch_plan import FetchShare, Requests, plan_fetch
from robust_dcp.plan.loading.fetched_reads import FetchedReads
from robust_dcp.storage.files.nodes_file import NodeOfSave
from robust_dcp.storage.files.paths import writer_of
from robust_dcp.storage.reader import RobustReader

__all__ = ["find_elsewhere", "ranks_with_metadata"]

logger = logging.getLogger(__name__)

_SHOWN = 8


class _Committed(msgspec.Struct, frozen=True):
    """The digest of the ``.metadata`` that a rank sees; empty if it sees none."""

    fit: bytes


class _Files(msgspec.Struct, frozen=True):
    """Names of data files."""

    names: tuple[str, ...]


class _Seen(msgspec.Struct, frozen=True):
    """For each of some files, whether a rank sees it."""

    are_here: tuple[bool, ...]


class _Verdict(msgspec.Struct, frozen=True):
    """Whether there is something to fetch."""

    is_elsewhere: bool


def ranks_with_metadata(channel: Channel, checkpoint: str, reader: RobustReader) -> list[int]:
    """For each ``.metadata`` that some rank sees, the first rank that sees it; the coordinator comes first."""
    told = channel.all_gather(
        f"load {checkpoint}: who has .metadata", lambda: _Committed(reader.source.fit()), _Committed
    )
    first: dict[bytes, int] = {}
    for rank in sorted(range(channel.size), key=lambda rank: rank != channel.coordinator_rank):
        if told[rank].fit:
            first.setdefault(told[rank].fit, rank)
    return list(first.values())


def find_elsewhere(
    channel: Channel, checkpoint: str, reader: RobustReader, plan: LoadPlan, planner: LoadPlanner
) -> tuple[FetchedReads, FetchShare] | None:
    """Agree on who reads what for ranks that do not see it.

    Args:
        plan: this rank's plan, made with the metadata that ``reader`` has.

    Returns:
        ``None`` on all ranks if no rank misses a file, or if no other node is known that could have it.

    Raises:
        CorruptCheckpoint: no rank of the load sees a file that is needed. The error names the files, the nodes that
            wrote them, and the keys in them.
        RobustCheckpointError: the same on all ranks.
    """
    phase = f"load {checkpoint}"
    reads = []
    missing: list[str] = []

    def miss() -> _Files | None:
        reads.extend(reader.places_of(plan))
        missing.extend(reader.missing_files({read.relative_path for read in reads}))
        return _Files(tuple(missing)) if missing else None

    told = channel.gather(f"{phase}: missing files", miss, _Files)

    def all_missing() -> _Files:
        return _Files(tuple(sorted({name for each in told or [] if each is not None for name in each.names})))

    wanted = channel.broadcast(f"{phase}: wanted files", all_missing, _Files).names
    if not wanted:
        return None

    def see() -> _Seen:
        lacks = set(reader.missing_files(wanted))
        return _Seen(tuple(name not in lacks for name in wanted))

    seen = channel.gather(f"{phase}: who has them", see, _Seen)
    holders: dict[str, list[int]] = {}

    def judge() -> _Verdict:
        for place, name in enumerate(wanted):
            holders[name] = [rank for rank, each in enumerate(seen or []) if each is not None and each.are_here[place]]
        lost = [name for name in wanted if not holders[name]]
        nodes = reader.nodes()
        if len(lost) == len(wanted) and not nodes:
            return _Verdict(is_elsewhere=False)  # one directory, from which a file is gone
        if lost:
            ranks = [
                rank
                for rank, each in enumerate(told or [])
                if each is not None and not set(lost).isdisjoint(each.names)
            ]
            raise _lost(reader, lost, ranks, nodes)
        return _Verdict(is_elsewhere=True)

    if not channel.broadcast(f"{phase}: are they elsewhere", judge, _Verdict).is_elsewhere:
        return None
    fetched: list[FetchedReads] = []

    def ask() -> Requests | None:
        fetched.append(FetchedReads(reader, planner, plan, reads, set(missing)))
        return fetched[0].requests if fetched[0].requests.boxes else None

    requests = channel.gather(f"{phase}: wanted parts", ask, Requests)
    share = channel.scatter(f"{phase}: parts to read", lambda: plan_fetch(requests or [], holders), FetchShare)
    if channel.is_coordinator:
        logger.info("%s: %d of its files are read by ranks on other nodes", checkpoint, len(wanted))
    return fetched[0], FetchShare(0, ()) if share is None else share


def _lost(
    reader: RobustReader, lost: Sequence[str], ranks: Sequence[int], nodes: Sequence[NodeOfSave]
) -> RobustCheckpointError:
    """The error for files that no rank of the load sees."""
    keys = reader.keys_in(lost)
    files = ", ".join(f"{name}{_written_on(name, nodes)}" for name in lost[:_SHOWN])
    return CorruptCheckpoint(
        f"{reader.path} has its files on several nodes, and {len(lost)} of them are on no node of this load: {files}"
        f"{_more(lost)}. They are wanted by {ranks_in_words(ranks)} and hold parts of {len(keys)} keys: "
        f"{', '.join(map(repr, keys[:_SHOWN]))}{_more(keys)}. Load with a rank on each node that has files, copy the "
        "files of all nodes into one directory, or take another checkpoint",
        file=lost[0],
        item=keys[0] if keys else None,
        expected="the file on a node of this load",
        found="none",
    )


def _more(things: Collection[str]) -> str:
    return f" and {len(things) - _SHOWN} more" if len(things) > _SHOWN else ""


def _written_on(name: str, nodes: Sequence[NodeOfSave]) -> str:
    writer = writer_of(name)
    host = next((node.host for node in nodes if writer is not None and writer.rank in node.ranks), None)
    return "" if host is None or writer is None else f" (written by rank {writer.rank} on {host})"
