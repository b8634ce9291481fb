"""Writes the files of one rank with a few threads: every record goes to its place and is checksummed on the way.

Each file has the mark of its save in its name, such as ``__0_0.5f0c9a3e7b21d846.distcp``. So no byte of another file is
ever overwritten. It is removed if the save fails.

This module owns the threads, their memory, and the handling of their errors. It does not decide places (``layouts``
does), cut files (``blocks`` does), or make a checkpoint visible (``commit`` does).
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.errors import StorageError
from robust_dcp.staging import POOL, DeviceCopies
from robust_dcp.storage.committing.cleaning import is_gone, stripe_directories, stripe_of
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.layouts import TORCH, Layout
from robust_dcp.storage.layouts.places import PAGE_NBYTES, Placements, slots_of
from robust_dcp.storage.writing.blocks import file_orders
from robust_dcp.storage.writing.emit import DataFile, Emission, FileEmitter, WriteContext
from robust_dcp.storage.writing.item_source import BorrowingSource, Changes, ItemSource, MadeWhenAsked
from robust_dcp.storage.writing.write_options import BLOCKS_PER_THREAD, WriteOptions

__all__ = ["WriteFiles", "WrittenFiles", "create_data_files", "discard", "remove_files_of", "write_files"]


@dataclass(frozen=True, eq=False)
class WrittenFiles:
    """The files that one rank has written durably, but not yet committed.

    Attributes:
        variable_places: int64 ``[v, 2]``, offset and length of each item of variable size, in the order of the plan.
        names: the names of the files after the commit, relative to the directory.
        uncommitted_names: the names of the same files before the commit.
        nbytes: length of the files, without footers.
        how: ``direct``, or ``buffered`` with the reason; one for each way in which a file was written.
        peak_buffer_nbytes: the most memory that was in use for bytes on their way at any time.
    """

    variable_places: npt.NDArray[np.int64]
    names: tuple[str, ...]
    nbytes: int
    how: tuple[str, ...] = ()
    peak_buffer_nbytes: int = 0
    uncommitted_names: tuple[str, ...] = ()


class WriteFiles(Protocol):
    """Writes the files of one rank. This is :func:`write_files`, or a function that calls it in another process."""

    def __call__(
        self,
        disk: Disk,
        directory: str,
        rank: int,
        source: ItemSource,
        placements: Placements,
        *,
        mark: str,
        options: WriteOptions,
        check_stop: Callable[[int, int], None],
        known_places: npt.NDArray[np.int64] | None,
        layout: Layout,
        not_removed: list[str],
    ) -> WrittenFiles: ...


def write_files(
    disk: Disk,
    directory: str,
    rank: int,
    source: ItemSource,
    placements: Placements,
    *,
    mark: str,
    options: WriteOptions,
    check_stop: Callable[[int, int], None],
    known_places: npt.NDArray[np.int64] | None = None,
    layout: Layout = TORCH,
    not_removed: list[str] | None = None,
) -> WrittenFiles:
    """Write the files of one rank and make them durable.

    Args:
        directory: the checkpoint's directory. It exists already, and so do those on the stripes.
        mark: the mark of the save. It is in the files and in their names.
        source: the items, in the order of ``placements``. Several threads ask it for data. The borrowed items of a
            ``BorrowingSource`` are written first.
        check_stop: called between blocks, from several threads, with two numbers: the bytes written so far, and the
            bytes of all items of fixed size. It raises if the save has been given up elsewhere.
        known_places: int64 ``[v, 2]``, offset and length of the items of variable size in an earlier save by the same
            plan. An item that still fits keeps its offset, so that an item that grows does not move all others.
        layout: the layout that made ``placements``.
        not_removed: receives the paths of files that this call made, could not complete, and could not remove.

    Raises:
        StorageError: a call to the file system failed.
        PlanConflict: an item is not what was planned.
        RobustCheckpointError: an item cannot be resolved; the error names it.
    """
    stripes = stripe_directories(disk, directory, options.stripes) if options.stripe_paths else []
    not_removed = [] if not_removed is None else not_removed
    direct = options.direct is not False
    files = create_data_files(
        disk, directory, rank, placements, layout, mark=mark, direct=direct, stripes=stripes, not_removed=not_removed
    )
    try:
        page_nbytes = _page_nbytes(files, options)
        threads, block_nbytes = options.fitted(page_nbytes)
        orders = file_orders(placements, source, block_nbytes, page_nbytes)
        workers = _Workers(check_stop, sum(placements.file_nbytes))
        with POOL.lease(block_nbytes, threads * BLOCKS_PER_THREAD) as lease:
            context = WriteContext(
                disk=disk,
                source=source,
                changes=Changes(source),
                slots=slots_of(placements, known_places),
                lease=lease,
                copies=workers.copies,
                page_nbytes=page_nbytes,
                must_be_direct=options.direct is True,
                mark=mark,
                check_stop=workers.stop_if_told,
                wrote=workers.wrote,
            )
            borrowed = frozenset(source.borrowed if isinstance(source, BorrowingSource) else ())
            emitters = []
            for file, order, nbytes in zip(files, orders, placements.file_nbytes, strict=True):
                disk.preallocate(file.file, -(-nbytes // page_nbytes) * page_nbytes)
                emitters.append(FileEmitter(file, order, nbytes, context, borrowed))
            emitters.reverse()  # the last file may hold the items of variable size, which one thread at a time asks for
            if isinstance(source, BorrowingSource) and borrowed:
                workers.run(_Queue(emitters, only_borrowed=True), threads)
                source.give_back()
            workers.run(_Queue(emitters, in_turn=not isinstance(source, MadeWhenAsked)), threads)
            context.changes.check_taken()
        for place in (directory, *stripes):
            disk.fsync_directory(place)
    except BaseException:
        not_removed += discard(disk, files)
        raise
    return WrittenFiles(
        variable_places=np.array([place[1:] for place in sorted(context.appended)], dtype=np.int64).reshape(-1, 2),
        names=tuple(file.committed_name for file in files),
        nbytes=sum(file.nbytes for file in files),
        how=(*sorted({file.how for file in files}), *workers.copies.how),
        peak_buffer_nbytes=lease.used_nbytes,
        uncommitted_names=tuple(file.name for file in files),
    )


def create_data_files(
    disk: Disk,
    directory: str,
    rank: int,
    placements: Placements,
    layout: Layout,
    *,
    mark: str,
    direct: bool = False,
    stripes: Sequence[str] = (),
    not_removed: list[str],
) -> list[DataFile]:
    """Create the files of ``rank``.

    Each file must be new (``O_EXCL``). So this overwrites nothing, whatever other processes do and however stale a
    directory listing is.

    Args:
        placements: says how many files there are, and of which kind.
        layout: gives their names.
        mark: the mark of the save.
        direct: whether to ask for direct I/O.
        stripes: existing directories that take the files in turn. ``directory`` then gets links to them.
        not_removed: receives the paths of files that were made and could not be removed.

    Raises:
        StorageError: a file cannot be created, for example for lack of permission. The files made so far are removed.
    """
    files: list[DataFile] = []
    try:
        for number, name in enumerate(layout.file_names(rank, placements.head_nbytes, mark)):
            path, link = os.path.join(directory, name.written), None
            if stripes:
                # Make the link first. If we are killed in between, the next save finds and removes a link without a
                # file, but nobody finds a file without a link.
                path, link = os.path.join(stripe_of(rank, number, stripes), name.written), path
                disk.symlink(path, link)
            try:
                opened = disk.open_new(path, direct=direct)
            except BaseException:
                if link is not None and not is_gone(disk.unlink, link):
                    not_removed.append(link)
                raise
            files.append(DataFile(number, name.committed, opened, link))
    except BaseException:
        not_removed.extend(discard(disk, files))
        raise
    return files


def discard(disk: Disk, files: Sequence[DataFile]) -> list[str]:
    """Close and remove the files of a save that failed.

    Returns:
        the paths of those that are still there. A link is removed after its target; if the target stays, so does the
        link.
    """
    left: list[str] = []
    for file in files:
        with contextlib.suppress(StorageError):
            disk.close(file.file)
        paths = [file.file.path] if file.link is None else [file.file.path, file.link]
        while paths and is_gone(disk.unlink, paths[0]):
            del paths[0]
        left += paths
    return left


def remove_files_of(
    disk: Disk,
    directory: str,
    rank: int,
    placements: Placements,
    layout: Layout,
    *,
    mark: str,
    stripes: Sequence[str] = (),
) -> list[str]:
    """Remove whatever a process has made that died while it wrote the files of ``rank``.

    Returns:
        the paths of those that are still there.
    """
    left: list[str] = []
    for number, name in enumerate(layout.file_names(rank, placements.head_nbytes, mark)):
        path = os.path.join(directory, name.written)
        paths = [os.path.join(stripe_of(rank, number, stripes), name.written), path] if stripes else [path]
        while paths and is_gone(disk.unlink, paths[0]):
            del paths[0]
        left += paths
    return left


def _page_nbytes(files: Sequence[DataFile], options: WriteOptions) -> int:
    """The unit of writes: whole pages of memory that are also whole units of each file's file system."""
    for file in files:
        if options.direct is True and file.file.alignment is None:
            raise StorageError(
                f"{file.file.path} cannot be written by direct I/O, and direct=True: {file.file.why_buffered}; leave "
                "direct at None to go through the page cache there",
                path=file.file.path,
                errno=errno.EINVAL,
                operation="create",
            )
    return max([PAGE_NBYTES, *(file.file.alignment.offset for file in files if file.file.alignment is not None)])


