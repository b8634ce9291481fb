"""What follows the commit of a save: ``on_commit``, the copy by the ranks that have saved, and what was staged.

A save to a URL is made in a local directory of its own first, and copied before it ends: it returns only if its
checkpoint has arrived. With ``RobustWriter(path, drain_to=…)`` the copy is made on a thread beside training. In either
copy each rank sends its own files, and the coordinator commits.

Several saves may be on their way to one URL. Each has staged what it copies for itself alone, and nobody else removes
that, but for what a save has left that was killed before its commit.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec

from robust_dcp.comm import Channel
from robust_dcp.drain.copy import Copy, CopyResult
from robust_dcp.drain.record import DrainRecord, announce_copy, awaited_copy, digest_at, note_arrival
from robust_dcp.errors import CorruptCheckpoint, RobustCheckpointError, StorageError
from robust_dcp.phases import PhaseClock
from robust_dcp.storage.committing.saving_file import sweep
from robust_dcp.storage.files.paths import METADATA_NAME, STAGING_PREFIX, is_url
from robust_dcp.storage.metadata.stored_pickle import needed_for_a_load
from robust_dcp.storage.writer import RobustWriter

logger = logging.getLogger(__name__)


class _Told(msgspec.Struct, frozen=True):
    """The sizes of data files at the target, and whether a later save is in the directory. The coordinator tells."""

    there: dict[str, int] = {}
    is_replaced: bool = False


class Delivery(msgspec.Struct, kw_only=True, eq=False):
    """What follows the commit of one save, on one rank.

    Attributes:
        checkpoint: its name in exchanges and messages: the directory that it was saved to, or the URL.
        channel, clock: of the save.
        writer: has committed it.
        names: the data files that this rank has written.
        leads: whether this rank has committed in its directory: the coordinator, and one rank of each node with a
            directory of its own.
        on_commit: as for ``save``.
        drain: calls a function on a thread beside training, after the earlier drains of the group.
        open_channel: makes the channel for a copy, when its turn has come.
    """

    checkpoint: str
    channel: Channel
    clock: PhaseClock
    writer: RobustWriter
    names: Collection[str]
    leads: bool
    on_commit: Callable[[], object] | None
    drain: Callable[[Callable[[], CopyResult]], object]
    open_channel: Callable[[], Channel]
    _record: DrainRecord = DrainRecord("", "")
    _held: ExitStack = msgspec.field(default_factory=ExitStack)

    @property
    def is_staged(self) -> bool:
        """Whether the checkpoint was made in a directory of this save alone, and belongs to a URL."""
        return is_url(self.writer.checkpoint_id)

    @property
    def target(self) -> str | None:
        """Where the checkpoint is copied to; ``None`` if it stays where it is."""
        return os.fsdecode(self.writer.checkpoint_id) if self.is_staged else self.writer.drain_to

    def deliver(self) -> None:
        """Do it all, in this order, right after the commit; only a copy of ``drain_to`` is left to a thread.

        Raises:
            RobustCheckpointError: the same on all ranks. It says that the checkpoint is committed, and where.
        """
        target = self.target
        if target is None:
            self._tell_of_commit(self.writer.path)
        elif self.is_staged:
            self._announce(target)
            with self.clock.phase("drain"):
                copied = self._copy(target)
                what = f"copied {copied.nbytes} bytes to {copied.target} in {copied.seconds:.1f} s"
                self.clock.remarks += (what,)
                with self._saying_where(target, "what was staged for it is not removed"):
                    self.channel.barrier(f"save {self.checkpoint}: remove what was staged", self._remove_staged)
                self._tell_of_commit(target)
        else:
            self._announce(target)
            try:
                self._tell_of_commit(self.writer.path)
            finally:
                # After on_commit, which may leave a note in the checkpoint: a copy made earlier had none, or the note
                # of an earlier save. If it raises, the checkpoint is committed all the same.
                self.drain(lambda: self._copy(target))

    def _tell_of_commit(self, where: str) -> None:
        """Call ``on_commit`` on the coordinator. If it raises, all ranks raise."""
        on_commit = self.on_commit
        if on_commit is None:
            return

        def tell() -> None:
            if self.channel.is_coordinator:
                on_commit()

        with self._saying_where(where, "on_commit has failed"):
            self.channel.barrier(f"save {self.checkpoint}: on_commit", tell)

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
        if not self.leads:
            return
        path, disk = self.writer.path, self.writer.disk
        self._held.enter_context(needed_for_a_load(disk, path))
        try:
            self._record = announce_copy(disk, path, target, replaces=self._given_up(target))
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
                record = awaited_copy(disk, path)  # first: who notes a copy holds the lock by then
                if record is None or record.target != target:
                    continue
                with disk.reading(os.path.join(path, METADATA_NAME)) as file:
                    if disk.lock(file):
                        digests.append(record.digest)
        return tuple(digests)

    def _copy(self, target: str) -> CopyResult:
        """Copy it. Called on all ranks.

        Returns:
            What this rank has sent. If a later save has replaced the checkpoint in its directory, and its own drain
            copies that, nothing arrives.

        Raises:
            RobustCheckpointError: the same on all ranks. The local checkpoint is untouched, and stays noted as one
                whose copy is not complete.
        """
        path, disk = self.writer.path, self.writer.disk
        name = f"drain {self.checkpoint}"
        with self._held, self._saying_where(path, f"it has not arrived at {target}"):
            channel = self.open_channel()

            def check_stop() -> None:
                # Waiting is progress too: for a slow store, for the next try, for bandwidth. Each wait has its limit.
                channel.note_progress()
                channel.stop_if_announced()

            copy = Copy(
                path,
                target,
                self.writer.drain_options,
                record=self._record,
                progress=lambda done_nbytes, total_nbytes: channel.note_progress(),
                check_stop=check_stop,
                disk=disk,
            )
            with channel.together():
                try:
                    begun = channel.broadcast(f"{name}: begin", lambda: _Told(copy.begin()), _Told)
                    if not channel.is_coordinator:
                        copy.there = begun.there
                    channel.barrier(f"{name}: send", lambda: copy.send_data(self.names))
                    # As the coordinator's own work, not after the others': they then hear of its progress.
                    channel.barrier(f"{name}: commit", copy.commit if channel.is_coordinator else lambda: None)
                    if self.leads and not channel.is_coordinator:
                        note_arrival(disk, path, self._record)
                except (CorruptCheckpoint, StorageError):
                    if self.is_staged:  # the caller waits for this very checkpoint
                        raise
                    if not channel.broadcast(f"{name}: is it replaced", self._look, _Told).is_replaced:
                        raise  # otherwise the copy of the later save removes what this one has sent
                    logger.info("%s was replaced before it was copied to %s", path, target)
                return copy.result

    def _look(self) -> _Told:
        """Whether the directory holds a later save by now. If it was removed, it does not."""
        with suppress(StorageError):
            digest = digest_at(self.writer.disk, self.writer.path)
            return _Told(is_replaced=self._record.digest not in ("", digest))
        return _Told()

    def _remove_staged(self) -> None:
        """Remove what this save has staged, which has arrived, and what saves have left that were killed before their
        commit."""
        shutil.rmtree(self.writer.path, ignore_errors=True)  # other ranks do the same
        if not self.leads:
            return
        root, disk = os.path.dirname(self.writer.path), self.writer.disk
        with suppress(StorageError):
            for name in disk.list_directory(root):
                with suppress(StorageError):  # a save is running there, or its rank 0 has just removed it
                    if name.startswith(STAGING_PREFIX) and os.path.isdir(os.path.join(root, name)):
                        sweep(disk, os.path.join(root, name))


def staging_directory(url: str, mark: int) -> str:
    """Where the save with this mark makes what belongs to ``url``: in a directory that no other save has."""
    root = os.environ.get("ROBUST_DCP_STAGING") or os.path.join(
        tempfile.gettempdir(), f"{STAGING_PREFIX}staging-{os.getuid()}"
    )
    name = url.rstrip("/").rpartition("/")[2]
    digest = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    return os.path.join(os.path.abspath(root), f"{STAGING_PREFIX}{name}-{digest}-{mark:016x}")
