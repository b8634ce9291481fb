"""What follows the commit of a save: ``on_commit``, the copy by the ranks that have saved, and what was staged.

A save to a URL is made in a local directory of its own first, and copied before it ends: it returns only if its
checkpoint has arrived. With ``RobustWriter(path, drain_to=…)`` the copy is made on a thread beside training. In either
copy each rank sends its own files, and the coordinator commits.

Several saves may be on their way to one URL. Each has staged what it copies for itself alone, and nobody else removes
that, but for what a save has left that was killed before its commit.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import msgspec

from robust_dcp.comm import Channel
from robust_dcp.drain.copy import Copy, CopyResult
from robust_dcp.drain.record import DrainRecord, announce_copy, awaited_copy, digest_at, note_arrival
from robust_dcp.errors import CorruptCheckpoint, RobustCheckpointError, StorageError
from robust_dcp.nodes.files import make_whole
from robust_dcp.phases import PhaseClock
from robust_dcp.save_queue import SaveFuture, SaveQueue
from robust_dcp.storage.committing.saving_file import sweep
from robust_dcp.storage.files.paths import METADATA_NAME, STAGING_PREFIX, absolute, is_url, local_path_of, place_of
from robust_dcp.storage.metadata.stored_pickle import needed_for_a_load
from robust_dcp.storage.remote import filesystem_of
from robust_dcp.storage.writer import RobustWriter

logger = logging.getLogger(__name__)


class _Seen(msgspec.Struct, frozen=True):
    """The coordinator says how large data files at the target are, and whether a later save is in the directory."""

    there: dict[str, int] = {}
    is_replaced: bool = False


def writer_of_save(checkpoint_id: str | os.PathLike[str] | None, storage_writer: object) -> RobustWriter:
    """The writer of one save by ``robust_dcp.save``. What belongs to a URL it makes in a directory of that save alone.

    Raises:
        TypeError: it is no ``RobustWriter``.
        ValueError: there is neither a place nor a writer; a URL is of an unknown kind; or the save is to a URL, and a
            copy of it is wanted at another place.
    """
    path, url = checkpoint_id, None
    if checkpoint_id is not None and is_url(checkpoint_id):
        place = place_of(checkpoint_id)
        path = local_path_of(place)
        if path is None:
            # One of an unknown kind is refused now, not after the save. A package may be missing on one node only, so
            # another error is raised later, on all ranks.
            with suppress(StorageError):
                filesystem_of(place)
            url = place
    if storage_writer is None:
        if checkpoint_id is None:
            raise ValueError("pass checkpoint_id, the directory to save to, or storage_writer=RobustWriter(path)")
        writer = RobustWriter(_staging_root() if path is None else path)
    elif isinstance(storage_writer, RobustWriter):
        storage_writer.reset(path)  # that of a save to a URL keeps its own place
        writer = copy.copy(storage_writer)  # the next save may begin with the same one before this save is over
        writer.drain_to = writer.drain_to and absolute(writer.drain_to)
    else:
        raise TypeError(
            f"robust_dcp.save writes with RobustWriter, not with {type(storage_writer).__name__}; to keep that writer "
            "call torch.distributed.checkpoint.save(…, planner=RobustPlanner())"
        )
    if url is not None:
        if writer.drain_to is not None:
            raise ValueError(
                f"RobustWriter(drain_to={writer.drain_to!r}) is for saves to a directory, and a save to {url} leaves "
                "none that could be copied from: save to a directory, and call robust_dcp.copy_checkpoint for one of "
                "the two places, or leave drain_to out"
            )
        if writer.options.parity_nodes is not None:
            raise ValueError(
                f"parity_nodes={writer.options.parity_nodes} is for drives of each node, and a save to {url} leaves "
                "nothing there: leave it out"
            )
        writer.stage(url, partial(staging_directory, url))
    return writer


class Delivery(msgspec.Struct, kw_only=True, eq=False):
    """What follows the commit of one save, on one rank.

    Attributes:
        checkpoint: its name in exchanges and messages: the directory that it was saved to, or the URL.
        writer: commits it.
        target: where it is copied to; ``None`` if it stays where it is.
        is_staged: whether it is made in a directory of this save alone, and belongs to the target, a URL.
        on_commit: as for ``save``.
        queue: the drains of the group.
        open_channel: makes the channel for a copy, when its turn has come, from the name of its operation and a
            timeout.
        has_arrived: whether its copy has.
    """

    checkpoint: str
    writer: RobustWriter
    target: str | None
    is_staged: bool
    on_commit: Callable[[], object] | None
    queue: SaveQueue
    open_channel: Callable[..., Channel]
    _record: DrainRecord = DrainRecord("", "")
    _held: ExitStack = msgspec.field(default_factory=ExitStack)
    has_arrived: bool = False

    def deliver(
        self,
        channel: Channel,
        clock: PhaseClock,
        *,
        names: Collection[str],
        leads: bool,
        after: Collection[SaveFuture[Any]],
    ) -> None:
        """Do it all, in this order, right after the commit; only a copy of ``drain_to`` is left to the queue.

        Args:
            channel, clock: of the save.
            names: the data files that this rank has written.
            leads: whether this rank has committed in its directory: the coordinator, and one rank of each node with a
                directory of its own.
            after: the drains that were under way before the commit.

        Raises:
            RobustCheckpointError: the same on all ranks. It says that the checkpoint is committed, and where.
        """
        target = self.target
        if target is None:
            return self._tell_of_commit(channel, self.writer.path)
        if leads:
            self._announce(target)
        make_copy = partial(self._copy, target, channel.timeout_seconds, names, leads=leads)
        if self.is_staged:
            with clock.phase("drain"):
                copied = make_copy()
                what = f"copied {copied.nbytes} bytes to {copied.target} in {copied.seconds:.1f} s"
                clock.remarks += (what,)
                with self._saying_where(target, "what was staged for it is not removed"):
                    phase = f"save {self.checkpoint}: remove what was staged"
                    channel.barrier(phase, partial(self._remove_staged, leads=leads))
                return self._tell_of_commit(channel, target)
        try:
            return self._tell_of_commit(channel, self.writer.path)
        finally:
            # After on_commit, which may leave a note in the checkpoint: a copy made earlier had none, or the note of an
            # earlier save. If it raises, the checkpoint is committed all the same.
            self.queue.submit(make_copy, after=after)

    def go_on(self, target: str, timeout_seconds: float) -> None:
        """Go on with a copy that was cut off, on a thread. All ranks of the group call this; they may be others than
        those of the save, and on other nodes. An error is logged, and the copy stays awaited."""

        def make_copy() -> None:
            try:
                self._copy(target, timeout_seconds, None)
            except (RobustCheckpointError, ValueError) as error:
                logger.warning("%s: its copy is still not complete: %s", self.checkpoint, error)

        self._held.enter_context(needed_for_a_load(self.writer.disk, self.writer.path))
        try:
            self.queue.submit(make_copy)
        except RobustCheckpointError as error:  # no thread can be started
            self._held.close()
            logger.warning("%s: its copy is still not complete: %s", self.checkpoint, error)

    def _tell_of_commit(self, channel: Channel, where: str) -> None:
        """Call ``on_commit`` on the coordinator. If it raises, all ranks raise."""
        on_commit = self.on_commit
        if on_commit is None:
            return

        def tell() -> None:
            if channel.is_coordinator:
                channel.stop_if_given_up()
                try:
                    on_commit()
                except SystemExit as error:
                    if threading.current_thread() is threading.main_thread():
                        raise
                    # The result of an async save would end whoever asks for it.
                    raise RuntimeError(f"it called sys.exit({error.code!r}) in a thread: let it return") from error

        with self._saying_where(where, "on_commit has failed"):
            channel.barrier(f"save {self.checkpoint}: on_commit", tell)

    @contextmanager
    def _saying_where(self, where: str, failure: str) -> Iterator[None]:
        """An error in the block says first that the checkpoint is committed."""
        try:
            yield
        except RobustCheckpointError as error:
            place = "" if where == self.checkpoint else f" in {where}"
            error.message = f"the checkpoint {self.checkpoint} is committed{place}, but {failure}: {error.message}"
            raise

    def _announce(self, target: str) -> None:
        """Note in the checkpoint that it will be copied, and keep it from being removed until that is done."""
        path, disk = self.writer.path, self.writer.disk
        self._held.enter_context(needed_for_a_load(disk, path))
        try:
            replaces = () if self.writer.replaces is None else self.writer.replaces(path)
            replaces += self._given_up(target)
            self._record = announce_copy(disk, path, target, replaces=replaces)
        except StorageError as error:
            logger.warning("%s: nobody will know where its copy is: %s", path, error.message)

    def _given_up(self, target: str) -> tuple[str, ...]:
        """What other saves to the URL have staged, and do not copy any more: they were killed, or their copies have
        failed. What they have sent gives way to this checkpoint. What they have staged stays.

        Returns:
            The digests of these checkpoints.
        """
        if not self.is_staged:
            return ()
        disk, (root, name) = self.writer.disk, os.path.split(self.writer.path)
        digests: list[str] = []
        for other in disk.list_directory(root):
            path = os.path.join(root, other)
            if other == name or other.rpartition("-")[0] != name.rpartition("-")[0] or os.path.islink(path):
                continue
            with suppress(StorageError):  # it has vanished, or is not committed
                record = awaited_copy(disk, path)  # who notes a copy holds the lock by then, until it has arrived
                if record is None or record.target != target:
                    continue
                with disk.reading(os.path.join(path, METADATA_NAME)) as file:
                    if disk.lock(file) and awaited_copy(disk, path) == record:
                        digests.append(record.digest)
        return tuple(digests)

    def _copy(
        self, target: str, timeout_seconds: float, names: Collection[str] | None, *, leads: bool = False
    ) -> CopyResult:
        """Copy it. Called on all ranks, with the arguments of :meth:`deliver`.

        Args:
            names: the data files that this rank sends. ``None``: the ranks share what they see, and what no node has
                any more is made anew first.

        Returns:
            What this rank has sent. If a later save has replaced the checkpoint in its directory, and its own drain
            copies that, nothing arrives.

        Raises:
            RobustCheckpointError: the same on all ranks. The local checkpoint is untouched, and stays noted as one
                whose copy is not complete.
        """
        path, disk = self.writer.path, self.writer.disk
        name = f"drain {self.checkpoint}"
        # A rank that waits for a store, and then to try again, is not silent: these waits have limits of their own.
        timeout_seconds = max(timeout_seconds, 2 * self.writer.drain_options.call_timeout_seconds)
        with self._held, self._saying_where(path, f"it has not arrived at {target}"):
            channel = self.open_channel(operation=name, timeout_seconds=timeout_seconds)

            def check_stop() -> None:
                # Waiting is progress too: for a slow store, for the next try, for bandwidth. Each wait has its limit.
                channel.note_progress()
                channel.stop_if_given_up()

            with channel.together():
                if names is None:
                    _, leads, names = make_whole(channel, name, path)
                    if leads:
                        self._announce(target)
                copying = Copy(
                    path,
                    target,
                    self.writer.drain_options,
                    record=self._record,
                    progress=lambda done_nbytes, total_nbytes: channel.note_progress(),
                    check_stop=check_stop,
                    disk=disk,
                )
                try:
                    begun = channel.broadcast(f"{name}: begin", lambda: _Seen(copying.begin()), _Seen)
                    if not channel.is_coordinator:
                        copying.there = begun.there
                    channel.barrier(f"{name}: send", lambda: copying.send_data(names))
                    # As the coordinator's own work, not after the others': they then hear of its progress.
                    channel.barrier(f"{name}: commit", copying.commit if channel.is_coordinator else lambda: None)
                except (CorruptCheckpoint, StorageError):
                    if self.is_staged:  # the caller waits for this very checkpoint
                        raise
                    if not channel.broadcast(f"{name}: is it replaced", self._look, _Seen).is_replaced:
                        raise  # otherwise the copy of the later save removes what this one has sent
                    logger.info("%s was replaced before it was copied to %s", path, target)
                    return copying.result
            self.has_arrived = True
            if channel.is_coordinator and self.writer.on_arrival is not None:
                self.writer.on_arrival(target)
            if leads and self._record.target:  # last: if the job is killed before, its next one does all this again
                note_arrival(disk, path, self._record)
            return copying.result

    def _look(self) -> _Seen:
        """Whether the directory holds a later save by now. If it was removed, it does not."""
        with suppress(StorageError):
            digest = digest_at(self.writer.disk, self.writer.path)
            return _Seen(is_replaced=self._record.digest not in ("", digest))
        return _Seen()

    def _remove_staged(self, *, leads: bool) -> None:
        """Remove what this save has staged, which has arrived, and what saves have left that were killed before their
        commit."""
        shutil.rmtree(self.writer.path, ignore_errors=True)  # other ranks do the same
        if not leads:
            return
        root, disk = os.path.dirname(self.writer.path), self.writer.disk
        with suppress(StorageError):
            for name in disk.list_directory(root):
                with suppress(StorageError):  # a save is running there, or its rank 0 has just removed it
                    if name.startswith(STAGING_PREFIX) and os.path.isdir(os.path.join(root, name)):
                        sweep(disk, os.path.join(root, name))


def staging_directory(url: str, mark: int) -> str:
    """Where the save with this mark makes what belongs to ``url``: in a directory that no other save has."""
    name = url.rstrip("/").rpartition("/")[2]
    digest = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    return os.path.join(_staging_root(), f"{STAGING_PREFIX}{name}-{digest}-{mark:016x}")


def _staging_root() -> str:
    root = os.environ.get("ROBUST_DCP_STAGING")
    return os.path.abspath(root or os.path.join(tempfile.gettempdir(), f"{STAGING_PREFIX}staging-{os.getuid()}"))
