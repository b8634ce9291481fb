"""A read of several wanted ranges: each byte where it is wanted, whichever way it takes, and nothing beside it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner import LoadPlan

import robust_dcp
from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.staging import BlockPool, aligned_bytes
from robust_dcp.storage.files.alignment import BUFFERED, Alignment
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.layouts.places import PAGE_NBYTES
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.reading.scattered_read import LEAST_STRAIGHT_NBYTES, ScatteredRead, Wanted
from tests.storage.test_data_file import BLOCK_NBYTES, FILE_NBYTES, blocks, file, forget
from tests.support.simulated_disk import WatchedDisk

__all__ = ["file"]

_LONG = 3 * LEAST_STRAIGHT_NBYTES
gaps = st.one_of(st.integers(0, 100), st.integers(0, 2 * PAGE_NBYTES))
lengths = st.one_of(st.integers(0, 100), st.integers(0, _LONG))


def wanted_in(memory: np.ndarray[Any, Any], place: int, offset: int, nbytes: int) -> Wanted:
    view = memoryview(memory)[place : place + nbytes]
    return Wanted(offset, view, memory.ctypes.data + place)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 3 * PAGE_NBYTES),
    st.lists(st.tuples(gaps, lengths, st.sampled_from([0, 64, 512, 4096, None])), min_size=1, max_size=5),
    st.sampled_from([BUFFERED, Alignment(512, 512), Alignment(4, 512), Alignment(4096, 4096), Alignment(4096, 512)]),
    st.floats(0, 1.2),
)
def test_every_wanted_byte_arrives_where_it_is_wanted(
    offset: int, pieces: list[tuple[int, int, int | None]], alignment: Alignment, share_read: float
) -> None:
    content = np.random.default_rng(7).integers(0, 256, 1 << 20, dtype=np.uint8)
    memory = aligned_bytes(len(pieces) * (_LONG + 3 * PAGE_NBYTES))
    wanted, end = [], offset
    for number, (gap, nbytes, shift) in enumerate(pieces):
        begin = end + gap
        place = number * (_LONG + 3 * PAGE_NBYTES) + PAGE_NBYTES
        place += begin % PAGE_NBYTES if shift is None else shift  # as in the file, or somewhere
        wanted.append(wanted_in(memory, place, begin, nbytes))
        end = begin + nbytes
    block = BlockPool().lease(end - offset + 2 * PAGE_NBYTES, 1).take()
    scattered = ScatteredRead(block, offset, end, wanted, alignment)

    at = scattered.first
    for buffer in scattered.buffers:  # what the kernel does
        address = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
        assert not (address % alignment.memory or at % alignment.offset or buffer.nbytes % alignment.offset)
        buffer[:] = content[at : at + buffer.nbytes].data
        at += buffer.nbytes
    assert scattered.first <= offset
    assert at >= end

    found_end = min(end, offset + int((end - offset) * share_read))
    expected = np.zeros_like(memory)
    for number, each in enumerate(wanted):
        crc32 = scattered.finish(number, found_end, checksum=True)
        found = content[each.offset : max(each.offset, min(each.end, found_end))]
        assert crc32 == zlib.crc32(found.tobytes())
        place = each.address - memory.ctypes.data
        assert memory[place : place + len(found)].tobytes() == found.tobytes()
        expected[place : place + each.view.nbytes] = 1
    assert not memory[expected == 0].any()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5000), st.lists(st.tuples(gaps, lengths), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_a_file_is_read_into_several_places(
    file: Path, offset: int, pieces: list[tuple[int, int]], cached: bool, is_like_in_file: bool
) -> None:
    content = file.read_bytes()
    if not cached:
        forget(file)
    memory = aligned_bytes(2 * BLOCK_NBYTES)
    wanted, end = [], offset
    for gap, nbytes in pieces:
        begin = end + gap
        wanted.append(wanted_in(memory, begin if is_like_in_file else begin + 64, begin, nbytes))
        end = begin + nbytes
    nbytes = max(end - offset, 300 << 10)  # enough for a direct read
    opened = DataFile(PosixDisk(), str(file), None)
    with blocks().lent() as block:
        scattered, found = opened.read_scattered(block, offset, nbytes, wanted)
        opened.close()
        assert found == min(nbytes, FILE_NBYTES - offset)
        for number, each in enumerate(wanted):
            assert scattered.finish(number, end, checksum=True) == zlib.crc32(content[each.offset : each.end])
            assert bytes(each.view) == content[each.offset : each.end]


NUMELS = {"a": 30_000, "b": 200_001, "c": 77_777, "step": 1, "d": 150_000}


def saved(path: Path, layout: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    state_dict = {name: torch.rand(numel, generator=generator) for name, numel in NUMELS.items()}
    writer = robust_dcp.RobustWriter(path, layout=layout, files_per_rank=1)
    robust_dcp.save(state_dict, storage_writer=writer, no_dist=True)
    return state_dict


def data_file(path: Path) -> Path:
    (found,) = [each for each in path.iterdir() if each.suffix in (".distcp", ".safetensors")]
    return found


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
@pytest.mark.parametrize("cached", [True, False])
def test_neighbours_are_read_at_once_and_straight_into_their_targets(tmp_path: Path, layout: str, cached: bool) -> None:
    expected = saved(tmp_path / "step", layout)
    path = data_file(tmp_path / "step")
    forget(path)
    if cached:
        path.read_bytes()
    disk = WatchedDisk(PosixDisk())
    found = {name: torch.zeros(numel) for name, numel in NUMELS.items()}
    reader = robust_dcp.RobustReader(tmp_path / "step", disk=disk)
    robust_dcp.load(found, storage_reader=reader, no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    reads = [operation for operation, file in disk.calls if operation == "pread_into" and file == str(path)]
    assert len(reads) == 1 + 2  # the length and the head, or the tail and the footer


def flipped(data: bytearray, at: int) -> None:
    data[at] ^= 1


def ended(data: bytearray, at: int) -> None:
    del data[at:]


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
@pytest.mark.parametrize("damage", [flipped, ended])
@pytest.mark.parametrize("name", ["a", "c"])
def test_damage_within_a_group_is_found_and_named(
    tmp_path: Path, layout: str, damage: Callable[[bytearray, int], None], name: str
) -> None:
    expected = saved(tmp_path / "step", layout)
    path = data_file(tmp_path / "step")
    data = bytearray(path.read_bytes())
    damage(data, data.index(expected[name].numpy().tobytes()) + 1001)
    path.write_bytes(data)
    found = {each: torch.zeros(numel) for each, numel in NUMELS.items()}
    with pytest.raises(CorruptCheckpoint) as caught:
        robust_dcp.load(found, checkpoint_id=tmp_path / "step", no_dist=True)
    assert caught.value.file == str(path)
    if damage is flipped:
        assert name in str(caught.value.item)


def test_an_item_that_is_asked_for_twice_is_read_twice(tmp_path: Path) -> None:
    class Twice(robust_dcp.RobustLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            plan = super().create_local_plan()
            plan.items.extend(plan.items[:])
            return plan

    expected = saved(tmp_path / "step", "torch")
    found = {name: torch.zeros(numel) for name, numel in NUMELS.items()}
    robust_dcp.load(found, checkpoint_id=tmp_path / "step", planner=Twice(), no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
