"""Which items are read together: each once, next to each other, and never more than a block."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from robust_dcp.storage.reading.placed_reads import SMALL_NBYTES, PlacedReads, Read, ReadGroup, in_groups
from robust_dcp.storage.reading.planned_items import WholeTensors

BLOCK_NBYTES = 1 << 20


def read_of(path: str, offset: int, nbytes: int, is_whole: bool = True, transforms: tuple[str, ...] = ()) -> Read:
    index = MetadataIndex("w", [0])
    shape = torch.Size([8])
    lengths = shape if is_whole else torch.Size([3])
    zero = torch.Size([0])
    item = ReadItem(LoadItemType.TENSOR, index, zero, index, zero, lengths)
    return Read(item, path, offset, nbytes, transforms, torch.float32, shape)


lengths = st.one_of(st.integers(0, 1000), st.integers(0, 2 * SMALL_NBYTES), st.integers(0, 2 * BLOCK_NBYTES))
many_reads = st.lists(
    st.builds(
        read_of,
        st.sampled_from(["a", "b"]),
        st.one_of(st.integers(0, 5000), st.integers(0, 4 * BLOCK_NBYTES)),
        lengths,
        st.booleans(),
        st.sampled_from([(), (), ("zstd",)]),
    )
)


@given(many_reads)
def test_every_item_is_read_once_and_in_blocks(reads: list[Read]) -> None:
    found = []
    for group in in_groups(PlacedReads(WholeTensors.none(), reads), BLOCK_NBYTES):
        if isinstance(group, Read):
            found.append(group)
            continue
        assert isinstance(group, ReadGroup)
        assert group.end - group.start <= BLOCK_NBYTES
        gaps = 0
        end = group.start
        for read in group.reads:
            assert read.relative_path == group.relative_path
            assert group.start <= read.offset
            assert read.offset + read.nbytes <= group.end
            assert not read.transforms
            assert read.is_whole or read.nbytes <= SMALL_NBYTES
            gaps = max(gaps, read.offset - end)
            end = max(end, read.offset + read.nbytes)
        assert gaps <= SMALL_NBYTES
        found += group.reads
    assert sorted(map(id, found)) == sorted(map(id, reads))


def test_small_neighbours_share_a_read() -> None:
    reads = [read_of("a", 1000 * number, 1000) for number in range(100)]
    groups = in_groups(PlacedReads(WholeTensors.none(), reads), BLOCK_NBYTES)
    assert [len(group.reads) for group in groups if isinstance(group, ReadGroup)] == [100]
