"""The footer of a file says what its items sum to, in whatever order they were brought, and nothing that cannot be."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.layouts.footer import TAIL_NBYTES, BlockSums, Footer, SumColumns, footer_in, footer_of
from robust_dcp.storage.records.checksum import SUM_NBYTES

MARK = "0123456789abcdef"

items = st.lists(st.tuples(st.integers(0, 3 * SUM_NBYTES), st.integers(0, 100)), max_size=8)
"""Lengths of data, and of the gaps before them."""


def columns_of(lengths_and_gaps: list[tuple[int, int]], *, seed: int = 1) -> SumColumns:
    at, offsets = 0, []
    for nbytes, gap in lengths_and_gaps:
        offsets.append(at + gap)
        at += gap + nbytes
    nbytes = np.array([nbytes for nbytes, _ in lengths_and_gaps], dtype=np.int64)
    generator = np.random.default_rng(seed)
    crcs = generator.integers(0, 1 << 32, size=int((-(-nbytes // SUM_NBYTES)).sum()), dtype=np.uint32)
    return SumColumns(np.array(offsets, dtype=np.int64), nbytes, crcs)


def parsed(content: bytes) -> Footer | None:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        with Disk().reading(file.name) as opened:
            return footer_in(Disk(), opened)


def file_of(columns: SumColumns) -> bytes:
    end = int((columns.offset + columns.nbytes).max(initial=0))
    return bytes(end) + footer_of(MARK, end, columns, range(len(columns.offset)))


@given(items)
def test_what_is_written_is_found_again_for_every_slice(described: list[tuple[int, int]]) -> None:
    columns = columns_of(described)
    footer = parsed(file_of(columns))
    assert footer is not None and footer.mark == MARK
    first = 0
    for offset, nbytes in zip(columns.offset.tolist(), columns.nbytes.tolist(), strict=True):
        n_blocks = -(-nbytes // SUM_NBYTES)
        if nbytes:
            expected = BlockSums(0, nbytes, SUM_NBYTES, columns.crcs[first : first + n_blocks].tolist())
            assert footer.find(offset, offset + nbytes, offset) == expected
            assert footer.find(offset + nbytes // 2, offset + nbytes, offset) == expected
            assert footer.find(offset, offset + nbytes + 1, offset) is None
            assert footer.find(offset, offset + nbytes, offset + 1) is None  # another item's
        first += n_blocks


@given(items.filter(bool), st.data())
def test_every_flipped_bit_of_a_footer_is_found(described: list[tuple[int, int]], draw: st.DataObject) -> None:
    columns = columns_of(described)
    content = bytearray(file_of(columns))
    footer_nbytes = TAIL_NBYTES + 16 * len(columns.offset) + 4 * len(columns.crcs)
    bit = draw.draw(st.integers(8 * (len(content) - footer_nbytes), 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    footer = parsed(bytes(content))
    if footer is not None:
        with pytest.raises(ValueError, match="do not have their CRC-32"):
            _ = footer.columns


@pytest.mark.parametrize(
    ("offset", "nbytes", "n_blocks", "told"),
    [
        ([10, 5], [5, 5], 2, "cannot lie there"),
        ([0, 3], [5, 5], 2, "cannot lie there"),
        ([-1, 6], [5, 5], 2, "cannot lie there"),
        ([0, 9], [-5, 5], 2, "cannot lie there"),
        ([99], [5], 1, "cannot lie there"),
        ([0, 5], [5, 5], 1, "fewer or more"),
        ([0, 5], [5, 5], 3, "fewer or more"),
    ],
)
def test_checksums_for_data_that_cannot_lie_there_are_refused(
    offset: list[int], nbytes: list[int], n_blocks: int, told: str
) -> None:
    crcs = np.full(n_blocks, 7, dtype=np.uint32)
    columns = SumColumns(np.array(offset, dtype=np.int64), np.array(nbytes, dtype=np.int64), crcs)
    footer = parsed(bytes(100) + footer_of(MARK, 100, columns, range(len(offset))))
    assert footer is not None
    with pytest.raises(ValueError, match=told):
        _ = footer.columns
