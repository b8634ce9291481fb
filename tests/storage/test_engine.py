"""Files come out byte for byte as if each record were framed by itself, whatever is packed together."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.files.kernel import Alignment
from robust_dcp.storage.layouts.places import LARGE_NBYTES, place_as_they_come
from tests.storage.sources import ListSource, content_of, framed_one_by_one, placed, placed_at, write
from tests.storage.test_record import DTYPES, shapes, tensor_of
from tests.support.simulated_disk import SimulatedDisk, WatchedDisk


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(tuple(reversed(range(tensor.ndim))))


def part_of_larger(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1), tensor.reshape(-1)])[tensor.numel() :].reshape(tensor.shape)


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 1]


def lazy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in (torch.complex64, torch.complex128):
        return tensor.conj()
    return tensor.to(torch.complex64).conj().imag if tensor.dtype == torch.float32 else tensor


class Tagged(torch.Tensor):
    """A subclass that behaves as a plain tensor does."""


def tagged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(Tagged)


def parameter(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor


_COMMON = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
_KINDS = [plain, plain, plain, transposed, part_of_larger, every_second, lazy, tagged, parameter]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    kind = draw(st.sampled_from(_KINDS))
    # Not every dtype can be stacked or concatenated.
    dtype = draw(st.sampled_from(DTYPES if kind in (plain, transposed) else _COMMON))
    shape = draw(shapes) if draw(st.integers(0, 19)) else (LARGE_NBYTES // dtype.itemsize + draw(st.integers(-1, 1)),)
    return kind(tensor_of(dtype, shape, draw(st.integers(0, 9))))


@settings(max_examples=100, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=30), st.integers(1, 3), st.sampled_from([4096, 12_345, 8 << 20]))
def test_planned_files_are_those_of_records_framed_one_by_one(
    values: list[torch.Tensor], files: int, block_nbytes: int
) -> None:
    placements = placed(values, files=files)
    disk = SimulatedDisk()
    first = write(ListSource(values), placements, disk, block_bytes=block_nbytes)
    again = write(ListSource(values), placements, disk, block_bytes=block_nbytes)
    expected = framed_one_by_one(values, placements)
    for written in (first, again):
        assert [content_of(disk, name) for name in written.names] == expected
        assert written.nbytes == sum(map(len, expected))


@settings(max_examples=50, deadline=None)
@given(st.data(), st.lists(tensors(), min_size=1, max_size=12), st.sampled_from([4096, 8 << 20]))
def test_what_lies_between_records_reads_as_zeros(
    data: st.DataObject, values: list[torch.Tensor], block_nbytes: int
) -> None:
    gap = st.sampled_from([0, 1, 63, 64, 4096, 4097, 100_000])
    placements = placed_at(values, data.draw(st.lists(gap, min_size=len(values), max_size=len(values))))
    disk = SimulatedDisk()
    written = write(ListSource(values), placements, disk, block_bytes=block_nbytes)
    assert [content_of(disk, name) for name in written.names] == framed_one_by_one(values, placements)


def test_thousands_of_small_tensors_go_out_in_a_few_writes() -> None:
    values = [torch.full((256,), float(n)) for n in range(10_000)]
    placements = placed(values, files=2)
    disk = WatchedDisk(SimulatedDisk())
    written = write(ListSource(values), placements, disk)
    assert [content_of(disk, name) for name in written.names] == framed_one_by_one(values, placements)
    # Of each file: two blocks, the two checksums of the record that is cut between them, and the footer.
    assert disk.operations.count("pwrite") <= 2 * 5


class NotesAddresses(SimulatedDisk):
    """Notes where in memory each part of a write was."""

    def __init__(self) -> None:
        super().__init__(Alignment(memory=512, offset=512))
        self.writes: list[list[tuple[int, int]]] = []

    def pwrite(self, file: OpenFile, data: Any, offset: int) -> None:
        parts = [memoryview(part) for part in (data if isinstance(data, list) else [data])]
        self.writes.append([(np.frombuffer(part, np.uint8).ctypes.data, part.nbytes) for part in parts])
        super().pwrite(file, data, offset)


def at_page_offset(offset: int, nbytes: int) -> torch.Tensor:
    """A tensor whose data begins at ``offset`` modulo 4096 in memory: a view, as a part of a flat buffer is."""
    memory = torch.arange(nbytes + 4096, dtype=torch.int64).to(torch.uint8)
    return memory[(offset - memory.data_ptr()) % 4096 :][:nbytes]


@pytest.mark.parametrize("page_offset", [64, 192, 1])
def test_tensors_of_some_mib_share_writes_wherever_they_lie_in_memory(page_offset: int) -> None:
    values = [at_page_offset(page_offset, LARGE_NBYTES + 4096 * n + 7 * n) for n in range(14)]
    placements = placed(values, files=1)
    disk = NotesAddresses()
    written = write(ListSource(values), placements, disk)
    assert [content_of(disk, name) for name in written.names] == framed_one_by_one(values, placements)
    # 14.4 MiB in blocks of 8 MiB: two blocks, the two checksums of the record that is cut between them, and the footer.
    assert len([parts for parts in disk.writes if sum(nbytes for _, nbytes in parts) > LARGE_NBYTES]) == 2
    assert len(disk.writes) <= 5
    of_tensors = [(value.data_ptr(), value.data_ptr() + value.nbytes) for value in values]
    in_place = sum(
        nbytes
        for parts in disk.writes
        for address, nbytes in parts
        if any(begin <= address and address + nbytes <= end for begin, end in of_tensors)
    )
    total = sum(value.nbytes for value in values)
    # Of tensors that lie where their place in the file does, all but the pages at both ends, and short pieces of one
    # that is cut; of others nothing.
    assert in_place >= total - 2 * 4096 * len(values) - 2 * LARGE_NBYTES if page_offset == 64 else in_place == 0


def test_objects_and_tensors_of_unknown_length_are_placed_as_they_come() -> None:
    values: list[Any] = [
        b"an object",
        torch.arange(5.0),
        torch.eye(3).to_sparse(),
        torch.arange(6).reshape(2, 3).t(),
        b"",
        torch.zeros(LARGE_NBYTES, dtype=torch.uint8),
    ]
    disk = SimulatedDisk()
    placements = place_as_they_come([1] * len(values), files=2)
    written = write(ListSource(values), placements, disk)
    contents = [content_of(disk, name) for name in written.names]
    for value, file, (offset, nbytes) in zip(
        values, placements.file.tolist(), written.variable_places.tolist(), strict=True
    ):
        record = contents[file][offset : offset + nbytes]
        if isinstance(value, bytes):
            assert record == value
        else:
            assert torch.equal(torch.load(io.BytesIO(record), weights_only=True).to_dense(), value.to_dense())


def test_objects_keep_their_slots_and_move_nothing_that_is_planned() -> None:
    values: list[Any] = [b"a" * 100, torch.arange(5.0), b"b" * 100]
    placements = placed(values, files=1)
    disk = SimulatedDisk()
    first = write(ListSource(values), placements, disk)
    grown: list[Any] = [b"A" * 200, values[1], b"B" * 50]
    again = write(ListSource(grown), placements, disk, known_places=first.variable_places)
    assert again.variable_places[1, 0] == first.variable_places[1, 0]
    content = content_of(disk, again.names[1])
    for value, (offset, nbytes) in zip([grown[0], grown[2]], again.variable_places.tolist(), strict=True):
        assert content[offset : offset + nbytes] == value
    assert content_of(disk, again.names[0]) == content_of(disk, first.names[0])
