"""Blocks are aligned and reused."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from robust_dcp.staging.blocks import Block, BlockLease, release_blocks


def test_a_later_lease_gets_the_blocks_of_an_earlier_one_if_they_are_as_large() -> None:
    release_blocks()
    with BlockLease(4096, 1) as lease:
        block = lease.take()
        lease.give_back(block)
        assert lease.take() is block
        lease.give_back(block)
    with BlockLease(4096, 1) as lease:
        assert lease.take() is block
        lease.give_back(block)
    with BlockLease(8192, 1) as lease:
        lease.give_back(lease.take())
    with BlockLease(4096, 1) as lease:
        assert lease.take() is not block


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python 3.12 on, where threads run as well
def test_a_forked_process_writes_into_blocks_of_its_own() -> None:
    block = Block(8192)
    block.data[:] = 7
    child = os.fork()
    if child == 0:
        block.data[:] = 9
        os._exit(int(block.data[0]))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 9
    assert set(block.data.tolist()) == {7}


def _flags_of(block: Block) -> set[str]:
    """What the kernel says of a block's memory."""
    for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        begin, end = (int(address, 16) for address in area.split()[0].split("-"))
        if begin <= block.address < end:
            return set(area.partition("VmFlags:")[2].split())
    raise AssertionError("the block is nowhere in memory")


def test_blocks_are_private_memory_that_may_be_in_huge_pages() -> None:
    flags = _flags_of(Block(8 << 20))
    assert "sh" not in flags
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def test_blocks_that_devices_read_into_are_not_in_a_forked_process() -> None:
    with BlockLease(2 << 20, 1, of_load=True) as lease:
        assert "dc" in _flags_of(lease.take())
    assert "dc" not in _flags_of(Block(2 << 20))
