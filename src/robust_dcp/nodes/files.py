"""Which rank sees which file of a checkpoint, where nodes do not share its directory.

Ranks are asked only after a load has failed, so a load from a shared directory pays nothing for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from torch.distributed.checkpoint.metadata import Metadata

from robust_dcp.comm import Channel
from robust_dcp.errors import CorruptCheckpoint, ranks_in_words
from robust_dcp.nodes.anew import Checkpoint, files_beside_data, make_anew
from robust_dcp.nodes.parity_file import read_parity_note
from robust_dcp.nodes.places import where
from robust_dcp.report import listed
from robust_dcp.storage.committing.save import NodeOfSave, read_nodes
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import mark_of, writer_of
from robust_dcp.storage.reader import RobustReader


class _Committed(msgspec.Struct, frozen=True):
    """The digest of the ``.metadata`` that a rank sees; empty if it sees none."""

    fit: bytes


class _Missing(msgspec.Struct, frozen=True):
    """Data files that a rank needs, and does not see."""

    files: tuple[str, ...]


class _Stored(msgspec.Struct, frozen=True):
    """The id of a checkpoint's save, empty if it has none, and the names of its data files."""

    save_id: str
    files: tuple[str, ...]

    @classmethod
    def of(cls, metadata: Metadata) -> _Stored:
        save_id = getattr(metadata.storage_meta, "save_id", None)
        names = {info.relative_path for info in (metadata.storage_data or {}).values()}
        return cls(save_id if isinstance(save_id, str) else "", tuple(sorted(names)))


class _Sees(msgspec.Struct, frozen=True):
    """What a rank sees of a checkpoint.

    Attributes:
        where: tells its directory from others.
        metadata: whether ``.metadata`` is there.
        files: a bit for each data file that was asked for.
        nodes: those that wrote the checkpoint, if they do not share its directory and this rank knows them.
    """

    where: str
    metadata: bool
    files: bytes
    nodes: tuple[NodeOfSave, ...]


class FilesElsewhere(NamedTuple):
    """Files that some ranks need, and do not see.

    Attributes:
        missing: those that this rank needs, and does not see.
        holders: for each that some rank lacks, the ranks that see it.
    """

    missing: Collection[str]
    holders: Mapping[str, Sequence[int]]


def files_elsewhere(disk: Disk, directory: str, save_id: str, names: Collection[str]) -> set[str]:
    """Those of the data files of a checkpoint that are on other nodes, if its nodes do not share the directory.

    Args:
        names: of all data files.
    """
    nodes, note = read_nodes(disk, directory, save_id), read_parity_note(disk, directory, mark_of(save_id))
    here = {name for name in names if disk.exists(os.path.join(directory, name))}
    writers = {name: writer.rank for name in names if (writer := writer_of(name)) is not None}
    ranks = {writers[name] for name in here & writers.keys()}
    if note is not None:
        ranks = set(note.group.nodes[note.number].ranks)
    of_others = {rank for node in nodes if ranks and ranks.isdisjoint(node.ranks) for rank in node.ranks}
    return {name for name in writers.keys() - here if writers[name] in of_others}


def ranks_with_metadata(channel: Channel, checkpoint: str, reader: RobustReader) -> list[int]:
    """For each ``.metadata`` that some rank sees, the first rank that sees it; the coordinator comes first."""
    committed = channel.all_gather(
        f"load {checkpoint}: who has .metadata", lambda: _Committed(reader.source.fit()), _Committed
    )
    first: dict[bytes, int] = {}
    for rank in sorted(range(channel.size), key=lambda rank: rank != channel.coordinator_rank):
        if committed[rank].fit:
            first.setdefault(committed[rank].fit, rank)
    return list(first.values())


class WholeCheckpoint(NamedTuple):
    """A checkpoint of which all files are on the nodes of some ranks, for one rank.

    Attributes:
        was_lacking: whether some rank lacked ``.metadata``, and none does now.
        leads: whether this rank is the first one that sees its directory.
        files: data files that it sees, so that each file is that of one rank.
    """

    was_lacking: bool = False
    leads: bool = False
    files: Sequence[str] = ()


