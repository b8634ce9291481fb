"""Makes the files of a lost node anew, from the data and the parity of the other nodes of its group.

The order: the coordinator decides what is made where; the ranks there get the pieces, and write them under other names;
each file is read back and compared with its own checksums and with those of the note; then all files get their names,
also the small ones, such as ``.metadata``, and the last one is a data file. Killed in between, the next load begins
again, with the files that are still missing.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from robust_dcp.comm import Channel, Offer
from robust_dcp.drain.record import DRAIN_RECORD_NAME
from robust_dcp.environment import node_name
from robust_dcp.errors import CorruptCheckpoint, StorageError
from robust_dcp.nodes.combine import (
    UNFINISHED,
    Combining,
    Parts,
    Stream,
    crc32_of_files,
    remove_unfinished,
)
from robust_dcp.nodes.parity_file import (
    PARITY,
    GroupNote,
    NodeNote,
    ParityNote,
    Part,
    parity_name,
    read_parity_note,
    write_note,
)
from robust_dcp.nodes.places import where
from robust_dcp.report import listed
from robust_dcp.storage.committing.saving_file import claimed, is_gone
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME, READ_BY_NAME, name_before_commit, writer_of
from robust_dcp.storage.reader import RobustReader

logger = logging.getLogger(__name__)

_CHECKED_NBYTES: Final = 8 << 20
_BEGINS_AGAIN: Final = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_TRIES: Final = 3


class _Seen(msgspec.Struct, frozen=True):
    """What some ranks see of the checkpoint.

    Attributes:
        ranks: these ranks.
        where: their directory.
        host: the name of the node.
        room_nbytes: how much is free there.
        fit: the digest of the ``.metadata`` there; empty if there is none.
        files: the data files of the checkpoint that are there.
        note: of the parity that is there.
        has_unfinished: whether files are there that a load has not finished.
    """

    ranks: tuple[int, ...]
    where: str
    host: str
    room_nbytes: int
    fit: bytes
    files: frozenset[str]
    note: ParityNote | None
    has_unfinished: bool


class _Lost(msgspec.Struct, frozen=True):
    """A node whose files are made anew.

    Attributes:
        group: its group.
        number: its number there.
        files: the names of the files that are missing.
        data, parity: for each node of the group, the ranks that see its data, and its parity. For this node, those that
            see the directory where its files are made.
        cleaners: ranks, each of another directory, that remove what a load has left there that was killed.
        makes_parity: whether the parity of the node is made there, too.
        gets_metadata: whether ``.metadata`` is missing there.
    """

    group: GroupNote
    number: int
    files: tuple[str, ...]
    data: tuple[tuple[int, ...], ...]
    parity: tuple[tuple[int, ...], ...]
    cleaners: tuple[int, ...]
    makes_parity: bool
    gets_metadata: bool

    @property
    def writers(self) -> tuple[int, ...]:
        """The ranks that make the files. The first one leads."""
        return self.data[self.number]


class _Plan(msgspec.Struct, frozen=True):
    """What is made anew; or why that cannot be, in words."""

    lost: tuple[_Lost, ...] = ()
    reason: str = ""


class _SmallFiles(msgspec.Struct, frozen=True):
    """The files beside the data, by name, in the order in which they are written."""

    files: dict[str, bytes]


class Checkpoint(NamedTuple):
    """A checkpoint on nodes that do not share its directory: who reads it on this rank, the mark of its save, and a
    rank that sees its ``.metadata``."""

    reader: RobustReader
    mark: str
    leader: int


def make_anew(channel: Channel, phase: str, checkpoint: Checkpoint, lost: Collection[str]) -> str:
    """Make the files of lost nodes anew, if others of their groups can. All ranks call this together.

    Args:
        phase: what the names of exchanges begin with.
        lost: data files that no rank sees.

    Returns:
        Why that cannot be done; empty if all of ``lost`` are there now.

    Raises:
        RobustCheckpointError: the same on all ranks: something else failed.
    """
    look, offer = partial(_look, channel.rank, checkpoint), Offer(value=checkpoint.reader.options.buffer_bytes)
    for n_left in reversed(range(_TRIES)):
        _, seen = channel.gather(f"{phase}: what is on each node", look, _Seen, offer=lambda _: offer)
        buffer_nbytes = channel.last_agreement.lowest
        make_plan = partial(_plan, [each for each in seen or () if each is not None], lost, checkpoint.leader)
        plan = channel.broadcast(f"{phase}: what is made anew", make_plan, _Plan)
        if plan.reason:
            return plan.reason
        try:
            for each in plan.lost:
                _MakingAnew(channel, phase, checkpoint, each).run(buffer_nbytes)
            return ""
        except StorageError as error:  # the same on all ranks
            if error.errno not in _BEGINS_AGAIN or not n_left:
                raise
            logger.warning("%s: a directory has vanished, and files are made anew once more: %s", phase, error.message)
    return ""


def _look(rank: int, checkpoint: Checkpoint) -> _Seen:
    source, mark = checkpoint.reader.source, checkpoint.mark
    disk, path = source.disk, source.path
    names = disk.list_directory(path) if disk.exists(path) else []
    files = frozenset(name for name in names if (writer := writer_of(name)) and writer.mark == mark)
    note = read_parity_note(disk, path, mark) if mark and names else None
    has_unfinished, room_nbytes = any(name.endswith(UNFINISHED) for name in names), disk.room(path)[1]
    return _Seen((rank,), where(disk, path), node_name(rank), room_nbytes, source.fit(), files, note, has_unfinished)


def _plan(seen: Sequence[_Seen], lost: Collection[str], leader: int) -> _Plan:
    """On the coordinator: decide what is made anew, and where."""
    of_directories: dict[str, list[_Seen]] = {}
    for one in seen:
        of_directories.setdefault(one.where, []).append(one)
    directories = [
        # A name that nothing can be read under, such as that of a link to a place that is gone, is no file.
        replace(first, ranks=tuple(each.ranks[0] for each in (first, *others)), files=first.files.difference(lost))
        for first, *others in of_directories.values()
    ]
    fit = next(one.fit for one in directories if leader in one.ranks)
    there = frozenset[str]().union(*(one.files for one in directories))
    groups: dict[GroupNote, dict[int, _Seen]] = {}
    for one in directories:
        if one.note is not None:
            groups.setdefault(one.note.group, {})[one.note.number] = one
    planned: list[_Lost] = []
    left, taken = set(lost), set[str]()
    for group, keepers in groups.items():
        names = [{file.name for file in node.files} for node in group.nodes]
        of_group = set[str]().union(*names)
        if left.isdisjoint(of_group):
            continue
        left -= of_group
        data = [next((one.ranks for one in directories if each <= one.files), ()) for each in names]
        parity = [keepers[each].ranks if each in keepers else () for each in range(len(names))]
        missing = [number for number, ranks in enumerate(data) if not ranks]
        without = [number for number, ranks in enumerate(parity) if not ranks and number not in missing]
        if len(missing) > 1 or without:
            return _Plan(reason=_why_not(group, missing, without))
        (number,) = missing
        node = group.nodes[number]
        files = names[number] - there
        nbytes = sum(file.nbytes for file in node.files if file.name in files)
        free = [one for one in directories if one.where not in taken and one.fit in (b"", fit)]
        place = _place_for(node, keepers.get(number), [one for one in free if one.room_nbytes > nbytes])
        if place is None:
            return _Plan(reason=f"no node of this load has room for the {nbytes} bytes of {node.host}")
        taken.add(place.where)
        data[number] = parity[number] = place.ranks
        planned.append(
            _Lost(
                group,
                number,
                tuple(sorted(files)),
                data=tuple(data),
                parity=tuple(parity),
                cleaners=tuple(one.ranks[0] for one in directories if one.has_unfinished and one is not place),
                makes_parity=place.note is None and not place.fit,
                gets_metadata=not place.fit,
            )
        )
    if left:
        return _Plan(reason=f"no node of this load has parity by which {listed(sorted(left))} could be made anew")
    return _Plan(tuple(planned))


def _place_for(node: NodeNote, keeper: _Seen | None, with_room: Sequence[_Seen]) -> _Seen | None:
    """Where the files of a node are made: in its own directory, if some are left there, or in one that has none of the
    checkpoint, that of the same host before others, else where there is most room."""
    names = {file.name for file in node.files}

    def suits(one: _Seen) -> tuple[bool, bool, bool, bool, int]:
        is_empty = not (one.fit or one.files)
        return one == keeper, not names.isdisjoint(one.files), is_empty, one.host == node.host, one.room_nbytes

    return max(with_room, key=suits, default=None)


def _why_not(group: GroupNote, missing: Sequence[int], without: Sequence[int]) -> str:
    hosts = [node.host for node in group.nodes]
    of_group = f"the group of {listed(hosts)}"
    if len(missing) > 1:
        there = [host for number, host in enumerate(hosts) if number not in missing]
        lost = listed(hosts[number] for number in missing)
        return (
            f"{of_group} has lost {len(missing)} nodes, {lost}, and its parity makes up for one; there is "
            f"what {listed(there) or 'no node'} has written"
        )
    return f"{of_group} has lost {hosts[missing[0]]}, and the parity on {listed(hosts[each] for each in without)}"


class _MakingAnew:
    """What one rank does to make the files of a lost node anew."""

    def __init__(self, channel: Channel, phase: str, checkpoint: Checkpoint, lost: _Lost) -> None:
        self._channel = channel
        self._phase = f"{phase}: node {lost.number} of {lost.group.mark}"
        self._lost = lost
        self._checkpoint = checkpoint
        self._disk, self._path = checkpoint.reader.source.disk, checkpoint.reader.path
        self._leads = channel.rank == lost.writers[0]
        self._parity_names = [parity_name(lost.group.mark)] if lost.makes_parity else []
        made = (*self._parity_names, *lost.files)
        self._direct = checkpoint.reader.options.direct
        self._parts = Parts(self._disk, self._path, lost.group, made, self._direct)

    def run(self, buffer_nbytes: int) -> None:
        channel, phase, lost = self._channel, self._phase, self._lost
        if channel.is_coordinator:
            host = lost.group.nodes[lost.number].host
            logger.warning(
                "%s: %d files of %s are lost, and are made anew by rank(s) %s from what %s have",
                phase,
                len(lost.files),
                host,
                listed(lost.writers),
                listed(node.host for node in lost.group.nodes if node.host != host),
            )
        numbers = [*range(len(lost.group.nodes) - 1), *([PARITY] if lost.makes_parity else [])]
        with ExitStack() as held:
            held.callback(self._parts.close)
            channel.barrier(f"{phase}: begin", lambda: self._create(held))
            combining = Combining(
                channel,
                self._parts,
                [Part(lost.number, number) for number in numbers],
                ranks_of=lambda part: (lost.parity if part.number == PARITY else lost.data)[part.node],
                buffer_nbytes=buffer_nbytes,
            )
            combining.run(f"{phase}: move")
            channel.barrier(f"{phase}: sync", self._parts.sync)
            try:
                channel.barrier(f"{phase}: compare", lambda: self._check([lost.number], UNFINISHED))
            except CorruptCheckpoint:
                # What was read outside of blocks has no checksum of its own: the note has one of the whole file.
                others = [number for number in range(len(lost.data)) if number != lost.number]
                channel.barrier(f"{phase}: who is damaged", lambda: self._check(others))
                raise
            lacking = lost.writers[:1] if lost.gets_metadata else ()
            beside = files_beside_data(channel, phase, self._checkpoint, lacking)
            channel.barrier(f"{phase}: commit", lambda: self._commit(beside))

    def _create(self, held: ExitStack) -> None:
        """Make the files under other names, in a directory that no save begins in meanwhile."""
        if not self._leads and self._channel.rank not in self._lost.cleaners:
            return
        disk = self._disk
        disk.mkdirs(self._path)
        for other in held.enter_context(claimed(disk, self._path)):
            if other.is_over and other.is_claim:  # of a load that was killed while it did the same
                is_gone(disk.unlink, os.path.join(self._path, other.name))
        held.callback(remove_unfinished, disk, self._path)
        if self._leads:
            self._parts.create()

    def _check(self, numbers: Collection[int], suffix: str = "") -> None:
        """Read files of nodes, and compare them with their own checksums and those of the note. Ranks that see the same
        files share the work.

        Raises:
            CorruptCheckpoint: one is damaged.
        """
        lost, channel = self._lost, self._channel
        for number in numbers:
            ranks, files = lost.data[number], lost.group.nodes[number].files
            if number == lost.number:
                files = tuple(file for file in files if file.name in lost.files)
            first = ranks.index(channel.rank) if channel.rank in ranks else len(files)
            for file in files[first :: len(ranks)]:
                node = NodeNote("", (), (file,))
                stream = Stream(self._disk, self._path, node, lost.group.mark, suffix, self._direct)
                buffer = np.empty(min(file.nbytes, _CHECKED_NBYTES), dtype=np.uint8)
                try:
                    for at in range(0, file.nbytes, _CHECKED_NBYTES):
                        stream.read(at, buffer[: file.nbytes - at])
                        channel.check_stop(at, file.nbytes)
                finally:
                    stream.close()
                (crc,) = crc32_of_files(stream.runs, (file,))
                if crc != file.crc32:
                    path = os.path.join(self._path, file.name)
                    raise CorruptCheckpoint.of_file(path, f"CRC-32 {file.crc32:08x}", f"{crc or 0:08x}")

    def _commit(self, beside: Mapping[str, bytes]) -> None:
        """Give all files their names, one right after the other. A data file comes last: as long as one is missing, the
        next load begins again, and then nothing else stays missing either."""
        if not self._leads:
            return
        for name, data in beside.items():
            self._disk.write_file(os.path.join(self._path, name + UNFINISHED), data)
        for name in self._parity_names:
            note = ParityNote(self._lost.number, self._lost.group)
            write_note(self._disk, os.path.join(self._path, name + UNFINISHED), note)
        *names, last = self._lost.files
        self._parts.give_names((*self._parity_names, *names, *beside, last))


def files_beside_data(
    channel: Channel, phase: str, checkpoint: Checkpoint, ranks: Collection[int]
) -> Mapping[str, bytes]:
    """What a checkpoint has beside its data, on the ranks that lack it: ``.metadata`` comes last. All ranks call it."""
    disk, path = checkpoint.reader.source.disk, checkpoint.reader.path

    def read() -> list[_SmallFiles | None]:
        last = (INDEX_NAME, METADATA_NAME)
        names = {each for name in READ_BY_NAME for each in (name, name_before_commit(name, checkpoint.mark))}
        files = {}
        for name in (*sorted((names | {DRAIN_RECORD_NAME}) - {*last}), *last) if ranks else ():
            data = disk.read_file(os.path.join(path, name))
            if data is not None:
                files[name] = data
        message = _SmallFiles(files)
        return [message if rank in ranks else None for rank in range(channel.size)]

    leader = channel.led_by(checkpoint.leader)
    _, beside = leader.scatter(f"{phase}: files beside the data", read, _SmallFiles)
    return {} if beside is None or channel.rank not in ranks else beside.files
