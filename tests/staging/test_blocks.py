"""Blocks are aligned, reused, and no more than were leased."""

from __future__ import annotations

import pytest

from robust_dcp.staging import BlockPool, aligned_bytes


def test_blocks_begin_at_a_page() -> None:
    with BlockPool().lease(8192, 3) as lease:
        blocks = [lease.take() for _ in range(3)]
        assert [(block.address % 4096, len(block.data)) for block in blocks] == [(0, 8192)] * 3
        blocks[0].data[:] = 7
        assert int(blocks[0].tensor.sum()) == 7 * 8192
    assert aligned_bytes(100).ctypes.data % 4096 == 0


def test_no_more_blocks_are_given_than_were_leased() -> None:
    with BlockPool().lease(4096, 2) as lease:
        first = lease.take()
        lease.take()
        with pytest.raises(RuntimeError, match="all 2 blocks of 4096 bytes are taken"):
            lease.take()
        lease.give_back(first)
        assert lease.take() is first
        assert lease.used_nbytes == 8192


def test_a_later_lease_gets_the_blocks_of_an_earlier_one_if_they_are_as_large() -> None:
    pool = BlockPool()
    with pool.lease(4096, 1) as lease:
        block = lease.take()
        lease.give_back(block)
    assert pool.kept_nbytes == 4096
    with pool.lease(4096, 1) as lease:
        assert lease.take() is block
        lease.give_back(block)
    with pool.lease(8192, 1) as lease:
        lease.give_back(lease.take())
    assert pool.kept_nbytes == 8192
    pool.release()
    assert pool.kept_nbytes == 0
