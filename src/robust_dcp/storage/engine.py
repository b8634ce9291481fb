"""Writes the files of one rank: every record to its place, checksummed on the way, on a few threads.

Owns threads, packing of small records into blocks, and the order write, ``fsync``, close. Never decides places
(``layout``) nor makes a checkpoint visible (``commit``). Called by ``writer``.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.planner import WriteItem

from robust_dcp.comm import Stopped
from robust_dcp.errors import PlanConflict, RobustCheckpointError
from robust_dcp.staging import to_host
from robust_dcp.storage.checksum import crc32
from robust_dcp.storage.data_files import DataFile, create_data_files, discard
from robust_dcp.storage.disk import Disk
from robust_dcp.storage.layout import LARGE_NBYTES, PAGE_NBYTES, RECORD_ALIGNMENT, Placements, Slot, slots_of
from robust_dcp.storage.torch_zip import RecordTemplate, is_fixed_size, payload_view, record_template

__all__ = ["Resolve", "WrittenFiles", "write_files"]

Resolve = Callable[[WriteItem], "torch.Tensor | io.BytesIO"]
Record = tuple["bytes | memoryview", ...]
"""The bytes of one item, in parts that follow each other."""

BLOCK_NBYTES = 8 << 20
"""Small records are gathered into writes of this size."""

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
    items: Sequence[WriteItem],
    placements: Placements,
    resolve: Resolve,
    *,
    threads: int,
    check_stop: Callable[[], None],
    known_places: npt.NDArray[np.int64] | None = None,
) -> WrittenFiles:
    """Write the files of one rank and make them durable.

    Args:
        items: the write items, in the order of ``placements``.
        resolve: gives the data of an item, ``SavePlanner.resolve_data``; called from several threads.
        check_stop: called between blocks; raises when the save is given up elsewhere.
        known_places: int64 ``[v, 2]``, offset and length of the items of variable size in an earlier save by the same
            plan. An item that still fits keeps its offset, so that one that grows does not move all others.

    Raises:
        StorageError: if the file system refuses; nothing that this call made stays behind.
        RobustCheckpointError: if an item cannot be resolved; names the item.
    """
    files = create_data_files(disk, directory, rank, placements.file_nbytes)
    failed = threading.Event()
    slots = slots_of(placements, known_places)

    def write(file: DataFile) -> list[tuple[int, int, int]]:
        writer = _FileWriter(disk, file, resolve, check_stop, failed)
        try:
            return writer.write(items, placements, slots)
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
        resolve: Resolve,
        check_stop: Callable[[], None],
        sibling_failed: threading.Event,
    ) -> None:
        self._disk = disk
        self._file = file
        self._resolve = resolve
        self._check_stop = check_stop
        self._sibling_failed = sibling_failed
        self._block = bytearray()
        self._end = 0

    def write(
        self, items: Sequence[WriteItem], placements: Placements, slots: dict[int, Slot]
    ) -> list[tuple[int, int, int]]:
        """Write all records of this file; (place in plan, offset, length) of those of variable size."""
        members = np.flatnonzero(placements.file == self._file.number)
        variable: list[tuple[int, int, int]] = []
        too_large: list[tuple[int, Record]] = []
        for place in sorted(members.tolist(), key=lambda p: slots[p].offset if p in slots else placements.offset[p]):
            item = items[place]
            with _naming(item):
                if placements.offset[place] >= 0:
                    self._write_fixed(item, int(placements.offset[place]), int(placements.nbytes[place]))
                    continue
                record = self._variable_record(item)
                slot = slots.get(place)
                if slot is not None and sum(map(len, record)) > slot.nbytes:
                    too_large.append((place, record))
                    continue
                variable.append((place, *self._append_variable(record, None if slot is None else slot.offset)))
        variable.extend((place, *self._append_variable(record, None)) for place, record in too_large)
        self._flush()
        self._disk.fsync(self._file.file)
        self._disk.close(self._file.file)
        self._file.nbytes = self._end
        return variable

    def _write_fixed(self, item: WriteItem, offset: int, nbytes: int) -> None:
        tensor = self._tensor_of(item)
        template = record_template(tensor.dtype, tuple(tensor.shape))
        if template is None or template.nbytes != nbytes:
            raise PlanConflict(f"the record of {item.index.fqn!r} is not the one that was planned", key=item.index.fqn)
        self._append_all(_framed(template, tensor), offset)

    def _variable_record(self, item: WriteItem) -> Record:
        """The bytes of an item whose length was not planned."""
        data = self._resolve(item)
        if isinstance(data, torch.Tensor):
            template = record_template(data.dtype, tuple(data.shape)) if is_fixed_size(data) else None
            if template is not None:
                return _framed(template, to_host(data))
            buffer = io.BytesIO()
            torch.save(_compact(data), buffer)
            data = buffer
        return (data.getbuffer(),)

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

    def _tensor_of(self, item: WriteItem) -> torch.Tensor:
        """The data of an item of fixed size, on the host; it must be what the plan says."""
        data = self._resolve(item)
        planned = item.tensor_data
        if not isinstance(data, torch.Tensor) or planned is None:
            raise PlanConflict(
                f"the planner's resolve_data gave {type(data).__name__} for the tensor {item.index.fqn!r}",
                key=item.index.fqn,
            )
        if data.dtype != planned.properties.dtype or data.shape != planned.chunk.sizes:
            raise PlanConflict(
                f"the planner's resolve_data gave {data.dtype} {list(data.shape)} for {item.index.fqn!r}, the plan "
                f"says {planned.properties.dtype} {list(planned.chunk.sizes)}; a planner that transforms tensors must "
                "say so in create_local_plan",
                key=item.index.fqn,
            )
        return to_host(data)

    def _append(self, data: bytes | memoryview, at: int | None = None) -> None:
        """Add bytes at the end of the file, or at ``at`` after it; what lies between reads as zeros."""
        gap = 0 if at is None else at - self._end
        if gap > PAGE_NBYTES:
            self._flush()
            self._end += gap
        elif gap > 0:
            self._block += bytes(gap)
            self._end += gap
        if len(data) < LARGE_NBYTES:
            self._block += data
            self._end += len(data)
            if len(self._block) >= BLOCK_NBYTES:
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
        self._stop_if_told()
        if self._block:
            self._disk.pwrite(self._file.file, self._block, self._end - len(self._block))
            self._block = bytearray()

    def _stop_if_told(self) -> None:
        if self._sibling_failed.is_set():
            raise _SiblingFailed
        self._check_stop()


@contextmanager
def _naming(item: WriteItem) -> Iterator[None]:
    """Whatever goes wrong within names the item."""
    try:
        yield
    except (RobustCheckpointError, Stopped, _SiblingFailed):
        raise
    except Exception as error:
        raise RobustCheckpointError(f"cannot save {item.index.fqn!r}: {type(error).__name__}: {error}") from error


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
