"""Ranks that contradict each other are told which key, which ranks, and what each of them holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from robust_dcp.errors import PlanConflict
from robust_dcp.plan.global_plan import make_global_plan
from tests.plan.structures import Item, chunk, obj, table, tensor

_FILLER = tensor("filler")


def _conflict(*ranks: list[Item]) -> PlanConflict:
    with pytest.raises(PlanConflict) as caught:
        make_global_plan([table(_FILLER, *items) for items in ranks])
    return caught.value


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (replace(tensor("w"), dtype=torch.bfloat16), ["different dtypes", "bfloat16[4] on rank 1"]),
        (tensor("w", [5]), ["different global sizes", "float32[5] on rank 1"]),
        (tensor("w", [4, 1]), ["different global sizes", "float32[4, 1] on rank 1"]),
        (tensor("w", ()), ["different global sizes", "float32[] on rank 1"]),
        (replace(tensor("w"), layout=torch.sparse_coo), ["different layouts", "float32[4] sparse_coo on rank 1"]),
        (obj("w"), ["a tensor on some ranks and an object on others", "object on rank 1"]),
    ],
)
def test_plain_tensors_that_differ_between_ranks_under_one_name_are_refused(odd: Item, words: list[str]) -> None:
    conflict = _conflict([tensor("w")], [odd], [tensor("w")], [])
    assert conflict.key == "w"
    assert conflict.ranks == [0, 1, 2]
    for expected in (*words, "'w'", "float32[4] on ranks 0, 2", "different names"):
        assert expected in str(conflict)


def test_one_odd_rank_among_many_stands_out() -> None:
    shards = [[chunk("w", [1024], [rank], [1])] for rank in range(1024)]
    shards[700] = [replace(shards[700][0], dtype=torch.bfloat16)]
    conflict = _conflict(*shards)
    assert "float32[1024] on ranks 0-699, 701-1023; bfloat16[1024] on rank 700" in str(conflict)
    assert len(str(conflict)) < 1000


def test_a_message_stays_short_if_every_rank_holds_something_else() -> None:
    conflict = _conflict(*([tensor("w", [rank])] for rank in range(500)))
    assert len(str(conflict)) < 1000
    assert "float32[0] on rank 0; float32[1] on rank 1" in str(conflict)
    assert "and 492 more" in str(conflict)


@pytest.mark.parametrize(
    ("shape", "chunks", "ranks"),
    [
        ([8], [([0], [5]), ([4], [3])], [0, 1]),
        ([8], [([0], [4]), ([4], [2]), ([5], [2])], [1, 2]),
        ([8], [([0], [5]), ([0], [3])], [0, 1]),  # they begin alike
        ([4, 4], [([0, 0], [2, 2]), ([0, 2], [2, 2]), ([2, 0], [2, 3]), ([2, 2], [2, 1])], [2, 3]),
        ([4, 4], [([0, 0], [2, 2]), ([0, 2], [3, 2]), ([2, 0], [2, 2]), ([2, 2], [1, 2])], [1, 3]),
        # Each of them ends before the next one begins.
        ([4, 4], [([0, 0], [3, 2]), ([0, 2], [2, 2]), ([2, 0], [2, 2]), ([2, 2], [2, 1])], [0, 2]),
        # They lie on no grid.
        ([4, 6], [([0, 0], [2, 3]), ([0, 3], [1, 3]), ([1, 3], [3, 2]), ([2, 0], [2, 4]), ([3, 5], [1, 1])], [2, 3]),
    ],
    ids=str,
)
def test_chunks_that_overlap_are_named_with_both_ranks(
    shape: list[int], chunks: list[tuple[list[int], list[int]]], ranks: list[int]
) -> None:
    """They have as many elements as the tensor, so that their number does not tell; and another tensor is sound."""
    number = len(chunks)
    conflict = _conflict(*([chunk("a", [number], [n], [1]), chunk("w", shape, *chunks[n])] for n in range(number)))
    assert (conflict.key, conflict.ranks) == ("w", ranks)
    for rank in ranks:
        at, size = chunks[rank]
        assert f"rank {rank} holds" in str(conflict) and f"chunk at {at} of size {size}" in str(conflict)
    assert "overlap" in str(conflict)


def test_gaps_are_named_with_what_is_there_and_with_the_ranks_that_hold_it() -> None:
    conflict = _conflict([chunk("w", [9], [0], [3])], [], [chunk("w", [9], [6], [3])])
    assert (conflict.key, conflict.ranks) == ("w", [0, 2])
    assert "gaps: 6 of 9 elements are there, from ranks 0, 2" in str(conflict)


@pytest.mark.parametrize(
    "outside",
    [
        chunk("w", [8, 2], [4, 0], [5, 2]),
        chunk("w", [8, 2], [-1, 0], [4, 2]),
        chunk("w", [8, 2], [4, 0], [-1, 2]),
        chunk("w", [8, 2], [9, 0], [0, 2]),
        chunk("w", [8, 2], [4, 2**62], [1, 2**62]),
    ],
    ids=lambda item: f"{item.offset} {item.size}",
)
def test_a_chunk_outside_its_tensor_is_refused(outside: Item) -> None:
    conflict = _conflict([chunk("w", [8, 2], [0, 0], [4, 2])], [outside])
    assert (conflict.key, conflict.ranks) == ("w", [1])
    assert "outside" in str(conflict)
    assert f"chunk at {list(outside.offset)}" in str(conflict)


def test_one_name_by_two_paths_is_refused() -> None:
    left = table(tensor("a.b"), paths={"a.b": ("a", "b")})
    right = table(tensor("a.b"), paths={"a.b": ("a.b",)})
    with pytest.raises(PlanConflict) as caught:
        make_global_plan([left, table(), right])
    assert (caught.value.key, caught.value.ranks) == ("a.b", [0, 2])
    assert "('a', 'b')" in str(caught.value)
    assert "('a.b',)" in str(caught.value)


def test_a_planner_that_flattens_on_some_ranks_only_is_refused() -> None:
    with pytest.raises(PlanConflict) as caught:
        make_global_plan([table(tensor("w"), paths={"w": ("w",)}), table(tensor("w"))])
    assert (caught.value.key, caught.value.ranks) == ("w", [0, 1])
