"""Writes the files of one rank: every record to its place, checksummed on the way, on a few threads.

Owns threads and the order write, ``fsync``, close. Never decides places (``layout``) or pieces (``write_order``), nor
makes a checkpoint visible (``commit``). Called by ``writer``.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.staging import to_host
from robust_dcp.storage.checksum import crc32
from robust_dcp.storage.data_files import DataFile, create_data_files, discard
from robust_dcp.storage.disk import Disk
from robust_dcp.storage.item_source import ItemSource, NamedErrors, planned_tensor
from robust_dcp.storage.layout import LARGE_NBYTES, PAGE_NBYTES, RECORD_ALIGNMENT, Placements, Slot, slots_of
from robust_dcp.storage.pack import Block, pack
from robust_dcp.storage.torch_zip import RecordTemplate, is_fixed_size, payload_view, record_template
from robust_dcp.storage.write_order import BLOCK_NBYTES, LargeRecord, WriteOrder, write_orders

__all__ = ["WrittenFiles", "write_files"]

Record = tuple["bytes | memoryview", ...]
"""The bytes of one item, in parts that follow each other."""

SMALL_NBYTES = 16 << 10
"""Where records are smaller than this on average, what Python does for each outweighs copies and checksums."""

SLICE_NBYTES = 64 << 20
"""Large payloads go out in writes of this size; between two of them the thread looks whether it shall stop."""


@dataclass(frozen=True, eq=False)
class WrittenFiles:
    """What one rank has written, durably, but not yet committed.

    Attributes:
        generation: distinguishes the names of these files from older ones in the same directory.
        variable_places: int64 ``[v, 2]``, offset and length of each item of variable size, in plan order.
        names: the files, relative to the directory.
        nbytes: bytes written.
    """

    generation: int
    variable_places: npt.NDArray[np.int64]
    names: tuple[str, ...]
    nbytes: int


def write_files(
    disk: Disk,
    directory: str,
    rank: int,
    source: ItemSource,
    placements: Placements,
    *,
    threads: int,
    check_stop: Callable[[], None],
    known_places: npt.NDArray[np.int64] | None = None,
) -> WrittenFiles:
    """Write the files of one rank and make them durable.

    Args:
        source: the items, in the order of ``placements``; their data is asked for in several threads.
        check_stop: called between blocks; raises when the save is given up elsewhere.
        known_places: int64 ``[v, 2]``, offset and length of the items of variable size in an earlier save by the same
            plan. An item that still fits keeps its offset, so that one that grows does not move all others.

    Raises:
        StorageError: if the file system refuses; nothing that this call made stays behind.
        PlanConflict: if an item is not what was planned.
        RobustCheckpointError: if an item cannot be resolved; names the item.
    """
    orders = write_orders(placements, source)
    files = create_data_files(disk, directory, rank, placements.file_nbytes)
    failed, packing = threading.Event(), threading.Lock()
    slots = slots_of(placements, known_places)

    def write(file: DataFile) -> list[tuple[int, int, int]]:
        try:
            with torch.no_grad():  # grad mode is each thread's own
                writer = _FileWriter(disk, file, source, check_stop, failed, packing)
                return writer.write(orders[file.number], slots)
        except BaseException:
            failed.set()
            raise

    try:
        with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="robust_dcp-write") as pool:
            tasks = [pool.submit(write, file) for file in files]
        places = [place for task in _first_error_first(tasks) for place in task]
        disk.fsync_directory(directory)
    except BaseException:
        discard(disk, files)
        raise
    places.sort()
    return WrittenFiles(
        generation=files[0].generation if files else 0,
        variable_places=np.array([place[1:] for place in places], dtype=np.int64).reshape(-1, 2),
        names=tuple(os.path.basename(file.file.path) for file in files),
        nbytes=sum(file.nbytes for file in files),
    )


def _first_error_first(tasks: Sequence[Future[list[tuple[int, int, int]]]]) -> list[list[tuple[int, int, int]]]:
    """The results of all tasks; raises the error that stopped the others rather than "stopped"."""
    errors = [error for task in tasks if (error := task.exception()) is not None]
    for error in errors:
        if not isinstance(error, _SiblingFailed):
            raise error
    return [task.result() for task in tasks]


class _SiblingFailed(Exception):
    """Another thread of this rank failed; its error is the one to raise."""


class _FileWriter:
    """Writes one file from front to back."""

    def __init__(
        self,
        disk: Disk,
        file: DataFile,
        source: ItemSource,
        check_stop: Callable[[], None],
        sibling_failed: threading.Event,
        packing: threading.Lock,
    ) -> None:
        self._disk = disk
        self._file = file
        self._source = source
        self._check_stop = check_stop
        self._sibling_failed = sibling_failed
        self._packing = packing
        self._packed = np.empty(0, dtype=np.uint8)
        self._pending = bytearray()
        self._end = 0

    def write(self, order: WriteOrder, slots: dict[int, Slot]) -> list[tuple[int, int, int]]:
        """Write all records of this file; (place in plan, offset, length) of those of variable size."""
        blocks = [piece for piece in order.fixed if isinstance(piece, Block)]
        self._packed = np.empty(max((block.nbytes for block in blocks), default=0), dtype=np.uint8)
        for piece in order.fixed:
            if isinstance(piece, Block):
                self._write_block(piece)
            else:
                self._write_large(piece)
        variable = self._write_variable(order.variable, slots)
        self._flush()
        self._disk.fsync(self._file.file)
        self._disk.close(self._file.file)
        self._file.nbytes = self._end
        return variable

    def _write_block(self, block: Block) -> None:
        self._flush()
        # Many small items are work for the interpreter, which runs one thread at a time: two that take turns at every
        # call that lets go of the GIL need twice the time of one. So one packs while the others write.
        with self._packing if block.nbytes < SMALL_NBYTES * len(block.places) else nullcontext():
            pack(block, self._source, self._packed)
        self._stop_if_told()
        self._disk.pwrite(self._file.file, self._packed[: block.nbytes].data, block.offset)
        self._end = block.offset + block.nbytes

    def _write_large(self, large: LargeRecord) -> None:
        with NamedErrors(self._source, large.place):
            record = _framed(large.template, to_host(planned_tensor(self._source, large.place, large.template)))
        self._append_all(record, large.offset)

    def _write_variable(self, places: Sequence[int], slots: dict[int, Slot]) -> list[tuple[int, int, int]]:
        """Each to its slot if it has one and fits; the others to the end of the file."""
        written: list[tuple[int, int, int]] = []
        too_large: list[tuple[int, Record]] = []
        for place in sorted(places, key=lambda place: slots[place].offset) if slots else places:
            record = self._variable_record(place)
            slot = slots.get(place)
            if slot is not None and sum(map(len, record)) > slot.nbytes:
                too_large.append((place, record))
            else:
                written.append((place, *self._append_variable(record, None if slot is None else slot.offset)))
        written.extend((place, *self._append_variable(record, None)) for place, record in too_large)
        return written

    def _variable_record(self, place: int) -> Record:
        """The bytes of an item whose length was not planned."""
        with NamedErrors(self._source, place):
            data = self._source.resolve(place)
            if not isinstance(data, torch.Tensor):
                return (data.getbuffer(),)
            template = record_template(data.dtype, tuple(data.shape)) if is_fixed_size(data) else None
            if template is not None:
                return _framed(template, to_host(data))
            buffer = io.BytesIO()
            torch.save(_compact(data), buffer)
            return (buffer.getbuffer(),)

    def _append_variable(self, record: Record, offset: int | None) -> tuple[int, int]:
        """Write a record at ``offset``, or at the next free place; (offset, length)."""
        if offset is None:
            offset = -(-self._end // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
        self._append_all(record, offset)
        return offset, self._end - offset

    def _append_all(self, record: Record, offset: int) -> None:
        self._append(b"", at=offset)
        for part in record:
            self._append(part)

    def _append(self, data: bytes | memoryview, at: int | None = None) -> None:
        """Add bytes at the end of the file, or at ``at`` after it; what lies between reads as zeros."""
        gap = 0 if at is None else at - self._end
        if gap > PAGE_NBYTES:
            self._flush()
            self._end += gap
        elif gap > 0:
            self._pending += bytes(gap)
            self._end += gap
        if len(data) < LARGE_NBYTES:
            self._pending += data
            self._end += len(data)
            if len(self._pending) >= BLOCK_NBYTES:
                self._flush()
            return
        self._flush()
        view = memoryview(data)
        for start in range(0, len(view), SLICE_NBYTES):
            self._stop_if_told()
            part = view[start : start + SLICE_NBYTES]
            self._disk.pwrite(self._file.file, part, self._end)
            self._end += len(part)

    def _flush(self) -> None:
        """Write what was appended and is not yet written."""
        self._stop_if_told()
        if self._pending:
            self._disk.pwrite(self._file.file, self._pending, self._end - len(self._pending))
            self._pending = bytearray()

    def _stop_if_told(self) -> None:
        if self._sibling_failed.is_set():
            raise _SiblingFailed
        self._check_stop()


def _framed(template: RecordTemplate, tensor: torch.Tensor) -> Record:
    payload = payload_view(tensor)
    checksum = crc32(payload)
    return template.header(checksum), payload, template.trailer(checksum)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor that shares no storage with a larger one: ``torch.save`` would write all of that storage."""
    tensor = tensor.detach().cpu()
    if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    return tensor
