"""Makes a committed checkpoint outlive the loss of a node: parity over the nodes of a group, beside training.

The order: the nodes are dealt into groups; each reads back what it has written, which proves its drive too, and sends
it piece by piece to the nodes whose parity covers it; each makes its file of parity durable under another name; when
all have, each gives it its name. Whatever fails, the checkpoint stays committed, and is not protected.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial

import msgspec
from msgspec.structs import replace

from robust_dcp.comm import Channel, Offer
from robust_dcp.environment import node_name
from robust_dcp.errors import ExchangeError, RobustCheckpointError, StorageError
from robust_dcp.nodes.combine import (
    UNFINISHED,
    Combining,
    Parts,
    Run,
    crc32_of_files,
    remove_unfinished,
)
from robust_dcp.nodes.parity_file import (
    PAGE_NBYTES,
    PARITY,
    FileNote,
    GroupNote,
    NodeNote,
    ParityNote,
    Part,
    parity_name,
    segment_nbytes_of,
    write_note,
)
from robust_dcp.nodes.places import where
from robust_dcp.phases import PhaseClock
from robust_dcp.save_queue import SaveFuture, SaveQueue
from robust_dcp.storage.files.paths import mark_of, writer_of
from robust_dcp.storage.metadata.stored_pickle import needed_for_a_load
from robust_dcp.storage.options import BLOCKS_PER_THREAD
from robust_dcp.storage.writer import RobustWriter

logger = logging.getLogger(__name__)


class _Seen(msgspec.Struct, frozen=True):
    """What a rank sees of the checkpoint: its directory, and its node as far as this rank knows it. The ranks that have
    committed lead, and know the data files there."""

    where: str
    leads: bool
    node: NodeNote


class _Read(msgspec.Struct, frozen=True):
    """What a rank has read of the files of its node."""

    runs: list[Run]


@cache
def log_no_parity(root: str) -> None:
    """Say, once for each directory of checkpoints, that all ranks share it."""
    logger.info("%s is one directory for all ranks: parity_nodes means nothing there, and no parity is made", root)


def deal(n_nodes: int, size: int) -> list[range]:
    """Deal nodes into groups of about ``size`` that follow each other. None is smaller than 2."""
    n_groups = max(1, min((2 * n_nodes + size) // (2 * size), n_nodes // 2))
    return [range(each * n_nodes // n_groups, (each + 1) * n_nodes // n_groups) for each in range(n_groups)]


class Protection:
    """The parity of one save, on one rank.

    Args:
        writer: has written this rank's files.
        checkpoint: its name.
        leads: whether this rank has committed in its directory.
        open_channel: makes the channel, from the name of its operation.
        queue: the protections of the group.

    Attributes:
        future: of what :meth:`run` returns.
    """

    def __init__(
        self,
        writer: RobustWriter,
        checkpoint: str,
        *,
        leads: bool,
        open_channel: Callable[..., Channel],
        queue: SaveQueue,
    ) -> None:
        self.future = SaveFuture[str]()
        self._queue = queue
        self._after = queue.under_way()
        self._disk, self._path, self._mark = writer.disk, writer.path, mark_of(writer.save_id)
        self._options = writer.options
        self._checkpoint = checkpoint
        self._leads = leads
        self._open_channel = open_channel
        self._name = parity_name(self._mark)
        self._held = ExitStack()

    def begin(self) -> None:
        """Make the parity on a thread, after those that were under way when this was made. Until then the checkpoint is
        not removed."""
        if self._leads:
            self._held.enter_context(needed_for_a_load(self._disk, self._path))
        try:
            self._queue.submit(self.run, self.future, after=self._after)
        except RobustCheckpointError as error:  # no thread can be started
            self._held.close()
            self.future.set_result(self._not_protected(error))

    def run(self) -> str:
        """Make the parity. Called on all ranks.

        Returns:
            From what the checkpoint is protected, or why it is not.
        """
        try:
            with self._held:
                channel = self._open_channel(operation=f"protect {self._checkpoint}")
                clock = PhaseClock(channel, is_async=True)
                with clock.telling_failures(), channel.together():
                    clock.tell("started")
                    protection = self._protect(channel, clock)
                clock.tell("ended", seconds=clock.seconds)
                if channel.is_coordinator:
                    logger.info("%s is protected: %s (%.1f s)", self._checkpoint, protection, clock.seconds)
                return protection
        except Exception as error:
            return self._not_protected(error)

    def _not_protected(self, error: Exception) -> str:
        """Say that the checkpoint is not protected, and why. Nothing is left of what was made."""
        reason = error.message if isinstance(error, RobustCheckpointError) else f"{type(error).__name__}: {error}"
        if self._leads:
            with suppress(StorageError):
                remove_unfinished(self._disk, self._path)
            what = "is committed, and not protected: if a node is lost, so is this checkpoint"
            logger.warning("%s %s: %s", self._checkpoint, what, reason)
        return f"not protected: {reason}"

    def _protect(self, channel: Channel, clock: PhaseClock) -> str:
        phase, rank = channel.operation, channel.rank
        threads, block_nbytes = self._options.fitted(PAGE_NBYTES)
        buffer_nbytes = BLOCKS_PER_THREAD * threads * block_nbytes  # as much as the save had
        with clock.phase("plan"):
            look, offer = partial(self._look, rank), Offer(value=buffer_nbytes)
            _, seen = channel.gather(f"{phase}: nodes", look, _Seen, offer=lambda _: offer)
            buffer_nbytes, nodes = channel.last_agreement.lowest, _nodes_of(seen or [])
            _, group = channel.scatter(f"{phase}: groups", lambda: self._dealt(nodes, channel.size), GroupNote)
            parts = None if group is None else Parts(self._disk, self._path, group, (self._name,), self._options.direct)
            channel.barrier(f"{phase}: begin", lambda: parts.create() if parts and self._leads else None)
        of_nodes = () if group is None else group.nodes
        number = next((number for number, node in enumerate(of_nodes) if rank in node.ranks), -1)
        try:
            with clock.phase("exchange"):
                combining = Combining(
                    channel,
                    parts,
                    [Part(each, PARITY) for each in range(len(of_nodes))],
                    ranks_of=lambda part: of_nodes[part.node].ranks,
                    buffer_nbytes=buffer_nbytes,
                    side_by_side=True,
                )
                combining.run(f"{phase}: move")
                _, read = channel.gather(f"{phase}: read", lambda: self._finish(parts, number), _Read)
        finally:
            if parts is not None:
                parts.close()
        with clock.phase("commit"):

            def notes() -> list[GroupNote | None]:
                return self._dealt([_summed(node, read or []) for node in nodes], channel.size)

            _, group = channel.scatter(f"{phase}: notes", notes, GroupNote)
            note = None if group is None else ParityNote(number, group)
            path = os.path.join(self._path, self._name + UNFINISHED)
            channel.barrier(
                f"{phase}: write", lambda: write_note(self._disk, path, note) if note and self._leads else None
            )
            channel.barrier(f"{phase}: commit", lambda: parts.give_names(parts.made) if parts and self._leads else None)
        return "" if note is None else str(note)

    def _look(self, rank: int) -> _Seen:
        files: list[FileNote] = []
        for name in self._disk.list_directory(self._path) if self._leads else ():
            writer = writer_of(name)
            if writer is not None and writer.mark == self._mark:
                files.append(FileNote(name, self._disk.read_end(os.path.join(self._path, name), 0)[0]))
        node = NodeNote(node_name(rank), (rank,), tuple(files))
        return _Seen(where(self._disk, self._path), self._leads, node)

    def _dealt(self, nodes: Sequence[NodeNote], n_ranks: int) -> list[GroupNote | None]:
        """On the coordinator: the group of each rank; ``None`` for one in whose directory nobody has committed."""
        groups: list[GroupNote | None] = [None] * n_ranks
        for numbers in deal(len(nodes), self._options.parity_nodes or len(nodes)):
            of_group = tuple(nodes[number] for number in numbers)
            group = GroupNote(self._mark, segment_nbytes_of(of_group), of_group)
            for rank in (rank for node in of_group for rank in node.ranks):
                groups[rank] = group
        return groups

    def _finish(self, parts: Parts | None, number: int) -> _Read | None:
        """Make this rank's part of the parity durable."""
        if parts is None:
            return None
        parts.sync()
        return _Read(parts.runs(number))


def _nodes_of(seen: Sequence[_Seen | None]) -> list[NodeNote]:
    """On the coordinator: the nodes, in the order of the ranks that lead there, which come first in each."""
    nodes = {each.where: each.node for each in seen if each is not None and each.leads}
    for each in seen:
        if each is not None and not each.leads and each.where in nodes:
            node = nodes[each.where]
            nodes[each.where] = replace(node, ranks=node.ranks + each.node.ranks)
    return list(nodes.values())


def _summed(node: NodeNote, read: Sequence[_Read | None]) -> NodeNote:
    """On the coordinator: a node with the checksums of its files, from what each rank has read."""
    runs = [run for rank in node.ranks if (each := read[rank]) is not None for run in each.runs]
    files = []
    for file, crc in zip(node.files, crc32_of_files(runs, node.files), strict=True):
        if crc is None:
            raise ExchangeError(f"the ranks of {node.host} have not read all of {file.name}")
        files.append(replace(file, crc32=crc))
    return replace(node, files=tuple(files))