class _Queue:
    """The blocks of all files. It takes one block of each file in turn.

    Args:
        only_borrowed: as for :meth:`FileEmitter.take`.
        in_turn: ``False``: take all blocks of a file before those of the next one.
    """

    def __init__(self, files: Sequence[FileEmitter], *, only_borrowed: bool = False, in_turn: bool = True) -> None:
        self._only_borrowed = only_borrowed
        self._in_turn = in_turn
        self._files = deque(files)
        self._lock = threading.Lock()

    def take(self) -> Emission | None:
        """The next block; ``None`` when none is left."""
        while True:
            with self._lock:
                if not self._files:
                    return None
                file = self._files[0]
                if self._in_turn:
                    self._files.rotate(-1)
            block = file.take(only_borrowed=self._only_borrowed)
            if block is not None:
                return block
            with self._lock:
                if file in self._files:
                    self._files.remove(file)


class _SiblingFailed(Exception):
    """Another thread of this rank failed. Its error is the one that is raised."""


class _Workers:
    """The threads of one save."""

    def __init__(self, check_stop: Callable[[int, int], None], total_nbytes: int) -> None:
        self._check_stop = check_stop
        self._total_nbytes = total_nbytes
        self._written_nbytes = 0
        self._counting = threading.Lock()
        self._failed = threading.Event()
        self.copies = DeviceCopies()

    def run(self, queue: _Queue, threads: int) -> None:
        """Write all blocks. If one fails, raise its error and not the "stopped" of the other threads."""
        with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="robust_dcp-write") as pool:
            try:
                tasks = [pool.submit(self._work, queue) for _ in range(threads)]
                errors = [error for task in tasks if (error := task.exception()) is not None]
            except BaseException:  # for example Ctrl-C: the threads end at their next block
                self._failed.set()
                raise
        for error in sorted(errors, key=lambda error: isinstance(error, _SiblingFailed)):
            raise error

    def stop_if_told(self) -> None:
        if self._failed.is_set():
            raise _SiblingFailed
        self._check_stop(min(self._written_nbytes, self._total_nbytes), self._total_nbytes)

    def wrote(self, nbytes: int) -> None:
        with self._counting:
            self._written_nbytes += nbytes
        self.stop_if_told()

    def _work(self, queue: _Queue) -> None:
        try:
            # Each thread has its own grad mode and its own stream.
            with torch.no_grad(), self.copies.in_this_thread():
                self._work_off(queue)
        except BaseException:
            self._failed.set()
            raise

    def _work_off(self, queue: _Queue) -> None:
        """Write block after block. While a block is written, the copy from a device into the next one runs."""
        copying: Emission | None = None
        try:
            while True:
                self.stop_if_told()
                block = queue.take()
                goes_on = block is not None and _prepare(block)
                if copying is not None:
                    before, copying = copying, None
                    _write(before)
                if block is None:
                    return
                if goes_on:
                    copying = block
                else:
                    _write(block)
        finally:
            if copying is not None:
                copying.drop()


def _prepare(block: Emission) -> bool:
    try:
        return block.prepare()
    except BaseException:
        block.drop()
        raise


def _write(block: Emission) -> None:
    try:
        block.write()
    finally:
        block.drop()
    block.file.done()
