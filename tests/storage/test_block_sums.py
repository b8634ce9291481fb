"""The checksums of blocks, however their pieces were made, are those of the data."""

from __future__ import annotations

import zlib
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.storage.records.checksum import SUM_NBYTES, BlockSums, block_counts, joined, merged, sums_of

lengths = st.one_of(st.integers(0, 3 * SUM_NBYTES + 7), st.sampled_from([0, 1, SUM_NBYTES, 2 * SUM_NBYTES]))


def data_of(nbytes: int) -> bytes:
    return (np.arange(nbytes, dtype=np.uint32) * 2654435761 >> 7).astype(np.uint8).tobytes()


def blocks_of(data: bytes) -> list[int]:
    return [zlib.crc32(data[at : at + SUM_NBYTES]) for at in range(0, len(data), SUM_NBYTES)]


@given(lengths, st.lists(st.integers(0, 3 * SUM_NBYTES), max_size=6))
def test_pieces_of_any_lengths_merge_into_blocks(nbytes: int, places: list[int]) -> None:
    data = data_of(nbytes)
    ends = sorted({0, nbytes, *(place for place in places if place < nbytes)})
    pieces = [(begin, end, sums_of(memoryview(data)[begin:end], begin)) for begin, end in pairwise(ends)]
    found = merged(pieces)
    assert found == blocks_of(data)
    assert len(found) == block_counts(np.array([nbytes]))[0]
    assert joined(found, nbytes) == zlib.crc32(data)


@given(lengths.filter(bool), st.integers(0, 2**40), st.data())
def test_a_slice_is_verified_by_the_whole_blocks_around_it(nbytes: int, offset: int, draw: st.DataObject) -> None:
    data = data_of(nbytes)
    sums = BlockSums(offset, nbytes, SUM_NBYTES, blocks_of(data))
    begin = draw.draw(st.integers(0, nbytes - 1))
    end = draw.draw(st.integers(begin + 1, nbytes))
    first, last = sums.around(offset + begin, offset + end)
    assert offset <= first <= offset + begin and offset + end <= last <= offset + nbytes
    assert (first - offset) % SUM_NBYTES == 0 and (last - offset) in {nbytes, *range(0, nbytes + 1, SUM_NBYTES)}
    assert last - first < end - begin + 2 * SUM_NBYTES
    assert sums.expected(first, last) == zlib.crc32(data[first - offset : last - offset])
