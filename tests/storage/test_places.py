"""Places in files: no two records overlap, large ones are aligned for direct I/O, and files are of about one size.

In safetensors files there are no holes, no name is twice in a file, and heads are as long as was planned.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_dcp.errors import PlanConflict
from robust_dcp.storage.layouts.footer import SumColumns
from robust_dcp.storage.layouts.places import LARGE_NBYTES, PAGE_NBYTES, RECORD_ALIGNMENT, Placements, place_records
from robust_dcp.storage.layouts.safetensors import (
    DTYPES,
    LENGTH_NBYTES,
    MAX_BLOCKS,
    MAX_HEADER_NBYTES,
    SAFETENSORS,
    ShardHead,
    StoredTensor,
    _spread,
    parse_head,
)
from robust_dcp.storage.records.checksum import SUM_NBYTES, joined
from tests.plan.structures import Item, chunk, chunk_of, obj, table, tensor

_SMALL = st.integers(0, 10_000)
_AROUND_LARGE = st.integers(LARGE_NBYTES - 200, LARGE_NBYTES + 200)
_LARGE = st.integers(LARGE_NBYTES, 1 << 34)
_RECORDS = st.lists(
    st.one_of(
        st.none(),
        st.tuples(
            st.integers(1, 40).map(lambda n: 64 * n), st.one_of(_SMALL, _AROUND_LARGE, _LARGE), st.integers(0, 900)
        ),
    ),
    max_size=40,
)
"""(header, payload, trailer) in bytes; ``None`` for an item of variable size."""


def _columns(records: list[Any]) -> tuple[Any, Any, Any]:
    header = np.array([r[0] if r else 0 for r in records], dtype=np.int64)
    payload = np.array([r[1] if r else 0 for r in records], dtype=np.int64)
    record = np.array([sum(r) if r else -1 for r in records], dtype=np.int64)
    return record, header, payload


def _place(records: list[Any], files: int) -> Placements:
    return place_records(np.column_stack(_columns(records)), files)


@given(_RECORDS, st.integers(1, 5))
def test_records_lie_apart_within_their_files_and_large_payloads_as_tensors_lie_within_a_page(
    records: list[Any], files: int
) -> None:
    placements = _place(records, files)
    assert len(placements.file) == len(placements.offset) == len(placements.nbytes) == len(records)
    assert placements.n_files <= files + 1
    for number in range(placements.n_files):
        members = [n for n, r in enumerate(records) if r and placements.file[n] == number]
        spans = sorted((int(placements.offset[n]), int(placements.offset[n]) + sum(records[n])) for n in members)
        assert all(start >= 0 and start % RECORD_ALIGNMENT == 0 for start, _ in spans)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert placements.file_nbytes[number] == max((end for _, end in spans), default=0)
        large = [n for n in members if records[n][1] >= LARGE_NBYTES]
        assert all((placements.offset[n] + records[n][0]) % PAGE_NBYTES == RECORD_ALIGNMENT for n in large)


@given(_RECORDS, st.integers(1, 5))
def test_items_of_variable_size_have_a_file_of_their_own(records: list[Any], files: int) -> None:
    placements = _place(records, files)
    variable = [n for n, r in enumerate(records) if r is None]
    assert placements.variable.tolist() == variable
    assert (placements.nbytes[variable] == -1).all()
    if not variable:
        return
    assert placements.file_nbytes[-1] == 0
    fixed = [n for n, r in enumerate(records) if r]
    assert set(placements.file[variable].tolist()) == {placements.n_files - 1}
    assert placements.n_files - 1 not in placements.file[fixed].tolist()


@settings(max_examples=50)
@given(st.lists(st.one_of(_SMALL, _AROUND_LARGE, _LARGE), min_size=1, max_size=60), st.integers(1, 5))
def test_no_file_exceeds_the_mean_by_more_than_one_record(payloads: list[int], files: int) -> None:
    placements = _place([(512, payload, 700) for payload in payloads], files)
    n_files = min(files, len(payloads))
    assert placements.n_files == n_files
    loads = np.bincount(placements.file, weights=placements.nbytes, minlength=n_files)
    # The slack of LARGE_NBYTES: small records are dealt out by running totals, not one by one.
    assert loads.max() <= sum(p + 1212 for p in payloads) / n_files + max(max(payloads) + 1212, LARGE_NBYTES)


_DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.complex128, torch.int64, torch.bool]
_NAMES = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.sampled_from(["__metadata__", 'a"b', "\\", "\0", "layers.0.weight", "é", "🙂", "\x7f"]),
)
_SHAPES = st.one_of(
    st.lists(st.integers(0, 40), max_size=4).map(tuple),
    st.sampled_from([(1024,), (1 << 20,), (3 << 18, 3), (4096, 9), (1 << 40,)]),
)


@st.composite
def rank_items(draw: st.DrawFn) -> list[Item]:
    items = []
    for name in draw(st.lists(_NAMES, unique=True, max_size=15)):
        dtype = draw(st.sampled_from(_DTYPES))
        kind = draw(st.integers(0, 5))
        if kind == 0:
            items.append(obj(name))
        elif kind == 1:  # a tensor in chunks
            rows = draw(st.integers(1, 4))
            items += [chunk(name, (9 * rows, 5), (9 * n, 0), (9, 5), dtype) for n in range(rows)]
        else:
            items.append(tensor(name, draw(_SHAPES), dtype))
    return items


MARK = "0123456789abcdef"


class Described:
    """The kept items of one rank's table, as plain values."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.table = table(*items)
        rows = range(len(self.table))
        self.names = [self.table.names[self.table.name[n]] for n in rows]
        self.dtypes = [self.table.properties[self.table.properties_of[n]][0] for n in rows]
        self.dims = [chunk_of(self.table, n) for n in rows]

    def placed(self, files: int, layout: Any = SAFETENSORS) -> Placements:
        return layout.place(layout.measure(self.table, np.arange(len(self.table))), files)

    def is_raw(self, place: int) -> bool:
        return self.dtypes[place] in DTYPES and self.names[place] != "__metadata__"

    def nbytes(self, place: int) -> int:
        return prod(self.dims[place][2]) * int(getattr(torch, self.dtypes[place]).itemsize)

    def heads(self, placements: Placements) -> list[ShardHead]:
        return [
            ShardHead({self.names[n]: self.in_head(n, placements) for n in members(placements, number)}, nbytes)
            for number, nbytes in enumerate(placements.head_nbytes)
            if nbytes
        ]

    def in_head(self, place: int, placements: Placements) -> StoredTensor:
        _, offset, size = self.dims[place]
        dtype = getattr(torch, self.dtypes[place])
        return StoredTensor(dtype, size, int(placements.offset[place]), self.nbytes(place), offset)


