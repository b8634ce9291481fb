"""The copy of a checkpoint by the ranks that have saved it: each sends its own files, and the coordinator commits.

This module owns the exchanges of such a copy. ``started_save`` calls it: at once for a save to a URL, and on a thread
beside training for ``RobustWriter(path, drain_to=…)``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from contextlib import ExitStack

import msgspec

from robust_dcp.comm import Channel
from robust_dcp.drain.copy import Copy
from robust_dcp.drain.plan import CopyPlan, CopyResult
from robust_dcp.drain.record import DrainRecord, note_arrival, write_drain_record
from robust_dcp.errors import CorruptCheckpoint, StorageError
from robust_dcp.storage.files.being_loaded import needed_for_a_load
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import is_url, mark_of
from robust_dcp.storage.remote.copy_options import CopyOptions

__all__ = ["Drain"]

logger = logging.getLogger(__name__)


class _Begun(msgspec.Struct, frozen=True):
    """The plan of the coordinator; ``None`` if the directory holds a later save by now."""

    plan: CopyPlan | None


class _Sent(msgspec.Struct, frozen=True):
    """Names and sizes of the files that a rank has sent."""

    files: dict[str, int]


class _Replaced(msgspec.Struct, frozen=True):
    """Whether a later save has replaced the checkpoint."""

    is_so: bool


class Drain:
    """One rank's part of the copy of a checkpoint.

    Args:
        path, target: from where, and to where.
        save_id: of the save that is copied.
        names: the data files that this rank has written.
        options: how to copy.
        open_channel: makes the channel for it, when its turn has come.
        is_coordinator: whether this rank commits.
        disk: the file system of ``path``.
    """

    def __init__(
        self,
        path: str,
        target: str,
        *,
        save_id: str,
        names: Collection[str],
        options: CopyOptions,
        open_channel: Callable[[], Channel],
        is_coordinator: bool,
        disk: Disk,
    ) -> None:
        self._path = path
        self._target = target
        self._save_id = save_id
        self._names = names
        self._options = options
        self._open_channel = open_channel
        self._is_coordinator = is_coordinator
        self._disk = disk
        # Another process may read the record, in another working directory.
        self._record = DrainRecord(target if is_url(target) else os.path.abspath(target), save_id, is_complete=False)
        self._held = ExitStack()

    def announce(self) -> None:
        """Note in the checkpoint that it will be copied, and keep it from being removed until that is done.

        Called right after the commit, on all ranks.
        """
        if self._is_coordinator:
            self._held.enter_context(needed_for_a_load(self._disk, self._path))
            self._noted("nobody will know where its copy is", write_drain_record)

    def run(self) -> CopyResult | None:
        """Copy it. Called on all ranks.

        Returns:
            What this rank has sent; ``None`` if a later save has replaced the checkpoint, which its own drain copies.

        Raises:
            RobustCheckpointError: the same on all ranks. The local checkpoint is untouched, and stays noted as one
                whose copy is not complete.
        """
        with self._held:
            channel = self._open_channel()
            with channel.together():
                copy = self._copy(channel)
                try:
                    return self._run(channel, copy)
                except (CorruptCheckpoint, StorageError):
                    phase = f"{self._name}: has it been replaced"
                    if channel.broadcast(phase, lambda: _Replaced(copy.is_source_replaced()), _Replaced).is_so:
                        if self._is_coordinator:
                            copy.withdraw()
                        self._say_replaced()
                        return None
                    raise

    def _run(self, channel: Channel, copy: Copy) -> CopyResult | None:
        begun = channel.broadcast(f"{self._name}: plan", lambda: self._begin(copy), _Begun)
        if begun.plan is None:
            self._say_replaced()
            return None
        copy.follow(begun.plan)
        sent = channel.gather(f"{self._name}: send", lambda: _Sent(copy.send_data(self._names)), _Sent)
        results = [copy.result()]

        def commit() -> None:
            results[0] = copy.commit({name: size for each in sent or () if each for name, size in each.files.items()})

        # As the coordinator's own work, not after the others': they then hear of its progress.
        channel.barrier(f"{self._name}: commit", commit if self._is_coordinator else lambda: None)
        if self._is_coordinator:
            self._noted("nobody will know that its copy is complete", note_arrival)
            logger.info("%s has arrived at %s in %.1f s", self._path, self._target, results[0].seconds)
        return results[0]

    @property
    def _name(self) -> str:
        return f"drain {self._path}"

    def _copy(self, channel: Channel) -> Copy:
        def check_stop() -> None:
            # Waiting is progress too: for a slow store, for the next try, for bandwidth. Each wait has its own limit.
            channel.note_progress()
            channel.stop_if_announced()

        return Copy(
            self._path,
            self._target,
            self._options,
            progress=lambda done_nbytes, total_nbytes: channel.note_progress(),
            check_stop=check_stop,
            disk=self._disk,
        )

    def _begin(self, copy: Copy) -> _Begun:
        save_ids = copy.look().save_ids
        if mark_of(self._save_id) not in {mark_of(each) for each in save_ids}:
            return _Begun(None)
        return _Begun(copy.begin())

    def _say_replaced(self) -> None:
        logger.info("%s was replaced before it was copied to %s: the later save is copied", self._path, self._target)

    def _noted(self, otherwise: str, note: Callable[[Disk, str, DrainRecord], None]) -> None:
        try:
            note(self._disk, self._path, self._record)
        except StorageError as error:
            logger.warning("%s: %s: %s", self._path, otherwise, error.message)
