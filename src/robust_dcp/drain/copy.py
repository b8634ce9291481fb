"""Copies a checkpoint to another place, where it counts from the moment that its ``.metadata`` is there.

This module owns the order: the announcement at the target, data files, other files, the index, ``.metadata``, and then
the removal of what was replaced. ``one_process`` does all of it, and ``drain`` lets each rank send its own files.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from robust_dcp.drain.announcement import Announcement
from robust_dcp.drain.bandwidth import Bandwidth
from robust_dcp.drain.copy_threads import CopyThreads
from robust_dcp.drain.inventory import Inventory, named_by, read_inventory, read_metadata, read_whole
from robust_dcp.drain.object_stores import open_store
from robust_dcp.drain.plan import CopyPlan, CopyResult, Progress
from robust_dcp.drain.transfer import Tally, Transfer
from robust_dcp.errors import CorruptCheckpoint, RobustCheckpointError, StorageError
from robust_dcp.report_file import REPORT_NAME
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.remote.calls import Calls
from robust_dcp.storage.remote.copy_options import CopyOptions
from robust_dcp.storage.remote.filesystem import local_path_of, place_of

__all__ = ["Copy", "same_place"]

logger = logging.getLogger(__name__)

_SHOWN: Final = 5


class Copy:
    """One copy of a checkpoint, step by step: :meth:`begin`, :meth:`send_data`, :meth:`commit`.

    Args:
        source, target: paths or URLs.
        options: how to copy.
        progress: called with the bytes that have been sent, or were found at the target, and those of the checkpoint
            if they are known, else 0.
        check_stop: called between calls, from several threads. What it raises ends the copy.
        disk: the file system of paths.

    Attributes:
        was_replaced: whether the copy has ended because another save replaced the source.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        target: str | os.PathLike[str],
        options: CopyOptions,
        *,
        progress: Progress | None = None,
        check_stop: Callable[[], None] = lambda: None,
        disk: Disk | None = None,
    ) -> None:
        self.source_url, self.target_url = place_of(source), place_of(target)
        if same_place(self.source_url, self.target_url):
            raise ValueError(f"{self.source_url} cannot be copied to itself: give another target")
        if _lies_in(self.target_url, self.source_url):  # each copy would hold all copies before it
            raise ValueError(f"{self.source_url} cannot be copied to a place in itself: give another target")
        self._options = options
        self._progress = progress
        self._check_stop = check_stop
        self._calls = Calls(
            retries=options.retries, timeout_seconds=options.call_timeout_seconds, check_stop=self._stop_if_failed
        )
        self._source = open_store(self.source_url, self._calls, options=options.source_options, disk=disk)
        self._target = open_store(self.target_url, self._calls, options=options.target_options, disk=disk)
        self._tally = Tally()
        self._threads = CopyThreads(options.threads)
        self._lock = threading.Lock()
        self._done_nbytes = 0
        self._total_nbytes = 0
        bandwidth = Bandwidth(options.limit_bytes_per_second, self._stop_if_failed)
        self._transfer = Transfer(
            self._source, self._target, options, self._calls, bandwidth, self._tally, self._note_progress
        )
        self.was_replaced = False
        self._started_seconds = time.perf_counter()
        self._inventory: Inventory | None = None
        self._announcement: Announcement | None = None
        self._plan: CopyPlan | None = None

    @property
    def inventory(self) -> Inventory:
        """What is copied, on the rank that has begun the copy."""
        if self._inventory is None:
            raise RuntimeError("begin comes first")
        return self._inventory

    def look(self) -> Inventory:
        """See what is at the source. Raises the same as :meth:`begin`."""
        self._inventory = read_inventory(self._source, self._source.files())
        return self._inventory

    def begin(self) -> CopyPlan:
        """Look at both ends, and announce the copy at the target.

        Raises:
            StorageError: there is no checkpoint at the source; or the target has another one and may not be
                overwritten, or cannot be; or a call failed.
            CorruptCheckpoint, UnsafeCheckpoint: the metadata of the source cannot be used.
        """
        inventory = self.look()
        self._total_nbytes = sum(nbytes or 0 for nbytes in inventory.data.values()) + sum(inventory.extras.values())
        self._target.mark = inventory.mark
        self._announcement = Announcement(self._target, inventory, self.source_url)
        self._plan = self._announcement.begin(overwrite=self._options.overwrite)
        return self._plan

    def follow(self, plan: CopyPlan) -> None:
        """Take the plan of the rank that has begun the copy."""
        self._plan = plan
        self._target.mark = plan.mark

    def send_data(self, names: Iterable[str]) -> dict[str, int]:
        """Send data files, several at once, and make sure that they arrive.

        Returns:
            Their names at the target, and their sizes.

        Raises:
            StorageError, CorruptCheckpoint: as ``Transfer.send``. The first error ends all other transfers.
        """
        plan = self._known_plan()

        def send(name: str) -> tuple[str, int]:
            target_name = plan.renamed.get(name, name)
            return target_name, self._send(name, target_name, plan.there.get(target_name))

        sent = dict(self._threads.map(send, sorted(names)))
        self._target.make_durable()
        return sent

    def commit(self, sent: Mapping[str, int]) -> CopyResult:
        """Send all other files, then the index, and ``.metadata`` last. Remove what was replaced.

        Args:
            sent: names and sizes of all data files at the target.

        Raises:
            StorageError: the source was replaced, or files at the target are gone; or a call failed. The checkpoint
                that was at the target is untouched, unless ``.metadata`` was being written.
        """
        plan, inventory, announcement = self._known_plan(), self.inventory, self._announced()
        metadata = announcement.metadata_with(plan.renamed)
        self._send_extras(inventory)
        changed = self._source_changed()
        if changed is not None:
            raise changed
        there = self._check_target(sent)
        replaced = read_metadata(self._target, there)
        is_same = replaced == metadata
        keeps_index = inventory.has_index and not plan.renamed
        if keeps_index:
            self._send(INDEX_NAME, INDEX_NAME, there.get(INDEX_NAME))
        if not is_same:
            announcement.note_replaced(replaced, keeps_index=keeps_index, there=there)
            self._target.make_durable()
            self._put_metadata(metadata)
        self._target.make_durable()
        removed = announcement.remove_replaced({*sent, *metadata}, there)
        self._target.remove_unfinished()
        announcement.end()
        self._target.make_durable()
        return self.result(removed)

    def result(self, removed: tuple[str, ...] = ()) -> CopyResult:
        """What this process has done so far."""
        tally = self._tally
        return CopyResult(
            source=self.source_url,
            target=self.target_url,
            files=tally.files,
            nbytes=tally.nbytes,
            skipped_files=tally.skipped_files,
            skipped_nbytes=tally.skipped_nbytes,
            seconds=time.perf_counter() - self._started_seconds,
            retries=self._calls.n_retries,
            verified_by_store=tally.verified_by_store,
            verified_by_reading=tally.verified_by_reading,
            renamed={} if self._plan is None else self._plan.renamed,
            removed=removed,
        )

    def is_source_replaced(self) -> bool:
        """Whether another save has replaced the checkpoint since :meth:`begin`. If it was removed, none has."""
        inventory = self._inventory
        metadata = {} if inventory is None else inventory.metadata
        return any(read_whole(self._source, name) not in (None, data) for name, data in metadata.items())

    def withdraw(self) -> None:
        """Remove what was sent. The source was replaced, so nobody can go on with this copy.

        Called when no rank sends any more. An error is logged: what stays costs space.
        """
        try:
            there = self._target.files()
            plan = self._plan
            if plan is not None:
                kept = named_by(read_metadata(self._target, there), self.target_url)
                ours = {plan.renamed.get(name, name) for name in self.inventory.data}
                for name in sorted((ours & set(there)) - kept):
                    self._target.remove(name)
            self._target.remove_unfinished()
            if self._announcement is not None:
                self._announcement.end()
        except RobustCheckpointError as error:
            logger.warning("%s: files of a copy that cannot go on stay: %s", self.target_url, error.message)

    def _announced(self) -> Announcement:
        if self._announcement is None:
            raise RuntimeError("begin comes first")
        return self._announcement

    def _known_plan(self) -> CopyPlan:
        if self._plan is None:
            raise RuntimeError("begin or follow comes first")
        return self._plan

    def _send_extras(self, inventory: Inventory) -> None:
        """The metadata of a checkpoint in a directory below comes after its data, as at the top."""
        there = self._target.files()
        last = [name for name in inventory.extras if name.endswith(METADATA_NAME)]
        first = [name for name in inventory.extras if name not in last]
        for names in (first, last):
            self._threads.map(lambda name: self._send_extra(name, there.get(name)), sorted(names))

    def _send_extra(self, name: str, there_nbytes: int | None) -> None:
        try:
            self._send(name, name, there_nbytes)
        except (CorruptCheckpoint, StorageError) as error:
            if name != REPORT_NAME or self.was_replaced:
                raise
            # Another copy may send its own report at the same time. Nobody believes a report of another save.
            logger.warning("%s: the report of the save has not arrived: %s", self.target_url, error.message)

    def _put_metadata(self, metadata: Mapping[str, bytes]) -> None:
        try:
            for name, data in metadata.items():
                self._transfer.put(name, data)
        except CorruptCheckpoint as error:
            try:
                named_by(read_metadata(self._target, metadata), self.target_url)
            except RobustCheckpointError:
                raise error from None
            raise StorageError(
                f"{self.target_url} holds another checkpoint right after this one was committed: another copy has "
                "ended there at the same time, and a load finds that one. Copy each checkpoint to a place of its own",
                path=self.target_url,
                operation="copy",
            ) from error

    def _check_target(self, sent: Mapping[str, int]) -> dict[str, int]:
        there = self._target.files()
        wrong = sorted(name for name, nbytes in sent.items() if there.get(name) != nbytes)
        if wrong:
            shown = ", ".join(wrong[:_SHOWN]) + (f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")
            raise StorageError(
                f"{self.target_url} lacks files that this copy has sent: {shown}; another program has removed or "
                "replaced them. The copy is not committed. Copy again when nothing else writes there",
                path=self.target_url,
                operation="copy",
            )
        return there

    def _source_changed(self) -> StorageError | None:
        """The error for a checkpoint that is no longer there as :meth:`begin` has seen it; ``None`` if it is."""
        if self.is_source_replaced():
            self.was_replaced = True
            why = (
                f"{self.source_url} was replaced by another save while it was copied, and nothing is committed at the "
                "target; copy it again once no save runs into it, or save each step into a directory of its own"
            )
        elif any(read_whole(self._source, name) is None for name in self.inventory.metadata):
            why = (
                f"{self.source_url} was removed while it was copied, and nothing is committed at the target; copy "
                "another checkpoint, and remove each only after its copy has arrived"
            )
        else:
            return None
        return StorageError(why, path=self.source_url, operation="copy")

    def _send(self, name: str, target_name: str, there_nbytes: int | None) -> int:
        try:
            return self._transfer.send(name, target_name, there_nbytes)
        except RobustCheckpointError as error:
            # A source that is replaced shows in many ways: files are gone, shorter, or have other checksums.
            changed = None if self._inventory is None or self._threads.has_failed else self._source_changed()
            if changed is not None:
                raise changed from error
            raise

    def _stop_if_failed(self) -> None:
        self._check_stop()
        if self._threads.has_failed:
            raise StorageError(f"the copy to {self.target_url} was stopped: another file of it has failed")

    def _note_progress(self, nbytes: int) -> None:
        self._stop_if_failed()  # reads and writes of a directory are no calls, so they do not ask
        with self._lock:
            self._done_nbytes += nbytes
            done_nbytes = self._done_nbytes
        if self._progress is not None:
            # A file that is sent again counts twice.
            self._progress(min(done_nbytes, self._total_nbytes or done_nbytes), self._total_nbytes)


def same_place(one: str, other: str) -> bool:
    """Whether two places are one directory, or one URL."""
    paths = local_path_of(one), local_path_of(other)
    if paths[0] is None or paths[1] is None:
        return one == other
    return os.path.realpath(paths[0]) == os.path.realpath(paths[1])


def _lies_in(place: str, directory: str) -> bool:
    paths = local_path_of(place), local_path_of(directory)
    if paths[0] is None or paths[1] is None:
        return place.startswith(directory.rstrip("/") + "/")
    return os.path.realpath(paths[0]).startswith(os.path.join(os.path.realpath(paths[1]), ""))