def make_whole(channel: Channel, phase: str, path: str) -> WholeCheckpoint:
    """Where nodes do not share a directory, and some have lost it: give them what they lack. All ranks call this.

    Raises:
        CorruptCheckpoint: data files are lost, and cannot be made anew.
        RobustCheckpointError: the same on all ranks.
    """
    reader = RobustReader(path)
    disk = reader.source.disk
    (leader, *_) = (*ranks_with_metadata(channel, path, reader), None)
    if leader is None:
        return WholeCheckpoint()
    stored = channel.led_by(leader).broadcast(
        f"{phase}: its files", lambda: _Stored.of(reader.read_metadata()), _Stored
    )
    checkpoint = Checkpoint(reader, mark_of(stored.save_id), leader)
    sees, holders = _look_everywhere(channel, f"{phase}: what is there", reader, stored.save_id, stored.files)
    lost = [name for name, ranks in holders.items() if not ranks]
    why_not = make_anew(channel, phase, checkpoint, lost) if lost else ""
    if why_not:
        raise _lost(path, lost, sees, why_not)
    lacking = {each.where: rank for rank, each in enumerate(sees) if not each.metadata}
    beside = files_beside_data(channel, phase, checkpoint, tuple(lacking.values()))

    def write() -> None:
        if beside:
            disk.mkdirs(path)
        for name, data in beside.items():
            disk.replace_file(os.path.join(path, name), data)

    channel.barrier(f"{phase}: write them", write)
    if lost:
        sees, holders = _look_everywhere(channel, f"{phase}: what is there now", reader, stored.save_id, stored.files)
    leads = all(each.where != sees[channel.rank].where for each in sees[: channel.rank])
    # Those that see a file take turns, so that each has about as many.
    turns = [(name, ranks[number % len(ranks)]) for number, (name, ranks) in enumerate(holders.items()) if ranks]
    return WholeCheckpoint(bool(lacking), leads, [name for name, rank in turns if rank == channel.rank])


def find_files(
    channel: Channel, phase: str, reader: RobustReader, needed: Callable[[], Collection[str]], source: int
) -> FilesElsewhere | None:
    """Find the files that ranks need and do not see. Those of a node that is lost are made anew if they can be.

    Args:
        phase: what the names of exchanges begin with.
        needed: the files that this rank needs.
        source: a rank that sees the ``.metadata`` that is loaded.

    Returns:
        ``None`` on all ranks if no rank has missed a file, or if no other node is known that could have it.

    Raises:
        CorruptCheckpoint: no rank of the load sees a file that is needed. The error names the files, the nodes that
            wrote them, and the keys in them.
        RobustCheckpointError: the same on all ranks.
    """
    missing = channel.all_gather(
        f"{phase}: missing files", lambda: _Missing(tuple(reader.missing_files(needed()))), _Missing
    )
    wanted = sorted({name for each in missing for name in each.files})
    if not wanted:
        return None
    save_id = _Stored.of(reader.metadata).save_id
    sees, holders = _look_everywhere(channel, f"{phase}: who has them", reader, save_id, wanted)
    # From here to the next exchange all ranks decide alike, because all have heard the same.
    lost = [name for name, ranks in holders.items() if not ranks]
    if len(lost) == len(wanted) and not any(each.nodes for each in sees):
        return None  # one directory, from which a file is gone
    if lost:
        why_not = make_anew(channel, phase, Checkpoint(reader, mark_of(save_id), source), lost)
        if not why_not:
            return find_files(channel, phase, reader, needed, source) or FilesElsewhere((), {})
        ranks = [rank for rank, each in enumerate(missing) if not set(lost).isdisjoint(each.files)]
        keys = reader.keys_in(lost)
        held = f"{ranks_in_words(ranks)} and hold parts of {len(keys)} keys: {listed(map(repr, keys))}"
        raise _lost(reader.path, lost, sees, why_not, f" They are wanted by {held}.", keys[0] if keys else None)
    return FilesElsewhere(frozenset(missing[channel.rank].files), holders)


def _look_everywhere(
    channel: Channel, phase: str, reader: RobustReader, save_id: str, names: Sequence[str]
) -> tuple[list[_Sees], dict[str, list[int]]]:
    """What each rank sees; and for each data file the ranks that see it."""
    disk, path = reader.source.disk, reader.path

    def look() -> _Sees:
        missing = set(reader.missing_files(names))
        bits = np.packbits(np.array([name not in missing for name in names], dtype=bool))
        return _Sees(
            where(disk, path),
            bool(reader.source.fit()),
            bits.tobytes(),
            read_nodes(disk, path, save_id) if save_id else (),
        )

    sees = channel.all_gather(phase, look, _Sees)
    bits = np.frombuffer(b"".join(each.files for each in sees), dtype=np.uint8).reshape(len(sees), -(-len(names) // 8))
    there = np.unpackbits(bits, axis=1, count=len(names))
    return sees, {name: np.flatnonzero(column).tolist() for name, column in zip(names, there.T, strict=True)}


def _lost(
    path: str, lost: Sequence[str], sees: Sequence[_Sees], why_not: str, wanted: str = "", key: str | None = None
) -> CorruptCheckpoint:
    """The error for files that no rank of the load sees."""
    nodes = next((each.nodes for each in sees if each.nodes), ())
    files = []
    for name in lost:
        writer = writer_of(name)
        host = next((node.host for node in nodes if writer is not None and writer.rank in node.ranks), None)
        files.append(name if host is None or writer is None else f"{name} (written by rank {writer.rank} on {host})")
    return CorruptCheckpoint(
        f"{path} has its files on several nodes, and {len(lost)} of them are on no node of this load: {listed(files)}."
        f"{wanted} They cannot be made anew: {why_not}. "
        "Load with a rank on each node that has files, copy the files of all nodes into one directory, or take "
        "another checkpoint",
        file=lost[0],
        item=key,
        expected="the file on a node of this load",
        found="none",
    )
