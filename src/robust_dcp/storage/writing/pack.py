"""Packs records that go out in one write: the bytes of many tensors, one after the other, in a block of memory.

This module makes that cheap for each record and each byte. It never touches a file and keeps no buffer. Bytes that
direct I/O can take from the tensor itself do not pass through the block. ``write_order`` decides which records form a
block. ``steps`` calls this module from the engine's threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.staging import Block as Memory
from robust_dcp.staging import (
    DeviceCopies,
    TensorBytes,
    copy_bytes,
    flat_bytes,
    host_address,
    memory_at,
    to_host_together,
)
from robust_dcp.storage.layouts import Frame
from robust_dcp.storage.layouts.places import LARGE_NBYTES
from robust_dcp.storage.records.block_sums import SUM_NBYTES, block_counts, joined, sums_of
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.records.torch_zip import payload_view
from robust_dcp.storage.writing.copy_checked import copy_checked
from robust_dcp.storage.writing.item_source import ItemSource, NamedErrors, changed, planned_tensor
from robust_dcp.storage.writing.paged_file import PagedFile

__all__ = ["Block", "Packing"]

Int64 = npt.NDArray[np.int64]

_CRC_DTYPE = np.dtype("<u4")

_HOT_NBYTES = 512 << 10
"""So much is copied before it is checksummed: half of a small second-level cache, so that the checksum finds it
there.
"""

# Shorter copies keep the GIL. ctypes.memmove releases the GIL and takes it again, which costs more than it gains for a
# short copy. Measured with two threads that copy at once, in microseconds for each copy: 1 KiB takes 0.39 with the GIL
# held and 0.74 with it released; 64 KiB 1.8 and 4.8; 512 KiB 12.6 and 8.3. (A view of the tensor through NumPy, or
# torch's own copy, takes 1 to 3 microseconds more.)
_RELEASE_GIL_NBYTES = 256 << 10
_memmove_holding_gil = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


@dataclass(frozen=True, eq=False)
class Block:
    """n consecutive records of a file, with the gaps between them.

    Attributes:
        offset: where the block begins in the file, in bytes.
        nbytes: length of the block, up to the end of its last record.
        gap_before: bytes between the end of what comes before in the file and ``offset``; 0 if they are more than a
            page apart.
        places: int64 ``[n]``, the items' places in the plan.
        templates: the frames of the n records.
        tails: the bytes between each payload and the next record: the trailer without its checksum, and zeros.
        payload: int64 ``[n]``, where each payload begins, in bytes from the start of the block.
        payload_nbytes: int64 ``[n]``.
        crc: int64 ``[n, c]``, where each record's CRC-32 goes. c is 2 for records (header and trailer), and 0 if the
            head of the file has the CRC-32s.
        runs: how many records are copied before they are checksummed, from front to back: as many as fit into the
            processor's cache.
        large: which of the n records have so much data that it may be written from the tensor itself.
    """

    offset: int
    nbytes: int
    gap_before: int
    places: Int64
    templates: tuple[Frame, ...]
    tails: tuple[bytes, ...]
    payload: Int64
    payload_nbytes: Int64
    crc: Int64
    runs: tuple[int, ...]
    large: tuple[int, ...]

    @classmethod
    def of(cls, places: Int64, offsets: Int64, templates: tuple[Frame, ...], gap_before: int) -> Block:
        """Make the block of some records.

        Args:
            places: int64 ``[n]``, the items' places in the plan.
            offsets: int64 ``[n]``, where the records begin in the file, ascending.
            templates: the frames of the n records.
            gap_before: see the attribute.
        """
        starts = offsets - offsets[0]
        header = np.array([template.header_nbytes for template in templates], dtype=np.int64)
        payload = np.array([template.payload_nbytes for template in templates], dtype=np.int64)
        record = np.array([template.nbytes for template in templates], dtype=np.int64)
        crc_at = np.array([template.crc_at for template in templates], dtype=np.int64)
        gaps = np.append(starts[1:], starts[-1] + record[-1]) - starts - record
        cache_fulls = (starts + header + payload) // _HOT_NBYTES
        return cls(
            offset=int(offsets[0]),
            nbytes=int(starts[-1] + record[-1]),
            gap_before=gap_before,
            places=places,
            templates=templates,
            tails=tuple(_tail(one.blank_trailer, gap) for one, gap in zip(templates, gaps.tolist(), strict=True)),
            payload=starts + header,
            payload_nbytes=payload,
            crc=starts[:, None] + crc_at,
            runs=tuple(np.unique(cache_fulls, return_counts=True)[1].tolist()),
            large=tuple(np.flatnonzero(payload >= LARGE_NBYTES).tolist()),
        )


@lru_cache(maxsize=4096)
def _tail(trailer: bytes, gap: int) -> bytes:
    """The bytes after a payload. All records of a kind share one object."""
    return trailer + bytes(gap)


class _Elsewhere(NamedTuple):
    """A payload on a device: the number of its record, where it goes to, and its bytes as uint8 ``[nbytes]``."""

    number: int
    begin: int
    data: torch.Tensor


class _Begun(NamedTuple):
    """A large payload that has been asked for already. A copy of it from a device may be running."""

    data: TensorBytes
    wait: Callable[[], None] | None


class Packing:
    """The bytes of one block on their way to the file.

    Args:
        block: the records.
        source: gives their data.
        file: the file that the block belongs to.
        memory: has room for the block, counted from the start of the block's first page. Its contents do not matter.
        checksums: whether to compute CRC-32s. If not, the fields for them hold 0.
    """

    def __init__(self, block: Block, source: ItemSource, file: PagedFile, memory: Memory, *, checksums: bool) -> None:
        self._block = block
        self._source = source
        self._file = file
        self._memory = memory
        self._at = block.offset % file.page_nbytes  # the block lies in memory as it lies in the pages of the file
        self._target = memory.view[self._at : self._at + block.nbytes]
        self._checksums = checksums
        self._values = np.zeros(len(block.places), dtype=_CRC_DTYPE)
        self._sums: dict[int, list[int]] = {}
        self._begun: dict[int, _Begun] = {}
        self._elsewhere: list[_Elsewhere] = []
        self._straight: list[tuple[int, int, memoryview]] = []

    def begin_copies(self, copies: DeviceCopies) -> bool:
        """Ask for the large tensors, and begin the copies that run by themselves. Returns whether any does."""
        block = self._block
        with NamedErrors(self._source, int(block.places[0])) as current:
            for number in block.large:
                current.place = place = int(block.places[number])
                template = block.templates[number]
                data = TensorBytes(planned_tensor(self._source, place, template))
                wait = None
                if copies.can_run_ahead(data):
                    at = self._at + int(block.payload[number])
                    wait = copies.begin(data, 0, template.payload_nbytes, self._memory, at)
                self._begun[number] = _Begun(data, wait)
        return any(begun.wait is not None for begun in self._begun.values())

    def drop(self) -> None:
        """Wait until no device copies into the memory any more."""
        for begun in self._begun.values():
            if begun.wait is not None:
                begun.wait()
        self._begun = {}

    def pack(self) -> npt.NDArray[np.uint32]:
        """Make the bytes of the block.

        Returns:
            uint32 ``[m]``, the CRC-32 of each block of each payload, one payload after the other. It is empty without
            ``checksums``.

        Raises:
            PlanConflict: an item is not what was planned.
            RobustCheckpointError: an item cannot be resolved or read; the error names it.
        """
        block = self._block
        payload = block.payload.tolist()
        items = zip(block.places.tolist(), payload, block.templates, block.tails, strict=True)
        deferred: list[int] = []  # records with data that has yet to come from a device
        first = 0
        with NamedErrors(self._source, int(block.places[0])) as current:
            for n_records in block.runs:
                n_elsewhere = len(self._elsewhere)
                known = self._copy_run(first, islice(items, n_records), current)
                numbers: Sequence[int] = range(first, first + n_records)
                waiting = {item.number for item in self._elsewhere[n_elsewhere:]}
                if known or waiting:
                    numbers = [number for number in numbers if number not in known and number not in waiting]
                    deferred += waiting
                if self._checksums:
                    self._checksum(numbers, payload)
                first += n_records
            self._fetch(current)
        if self._checksums:
            self._checksum(deferred, payload)
            digits = self._values.view(np.uint8).reshape(-1, 1, _CRC_DTYPE.itemsize)
            into = self._memory.data[self._at : self._at + block.nbytes]
            into[block.crc[:, :, None] + np.arange(_CRC_DTYPE.itemsize)] = digits
        return self._sums_of_all()

    def _sums_of_all(self) -> npt.NDArray[np.uint32]:
        if not self._checksums:
            return np.empty(0, dtype=np.uint32)
        counts = block_counts(self._block.payload_nbytes)
        sums = np.repeat(self._values, counts).astype(np.uint32)
        behind = np.cumsum(counts).tolist()
        for number, blocks in self._sums.items():
            sums[behind[number] - len(blocks) : behind[number]] = blocks
        return sums

    def _note(self, number: int, sums: list[int]) -> None:
        """Keep the CRC-32s of the blocks of a payload, and the CRC-32 of the whole payload that follows from them."""
        self._values[number] = joined(sums, int(self._block.payload_nbytes[number]))
        self._sums[number] = sums

    def parts(self) -> list[memoryview]:
        """The bytes that :meth:`pack` made, in the order of the file: the memory of the block, and between its pages
        that of tensors.
        """
        parts: list[memoryview] = []
        done = 0
        for begin, end, data in self._straight:
            parts += [self._target[done:begin], data]
            done = end
        return [*parts, self._target[done:]]

    def _copy_run(self, first: int, items: Iterable[tuple[int, int, Frame, bytes]], current: NamedErrors) -> set[int]:
        """Copy some records. Returns the numbers of those that were checksummed during the copy."""
        target, address, source = self._target, self._memory.address + self._at, self._source
        known = set()
        for number, (place, begin, template, tail) in enumerate(items, first):
            current.place = place
            nbytes, header = template.payload_nbytes, template.blank_header
            end = begin + nbytes
            target[begin - len(header) : begin] = header
            target[end : end + len(tail)] = tail
            if number in self._begun:
                known.add(number)
                self._take_large(number, begin, nbytes)
                continue
            tensor = planned_tensor(source, place, template)
            if nbytes == 0:
                continue
            try:
                version = tensor._version
            except RuntimeError:  # torch does not count the changes of tensors that were made in inference mode
                version = -1
            found = host_address(tensor)
            if found is None:
                self._take_scattered(number, begin, tensor)
            elif nbytes >= _RELEASE_GIL_NBYTES:
                copy_bytes(address + begin, found, nbytes)
            else:
                _memmove_holding_gil(address + begin, found, nbytes)
            if version >= 0 and tensor._version != version:
                raise changed(source, place)
        return known

    def _take_large(self, number: int, begin: int, nbytes: int) -> None:
        data, wait = self._begun[number]
        if wait is not None:
            wait()
            sums = sums_of(self._target[begin : begin + nbytes]) if self._checksums else []
        elif data.address is not None and self._file.takes(data.address, self._block.offset + begin):
            sums = self._take_straight(begin, memory_at(data.address, nbytes))
        else:
            sums = copy_checked(data, 0, nbytes, self._memory, self._at + begin, checksums=self._checksums)
        self._note(number, sums)

    def _take_straight(self, begin: int, data: memoryview) -> list[int]:
        """Copy only those bytes of a payload that share a page with its neighbours. The rest is written from the tensor
        itself.
        """
        page_nbytes = self._file.page_nbytes
        end = begin + len(data)
        first = -(-(self._at + begin) // page_nbytes) * page_nbytes - self._at
        last = (self._at + end) // page_nbytes * page_nbytes - self._at
        if first >= last:
            self._target[begin:end] = data
        else:
            self._target[begin:first] = data[: first - begin]
            self._target[last:end] = data[last - begin :]
            self._straight.append((first, last, data[first - begin : last - begin]))
        return sums_of(data) if self._checksums else []

    def _take_scattered(self, number: int, begin: int, tensor: torch.Tensor) -> None:
        if tensor.is_cpu:
            data = TensorBytes(tensor)
            data.copy(0, data.nbytes, self._memory, self._at + begin)
        else:
            self._elsewhere.append(_Elsewhere(number, begin, flat_bytes(tensor)))

    def _fetch(self, current: NamedErrors) -> None:
        """Copy everything that is on a device, all at once: each copy from a device waits for it, however small the
        copy is.
        """
        if self._elsewhere:
            current.place = int(self._block.places[self._elsewhere[0].number])
            copies = to_host_together([item.data for item in self._elsewhere])
            for item, copy in zip(self._elsewhere, copies, strict=True):
                self._target[item.begin : item.begin + copy.numel()] = payload_view(copy)

    def _checksum(self, numbers: Sequence[int], payload: list[int]) -> None:
        target, templates = self._target, self._block.templates
        small = [n for n in numbers if templates[n].payload_nbytes <= SUM_NBYTES]
        self._values[small] = [crc32(target[payload[n] : payload[n] + templates[n].payload_nbytes]) for n in small]
        if len(small) < len(numbers):
            for n in set(numbers).difference(small):
                self._note(n, sums_of(target[payload[n] : payload[n] + templates[n].payload_nbytes]))
