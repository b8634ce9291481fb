"""Readers are chosen so that each byte is read once, and reaches every rank that needs it, in bounded rounds."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_dcp.errors import ExchangeError
from robust_dcp.plan.loading.readers import (
    BUCKET_NBYTES,
    ROUND_NBYTES,
    ReadColumns,
    ReadShare,
    assign_readers,
    pieces_of,
)
from robust_dcp.storage.reading.sharable_reads import ON_DEVICE

TWO = np.arange(2)

Need = tuple[int, int]
"""(stored item, box)."""


def columns_of(needs: dict[Need, int], node: int = 0) -> ReadColumns | None:
    if not needs:
        return None
    rows = sorted((item, box, nbytes) for (item, box), nbytes in needs.items())
    items, boxes, nbytes = (np.array(column, dtype=np.uint64) for column in zip(*rows, strict=True))
    return ReadColumns(
        node,
        items.astype("<i4").tobytes(),
        boxes.astype("<u8").tobytes() if boxes.any() else b"",
        nbytes.astype("<i8").tobytes(),
    )


def readers_of(rank: int, needs: dict[Need, int], share: ReadShare | None) -> dict[Need, tuple[int, tuple[int, ...]]]:
    """For each need of a rank who reads it, and for whom."""
    if share is None:
        return dict.fromkeys(needs, (rank, (rank,)))
    found = {}
    for need, transfer in zip(sorted(needs), np.frombuffer(share.transfer_of, "<i4").tolist(), strict=True):
        group, reader, _ = share.transfers[transfer] if transfer >= 0 else (0, rank, False)
        found[need] = reader, share.groups[group] if transfer >= 0 else (rank,)
    return found


sizes = st.sampled_from([1, 7, 1000, 1 << 16, 1 << 20, BUCKET_NBYTES, BUCKET_NBYTES + 1, 3 * BUCKET_NBYTES + 5])


@st.composite
def needs_of_ranks(draw: st.DrawFn) -> list[dict[Need, int]]:
    n_ranks = draw(st.integers(1, 5))
    ranks: list[dict[Need, int]] = [{} for _ in range(n_ranks)]
    for item in range(draw(st.integers(0, 12))):
        for box in draw(st.sets(st.sampled_from([0, 5, 1 << 63, (1 << 63) + 5]), max_size=3)):
            nbytes = draw(sizes)
            for rank in draw(st.sets(st.integers(0, n_ranks - 1))):
                ranks[rank][item, box] = nbytes
    return ranks


@settings(max_examples=150, deadline=None)
@given(needs_of_ranks())
def test_each_need_has_one_reader_and_all_who_need_it_agree(ranks: list[dict[Need, int]]) -> None:
    places = np.random.default_rng(len(ranks)).permutation(12)
    shares = assign_readers([columns_of(needs) for needs in ranks], places)
    found = [readers_of(rank, needs, share) for rank, (needs, share) in enumerate(zip(ranks, shares, strict=True))]
    for need in {need for needs in ranks for need in needs}:
        holders = tuple(rank for rank, needs in enumerate(ranks) if need in needs)
        (reader, for_whom), *others = [found[rank][need] for rank in holders]
        assert for_whom == holders and reader in holders
        assert all(other == (reader, for_whom) for other in others)


@settings(max_examples=150, deadline=None)
@given(needs_of_ranks())
def test_buckets_hold_all_bytes_and_no_round_more_than_its_limit(ranks: list[dict[Need, int]]) -> None:
    shares = assign_readers([columns_of(needs) for needs in ranks], np.arange(12))
    seen: dict[tuple[int, int, tuple[int, ...], bool], list[tuple[int, int, int]]] = {}
    for needs, share in zip(ranks, shares, strict=True):
        if share is None:
            continue
        nbytes = np.array([needs[need] for need in sorted(needs)])
        transfer_of = np.frombuffer(share.transfer_of, "<i4")
        pieces = [pieces_of(nbytes[transfer_of == number]) for number in range(len(share.transfers))]
        buckets: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        in_round: Counter[int] = Counter()
        rows = np.frombuffer(share.buckets, "<i4").reshape(-1, 3).tolist()
        assert [row[0] for row in rows] == sorted(row[0] for row in rows)
        for number_of_round, transfer, number in rows:
            piece = pieces[transfer][number]
            buckets[transfer].append((number_of_round, number, piece.end - piece.begin))
            in_round[number_of_round] += piece.end - piece.begin
        assert max(in_round.values(), default=0) <= ROUND_NBYTES
        for transfer, (group, reader, on_device) in enumerate(share.transfers):
            # All ranks of a transfer pass on the same buckets in the same rounds and order.
            key = (transfer_key := share.groups[group])[0], reader, transfer_key, on_device
            assert seen.setdefault(key, buckets[transfer]) == buckets[transfer]
            assert sum(size for _, _, size in buckets[transfer]) == nbytes[transfer_of == transfer].sum()


@given(st.lists(sizes, max_size=30))
def test_pieces_follow_each_other_without_gaps(nbytes: list[int]) -> None:
    at = (0, 0)
    for piece in pieces_of(np.array(nbytes, dtype=np.int64)):
        assert 0 < piece.end - piece.begin <= BUCKET_NBYTES
        assert (piece.first, piece.begin) == at
        if piece.last - piece.first > 1:
            assert piece.end == sum(nbytes[piece.first : piece.last])
        at = (piece.first, piece.end)
        if piece.end == sum(nbytes[piece.first : piece.last]):
            at = (piece.last, 0)
    assert at == (len(nbytes), 0)


def test_what_one_rank_reads_of_small_items_lies_together() -> None:
    needs = {(item, 0): 1000 for item in range(4000)}
    places = np.random.default_rng(1).permutation(4000)
    shares = assign_readers([columns_of(needs)] * 4, places)
    readers = readers_of(0, needs, shares[0])
    in_order = [readers[item, 0][0] for item in np.argsort(places).tolist()]
    assert sum(before != after for before, after in pairwise(in_order)) == 3
    assert set(Counter(in_order).values()) == {1000}


def test_bytes_are_balanced_also_against_what_a_rank_reads_alone() -> None:
    shared = {(item, 0): 2 << 20 for item in range(30)}
    alone = {(100, 0): 30 << 20}
    ranks = [{**shared, **alone}, shared, shared]
    shares = assign_readers([columns_of(needs) for needs in ranks], np.arange(101))
    counts = Counter(reader for reader, _ in readers_of(1, shared, shares[1]).values())
    assert counts == {1: 15, 2: 15}


def test_ranks_on_one_node_share_nothing_if_nodes_count() -> None:
    needs = {(0, 0): 1000}

    def share(nodes: list[int], *, across_nodes: bool) -> list[bool]:
        each = [needs, needs, {(1, 0): 7}, {(1, 0): 7}]
        columns = [columns_of(needs, node) for needs, node in zip(each, nodes, strict=True)]
        return [share is not None for share in assign_readers(columns, np.arange(2), across_nodes=across_nodes)]

    assert share([5, 5, 1, 1], across_nodes=True) == [False] * 4
    assert share([5, 5, 1, 2], across_nodes=True) == [False, False, True, True]
    assert share([5, 5, 1, 1], across_nodes=False) == [True] * 4


@pytest.mark.parametrize("on_device", [False, True])
def test_all_ranks_hear_whether_any_passes_on_what_is_on_its_device(on_device: bool) -> None:
    box = ON_DEVICE if on_device else 0
    shares = assign_readers([columns_of({(0, box): 9}), columns_of({(0, box): 9}), columns_of({(1, 0): 9}), None], TWO)
    assert [share is not None and share.any_on_device for share in shares] == [on_device] * 4


def test_a_rank_that_asks_for_one_thing_twice_reads_it_itself() -> None:
    twice = ReadColumns(0, np.zeros(2, "<i4").tobytes(), b"", np.full(2, 9, "<i8").tobytes())
    assert assign_readers([twice, columns_of({(0, 0): 9})], np.arange(1)) == [None, None]


@pytest.mark.parametrize(("items", "nbytes"), [([3], [1]), ([-1], [1]), ([0], [0]), ([0, 1], [1])])
def test_columns_that_cannot_be_are_refused_with_their_rank(items: list[int], nbytes: list[int]) -> None:
    wrong = ReadColumns(0, np.array(items, "<i4").tobytes(), b"", np.array(nbytes, "<i8").tobytes())
    with pytest.raises(ExchangeError, match="rank 1") as caught:
        assign_readers([columns_of({(0, 0): 5}), wrong], np.arange(3))
    assert caught.value.ranks == [1]