def members(placements: Placements, number: int) -> list[int]:
    return np.flatnonzero(placements.file == number).tolist()


@given(rank_items(), st.integers(1, 4))
def test_data_lies_where_its_elements_may_begin_and_whole_pages_where_direct_io_takes_them(
    items: list[Item], files: int
) -> None:
    described = Described(items)
    placements = described.placed(files)
    for n in range(len(described.names)):
        if not described.is_raw(n):
            continue
        itemsize = getattr(torch, described.dtypes[n]).itemsize
        assert placements.offset[n] % itemsize == 0
        if described.nbytes(n) % PAGE_NBYTES == 0:
            assert placements.offset[n] % PAGE_NBYTES == RECORD_ALIGNMENT


@given(rank_items(), st.integers(1, 4), st.randoms())
def test_a_head_is_as_long_as_was_planned_and_says_what_was_placed(items: list[Item], files: int, random: Any) -> None:
    described = Described(items)
    placements = described.placed(files)
    file_nbytes = [nbytes for nbytes, head in zip(placements.file_nbytes, placements.head_nbytes, strict=True) if head]
    nbytes = [nbytes for nbytes in placements.head_nbytes if nbytes]
    files_with_heads = [number for number, head in enumerate(placements.head_nbytes) if head]
    for head, whole, planned, file in zip(
        described.heads(placements), file_nbytes, nbytes, files_with_heads, strict=True
    ):
        places = sorted(members(placements, file), key=lambda n: (int(placements.offset[n]), int(placements.nbytes[n])))
        data_nbytes = placements.nbytes[places]
        counts = np.minimum(-(-data_nbytes // SUM_NBYTES), MAX_BLOCKS + 1)
        if (counts > MAX_BLOCKS).any():  # too many blocks for a test
            continue
        blocks = np.array([random.getrandbits(32) for _ in range(counts.sum())], dtype=np.uint32)
        sums = SumColumns(placements.offset[places], data_nbytes, blocks)
        of_place = dict(zip(places, np.split(blocks, np.cumsum(counts)[:-1]), strict=True))
        for given_checksums in (sums, None):
            encoded = head.encode(MARK, given_checksums)
            assert len(encoded) == planned
            # The bound is close: what is left is less than two pages, and two numbers for each tensor.
            assert len(encoded.rstrip(b" ")) > planned - 2 * PAGE_NBYTES - 40 * len(places) - 20
            assert int.from_bytes(encoded[:LENGTH_NBYTES], "little") == planned - LENGTH_NBYTES
            found = parse_head(encoded[LENGTH_NBYTES:], whole, "file")
            assert found.is_of_checkpoint and found.mark == MARK
            assert len(found.tensors) == len(places)
            for place in places:
                stored = found.tensors[described.names[place]]
                _, offset, size = described.dims[place]
                assert (stored.shape, stored.chunk_offset) == (size, offset)
                assert (stored.offset, stored.nbytes) == (placements.offset[place], placements.nbytes[place])
                expected = of_place[place].tolist()
                if given_checksums is None:
                    assert (stored.crc32, stored.block_crc32s) == (None, ())
                else:
                    assert stored.crc32 == joined(expected, stored.nbytes)
                    assert stored.block_crc32s == (tuple(expected) if len(expected) > 1 else ())


def test_chunks_of_one_name_get_files_of_their_own_beyond_what_was_asked_for() -> None:
    items = [chunk("w", (50, 4), (10 * n, 0), (10, 4)) for n in range(5)] + [tensor(f"v{n}") for n in range(9)]
    placements = Described(items).placed(2)
    assert placements.n_files == 5


def test_more_files_are_made_where_readers_would_refuse_a_head() -> None:
    n_items, name_nbytes = 100, 4_000_000
    measures = np.zeros((n_items, 7), dtype=np.int64)
    measures[:, 2] = 8  # payload
    measures[:, 3] = 1
    measures[:, 4] = np.arange(n_items)
    measures[:, 6] = 3 * name_nbytes
    file, heads = _spread(measures, 2)
    assert len(heads) == file.max() + 1 > 10
    assert max(heads) <= MAX_HEADER_NBYTES
    measures[:, 6] = MAX_HEADER_NBYTES
    with pytest.raises(PlanConflict, match="does not fit into a safetensors file"):
        _spread(measures, 2)
