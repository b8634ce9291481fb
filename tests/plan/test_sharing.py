"""Whether ranks of a load read for each other follows from what all of them say, and is the same on all."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from robust_dcp.comm import Offer
from robust_dcp.comm.nodes import RANKS_PER_NODE
from robust_dcp.errors import PlanConflict
from robust_dcp.plan.loading.sharing import node_reads_the_same, ranks_share, sharing_offer
from tests.plan.structures import agreement_of


@pytest.fixture(autouse=True, scope="module")
def _two_ranks_on_a_node() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(RANKS_PER_NODE, "2")
        yield


def share(wishes: list[bool | None], can_share: list[bool] | None = None) -> bool:
    can = can_share or [True] * len(wishes)
    return ranks_share(
        agreement_of(
            [
                sharing_offer(wish, rank, [], can_share=each)
                for rank, (wish, each) in enumerate(zip(wishes, can, strict=True))
            ]
        )
    )


WISHES = st.sampled_from([True, False, None])


@given(WISHES, st.lists(st.sampled_from([True, True, True, False]), min_size=1, max_size=9))
def test_ranks_with_one_wish_share_if_they_are_told_to_or_are_on_several_nodes(
    wish: bool | None, can_share: list[bool]
) -> None:
    n_ranks = len(can_share)
    expected = n_ranks > 1 and all(can_share) and (wish is True or (wish is None and n_ranks > 2))
    assert share([wish] * n_ranks, can_share) == expected


@given(st.lists(WISHES, min_size=2, max_size=9))
def test_ranks_that_want_different_things_are_told_who_wants_what(wishes: list[bool | None]) -> None:
    first = {wish: wishes.index(wish) for wish in set(wishes)}
    if len(first) == 1:
        share(wishes)
        return
    with pytest.raises(PlanConflict, match="share_reads is") as caught:
        share(wishes)
    assert caught.value.ranks == sorted(first.values())
    for wish, rank in first.items():
        assert re.search(rf"\b{wish} on rank {rank}\b", caught.value.message)


def test_a_rank_that_reads_by_itself_keeps_all_from_sharing() -> None:
    offers = [sharing_offer(True, rank, [], can_share=True) for rank in range(3)]
    assert ranks_share(agreement_of(offers))
    assert not ranks_share(agreement_of([*offers, Offer()]))


def items_of(*columns: int) -> list[ReadItem]:
    """What a rank reads that needs these columns of ``w``."""
    return [
        ReadItem(
            LoadItemType.TENSOR,
            dest_index=MetadataIndex("w"),
            dest_offsets=torch.Size([0]),
            storage_index=MetadataIndex("w", torch.Size([column])),
            storage_offsets=torch.Size([0]),
            lengths=torch.Size([1]),
        )
        for column in columns
    ]


@given(
    st.lists(st.sampled_from([(), (1,), (1,), (1,), (1, 2), (2, 1)]), min_size=1, max_size=6),
    st.sampled_from([None, "", "1", "2"]),
)
def test_ranks_of_a_node_read_the_same_if_all_ranks_do_and_several_are_there(
    needs: list[tuple[int, ...]], local_world_size: str | None
) -> None:
    offers = [sharing_offer(None, rank, items_of(*need), can_share=True) for rank, need in enumerate(needs)]
    several = len(needs) == 2 or local_world_size == "2"  # two ranks are one node here
    expected = len(needs) > 1 and set(needs) == {needs[0]} != {()} and several
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if local_world_size is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
        assert node_reads_the_same(agreement_of(offers)) == expected


@pytest.mark.parametrize("text", ["0", "-1", "two", "1_0", " 2", "²"])
def test_a_number_of_ranks_without_meaning_is_refused_where_it_is_set(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RANKS_PER_NODE, text)
    with pytest.raises(ValueError, match=re.escape(f"{RANKS_PER_NODE}={text!r}")):
        sharing_offer(None, 0, [], can_share=True)
