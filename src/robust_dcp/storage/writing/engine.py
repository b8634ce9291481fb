"""Writes the files of one rank with a few threads: every record goes to its place and is checksummed on the way.

Each file has the mark of its save in its name, such as ``__0_0.5f0c9a3e7b21d846.distcp``. So no byte of another file is
ever overwritten. It is removed if the save fails.

This module owns the files, the threads and their errors. It does not decide places (``layouts`` does), cut files
(``blocks`` does), or make a checkpoint visible (``committing`` does).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.comm import Stopped
from robust_dcp.errors import StorageError
from robust_dcp.staging.blocks import BlockLease
from robust_dcp.storage.committing.saving_file import is_gone
from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.files.paths import uncommitted_name
from robust_dcp.storage.layouts.places import PAGE_NBYTES
from robust_dcp.storage.options import BLOCKS_PER_THREAD
from robust_dcp.storage.writing.blocks import file_orders
from robust_dcp.storage.writing.emit import Emission, FileEmitter, FilesOfRank, WriteContext
from robust_dcp.storage.writing.item_source import ItemSource
from robust_dcp.threads import submit, thread_pool


class WrittenFiles(msgspec.Struct, frozen=True, eq=False):
    """The files that one rank has written durably, but not yet committed.

    Attributes:
        variable_places: int64 ``[v, 2]``, offset and length of each item of variable size, in the order of the plan.
        names: the names of the files after the commit, relative to the directory.
        nbytes: length of the files, without footers.
        how: ``direct``, or ``buffered`` with the reason; one for each way in which a file was written.
        peak_buffer_nbytes: the most memory that was in use for bytes on their way at any time.
        parameters, others: a hash over the checksums of all parameters, and of all else; empty if there is nothing.
    """

    variable_places: npt.NDArray[np.int64]
    names: tuple[str, ...]
    nbytes: int
    how: tuple[str, ...] = ()
    peak_buffer_nbytes: int = 0
    parameters: bytes = b""
    others: bytes = b""


WriteFiles = Callable[[FilesOfRank, ItemSource, Callable[[int, int], None], list[str]], WrittenFiles]
"""This is :func:`write_files`, or a function that calls it in another process."""


def write_files(
    files: FilesOfRank, source: ItemSource, check_stop: Callable[[int, int], None], not_removed: list[str]
) -> WrittenFiles:
    """Write the files of one rank and make them durable.

    Args:
        source: the items, in the order of the placements. Several threads ask it for data. Its borrowed items are
            written first.
        check_stop: called between blocks, from several threads, with two numbers: the bytes written so far, and the
            bytes of all items of fixed size. It raises if the save has been given up elsewhere.
        not_removed: receives the paths of files that this call made, could not complete, and could not remove.

    Raises:
        StorageError: a call to the file system failed.
        PlanConflict: an item is not what was planned.
        RobustCheckpointError: an item cannot be resolved; the error names it.
    """
    disk, options, file_nbytes = files.disk, files.options, files.placements.file_nbytes
    made: list[OpenFile] = []
    page_nbytes = PAGE_NBYTES  # whole pages of memory that are also whole units of each file's file system
    try:
        for name in files.names:
            # Each must be new (``O_EXCL``), so this overwrites nothing, whatever other processes do and however stale a
            # directory listing is.
            path = os.path.join(files.directory, uncommitted_name(name))
            file = disk.open_new(path, direct=options.direct)
            made.append(file)
            if file.alignment is not None:
                page_nbytes = max(page_nbytes, file.alignment.offset)
        threads, block_nbytes = options.fitted(page_nbytes)
        orders = file_orders(files.placements, source, block_nbytes, page_nbytes)
        with contextlib.closing(BlockLease(block_nbytes, threads * BLOCKS_PER_THREAD)) as lease:
            context = WriteContext(files, source, lease, page_nbytes, check_stop)
            emitters = []
            for file, order, nbytes in zip(made, orders, file_nbytes, strict=True):
                disk.preallocate(file, -(-nbytes // page_nbytes) * page_nbytes)
                emitters.append(FileEmitter(file, order, nbytes, context))
            borrowed = frozenset(source.borrowed)
            if borrowed:
                _work(context, threads, _in_turn(emitters, borrowed, are_borrowed=True))
                source.give_back()
            _work(context, threads, _in_turn(emitters, borrowed, are_borrowed=False))
            with thread_pool(threads, "robust_dcp-write") as pool:
                for finished in [submit(pool, emitter.finish) for emitter in emitters]:
                    finished.result()
            context.check_unchanged(context.taken)
        disk.fsync_directory(files.directory)
    except BaseException:
        for file in made:
            with contextlib.suppress(StorageError):
                disk.close(file)
            if not is_gone(disk.unlink, file.path):
                not_removed.append(file.path)
        raise
    return WrittenFiles(
        variable_places=np.array(sorted(context.appended), dtype=np.int64).reshape(-1, 3)[:, 1:],
        names=tuple(files.names),
        nbytes=sum(emitter.nbytes for emitter in emitters),
        how=(*sorted({emitter.how for emitter in emitters}), *lease.how),
        peak_buffer_nbytes=lease.used_nbytes,
        parameters=_hash([emitter.crcs_of_parameters for emitter in emitters]),
        others=_hash([emitter.crcs_of_others for emitter in emitters]),
    )


def _hash(checksums: Sequence[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(checksums), digest_size=16).digest() if any(checksums) else b""


# The threads.


def _in_turn(files: Sequence[FileEmitter], borrowed: frozenset[int], *, are_borrowed: bool) -> Iterator[Emission]:
    """One block of each file after the other, as :meth:`FileEmitter.blocks` gives them."""
    # The last file comes first: it may hold the items of variable size, which one thread at a time asks for.
    waiting = deque((file, file.blocks(borrowed, are_borrowed=are_borrowed)) for file in reversed(files))
    while waiting:
        file, blocks = waiting[0]
        block = next(blocks, None)
        if block is None:
            waiting.popleft()
        else:
            waiting.rotate(-1)
            yield Emission(block, file)


def _work(context: WriteContext, threads: int, blocks: Iterator[Emission]) -> None:
    """Write all blocks. If one fails, raise its error and not the "stopped" of the other threads."""
    taking = threading.Lock()

    def write_blocks() -> None:
        """Write block after block. While a block is written, the copy from a device into the next one runs."""
        pending: list[Emission] = []
        with torch.no_grad():  # each thread has its own grad mode
            try:
                while True:
                    context.check_stop()
                    with taking:
                        block = next(blocks, None)
                    goes_on = False
                    if block is not None:
                        pending.append(block)
                        goes_on = block.prepare()
                    while len(pending) > goes_on:
                        pending[0].write()
                        pending.pop(0).drop()
                    if block is None:
                        return
            except BaseException:
                context.failed.set()
                raise
            finally:
                for block in pending:
                    block.drop()

    with thread_pool(threads, "robust_dcp-write") as pool:
        try:
            tasks = [submit(pool, write_blocks) for _ in range(threads)]
            errors = [error for task in tasks if (error := task.exception()) is not None]
        except BaseException:  # for example Ctrl-C: the threads end at their next block
            context.failed.set()
            raise
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error
