"""The copy of a checkpoint by the ranks that have saved it: each sends its own files, and the coordinator commits.

A save to a URL is made in a local directory first, and copied before it ends. With ``RobustWriter(path, drain_to=…)``
the copy is made on a thread beside training.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress

import msgspec

from robust_dcp.comm import Channel
from robust_dcp.drain.copy import Copy, CopyResult
from robust_dcp.drain.record import DrainRecord, announce_copy, digest_at, note_arrival
from robust_dcp.errors import CorruptCheckpoint, StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import STAGING_PREFIX
from robust_dcp.storage.metadata.stored_pickle import needed_for_a_load
from robust_dcp.storage.remote import CopyOptions

logger = logging.getLogger(__name__)


class _Told(msgspec.Struct, frozen=True):
    """The sizes of data files at the target, and whether a later save is in the directory. The coordinator tells."""

    there: dict[str, int] = {}
    is_replaced: bool = False


class Drain(msgspec.Struct, kw_only=True, eq=False):
    """One rank's part of the copy of a checkpoint.

    Attributes:
        path, target: from where, and to where; both absolute.
        names: the data files that this rank has written.
        options: how to copy.
        open_channel: makes the channel for it, when its turn has come.
        leads: whether this rank has committed in its directory: the coordinator, and one rank of each node with a
            directory of its own.
        disk: the file system of ``path``.
    """

    path: str
    target: str
    names: Collection[str]
    options: CopyOptions
    open_channel: Callable[[], Channel]
    leads: bool
    disk: Disk
    _record: DrainRecord = DrainRecord("", "")
    _held: ExitStack = msgspec.field(default_factory=ExitStack)

    def announce(self) -> None:
        """Note in the checkpoint that it will be copied, and keep it from being removed until that is done.

        It comes right after the commit, on all ranks.
        """
        if not self.leads:
            return
        self._held.enter_context(needed_for_a_load(self.disk, self.path))
        try:
            self._record = announce_copy(self.disk, self.path, self.target)
        except StorageError as error:
            logger.warning("%s: nobody will know where its copy is: %s", self.path, error.message)

    def run(self) -> CopyResult:
        """Copy it. Called on all ranks.

        Returns:
            What this rank has sent. Nothing arrives if a later save has replaced the checkpoint, which its own drain
            copies.

        Raises:
            RobustCheckpointError: the same on all ranks. The local checkpoint is untouched, and stays noted as one
                whose copy is not complete.
        """
        name = f"drain {self.path}"
        with self._held:
            channel = self.open_channel()

            def check_stop() -> None:
                # Waiting is progress too: for a slow store, for the next try, for bandwidth. Each wait has its limit.
                channel.note_progress()
                channel.stop_if_announced()

            copy = Copy(
                self.path,
                self.target,
                self.options,
                record=self._record,
                progress=lambda done_nbytes, total_nbytes: channel.note_progress(),
                check_stop=check_stop,
                disk=self.disk,
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
                        note_arrival(self.disk, self.path, self._record)
                except (CorruptCheckpoint, StorageError):
                    if not channel.broadcast(f"{name}: is it replaced", self._look, _Told).is_replaced:
                        raise  # otherwise the copy of the later save removes what this one has sent
                    logger.info("%s was replaced before it was copied to %s", self.path, self.target)
                return copy.result

    def _look(self) -> _Told:
        """Whether the directory holds a later save by now. If it was removed, it does not."""
        with suppress(StorageError):
            return _Told(is_replaced=self._record.digest not in ("", digest_at(self.disk, self.path)))
        return _Told()


def staging_directory(url: str) -> str:
    """Where a save to ``url`` is made. It depends on the URL only, so all ranks find the same."""
    root = os.environ.get("ROBUST_DCP_STAGING") or os.path.join(
        tempfile.gettempdir(), f"{STAGING_PREFIX}staging-{os.getuid()}"
    )
    name = url.rstrip("/").rpartition("/")[2]
    digest = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    return os.path.join(os.path.abspath(root), f"{STAGING_PREFIX}{name}-{digest}")


def remove_staging(path: str) -> None:
    """Remove a staging directory whose checkpoint has arrived."""
    if os.path.basename(path).startswith(STAGING_PREFIX):
        shutil.rmtree(path, ignore_errors=True)  # other ranks do the same
