"""Which rank sees which file of a checkpoint, where nodes do not share its directory.

Ranks are asked only after a load has failed, so a load from a shared directory pays nothing for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.comm import Channel
from robust_dcp.errors import CorruptCheckpoint, RobustCheckpointError, ranks_in_words
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
    """Data files that a rank needs or was asked for, and does not see.

    ``nodes`` are those that wrote the checkpoint, if they do not share its directory and this rank knows them.
    """

    files: tuple[str, ...]
    nodes: tuple[NodeOfSave, ...] = ()


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


class _Stored(msgspec.Struct, frozen=True):
    """The mark of a checkpoint's save, and the names of its data files."""

    mark: str
    files: tuple[str, ...]


class _Sees(msgspec.Struct, frozen=True):
    """What a rank sees of a checkpoint.

    Attributes:
        where: tells its directory from others.
        metadata: whether ``.metadata`` is there.
        files: a bit for each data file.
    """

    where: str
    metadata: bool
    files: bytes


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

    def read() -> _Stored:
        metadata = reader.read_metadata()
        save_id = getattr(metadata.storage_meta, "save_id", None)
        names = {info.relative_path for info in (metadata.storage_data or {}).values()}
        return _Stored(mark_of(save_id) if isinstance(save_id, str) else "", tuple(sorted(names)))

    stored = channel.led_by(leader).broadcast(f"{phase}: its files", read, _Stored)

    def look() -> _Sees:
        missing = set(reader.missing_files(stored.files))
        bits = np.packbits([name not in missing for name in stored.files])
        return _Sees(where(disk, path), bool(reader.source.fit()), bits.tobytes())

    sees, there = _look_everywhere(channel, f"{phase}: what is there", look, len(stored.files))
    lost = {name for name, column in zip(stored.files, there.T, strict=True) if not column.any()}
    checkpoint = Checkpoint(reader.source, stored.mark, leader, reader.options.buffer_bytes)
    why_not = make_anew(channel, phase, checkpoint, lost) if lost else ""
    if why_not:
        raise CorruptCheckpoint(
            f"{path} has lost {len(lost)} data files: {listed(sorted(lost))}. They cannot be made anew: {why_not}. "
            "Load with a rank on each node that has files, or take another checkpoint",
            file=min(lost),
            expected="the file on a node of this load",
            found="none",
        )
    lacking = {each.where: rank for rank, each in enumerate(sees) if not each.metadata}
    beside = files_beside_data(channel, phase, checkpoint, tuple(lacking.values()))

    def write() -> None:
        if beside:
            disk.mkdirs(path)
        for name, data in beside.items():
            disk.replace_file(os.path.join(path, name), data)

    channel.barrier(f"{phase}: write them", write)
    if lost:
        sees, there = _look_everywhere(channel, f"{phase}: what is there now", look, len(stored.files))
    holders = [np.flatnonzero(column) for column in there.T]
    turns = [each[number % len(each)] if len(each) else -1 for number, each in enumerate(holders)]
    leads = all(each.where != sees[channel.rank].where for each in sees[: channel.rank])
    files = [name for name, rank in zip(stored.files, turns, strict=True) if rank == channel.rank]
    return WholeCheckpoint(bool(lacking), leads, files)


def _look_everywhere(
    channel: Channel, phase: str, look: Callable[[], _Sees], n_files: int
) -> tuple[list[_Sees], npt.NDArray[np.bool_]]:
    """What each rank sees; and of each data file, in a column, which ranks see it."""
    sees = channel.all_gather(phase, look, _Sees)
    bits = np.frombuffer(b"".join(each.files for each in sees), dtype=np.uint8).reshape(len(sees), -1)
    return sees, np.unpackbits(bits, axis=1, count=n_files).astype(bool)


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
    unseen = channel.all_gather(
        f"{phase}: who has them", lambda: _Missing(tuple(reader.missing_files(wanted)), reader.nodes()), _Missing
    )
    # From here to the next exchange all ranks decide alike, because all have heard the same.
    holders = {name: [rank for rank, each in enumerate(unseen) if name not in each.files] for name in wanted}
    lost = [name for name in wanted if not holders[name]]
    nodes = next((each.nodes for each in unseen if each.nodes), ())
    if len(lost) == len(wanted) and not nodes:
        return None  # one directory, from which a file is gone
    if lost:
        save_id = getattr(reader.metadata.storage_meta, "save_id", None)
        mark = mark_of(save_id) if isinstance(save_id, str) else ""
        why_not = make_anew(channel, phase, Checkpoint(reader.source, mark, source, reader.options.buffer_bytes), lost)
        if not why_not:
            return find_files(channel, phase, reader, needed, source) or FilesElsewhere((), {})
        ranks = [rank for rank, each in enumerate(missing) if set(lost) & set(each.files)]
        raise _lost(reader, lost, ranks, nodes, why_not)
    return FilesElsewhere(frozenset(missing[channel.rank].files), holders)


def _lost(
    reader: RobustReader, lost: Sequence[str], ranks: Sequence[int], nodes: Sequence[NodeOfSave], why_not: str
) -> RobustCheckpointError:
    """The error for files that no rank of the load sees."""
    keys = reader.keys_in(lost)
    files = []
    for name in lost:
        writer = writer_of(name)
        host = next((node.host for node in nodes if writer is not None and writer.rank in node.ranks), None)
        files.append(name if host is None or writer is None else f"{name} (written by rank {writer.rank} on {host})")
    return CorruptCheckpoint(
        f"{reader.path} has its files on several nodes, and {len(lost)} of them are on no node of this load: "
        f"{listed(files)}. They are wanted by {ranks_in_words(ranks)} and hold parts of {len(keys)} "
        f"keys: {listed(map(repr, keys))}. They cannot be made anew: {why_not}. "
        "Load with a rank on each node that has files, copy the files of all nodes into one directory, or take "
        "another checkpoint",
        file=lost[0],
        item=keys[0] if keys else None,
        expected="the file on a node of this load",
        found="none",
    )
