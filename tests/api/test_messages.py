"""A repeated save sends a few headers, whatever the number of items; measured by the benchmark's own code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.messages import PhaseCost, measure_saves
from robust_dcp.comm.tree import Tree
from tests.harness.ranks import in_ranks, values

PHASES = ("plan", "write", "commit")


def measure_10_and_1000_items(directory: str, n_objects: int) -> tuple[list[PhaseCost], list[PhaseCost]]:
    return measure_saves(directory, 10, n_objects), measure_saves(directory, 1000, n_objects)


@pytest.mark.parametrize("n_objects", [0, 10])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_repeated_save_sends_the_same_few_bytes_for_10_and_1000_items(
    world_size: int, n_objects: int, tmp_path: Path
) -> None:
    outcomes = in_ranks(world_size, measure_10_and_1000_items, str(tmp_path), n_objects)
    for outcome, (few, many) in zip(outcomes, values(outcomes), strict=True):
        assert outcome.output == ""
        repeated = [cost for cost in few if cost.save != "first"]
        of_many = [cost for cost in many if cost.save != "first"]
        assert [replace(cost, payload_nbytes=0) for cost in repeated] == [
            replace(cost, payload_nbytes=0) for cost in of_many
        ]
        for one, other in zip(repeated, of_many, strict=True):  # a larger number of bytes has more digits
            assert abs(one.payload_nbytes - other.payload_nbytes) <= 24 * world_size
        assert [cost.phase for cost in repeated] == [*PHASES] * (2 if n_objects else 1)
        for cost in repeated:
            assert cost.exchanges == 1
            # One frame to each neighbour in the tree. Behind its frame in `write`, a rank sends a payload for it and
            # for the ranks below it: what the report of the save says of them.
            tree = Tree(cost.rank, world_size)
            neighbours = len(tree.neighbours)
            tells = cost.phase == "write" and cost.rank != 0
            assert (cost.messages, cost.header_nbytes) == (neighbours + tells, 160 * neighbours)
            below = sum(len(tree.places_below(child)) for child in tree.children)
            assert cost.payload_nbytes <= (550 + 128 * below if tells else 0)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_first_save_sends_structures_once_to_the_coordinator(world_size: int, tmp_path: Path) -> None:
    for few, many in values(in_ranks(world_size, measure_10_and_1000_items, str(tmp_path), 0)):
        for costs, n_items in ((few, 10), (many, 1000)):
            plan = costs[0]
            assert (plan.save, plan.phase, plan.exchanges) == ("first", "plan", 3)
            if plan.rank != 0:
                assert 0 < plan.payload_nbytes < 1000 + 20 * n_items  # a pickled plan has 217 bytes an item
            assert [cost.exchanges for cost in costs[1:3]] == [2, 1]
