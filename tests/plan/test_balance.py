"""Replicas are spread over the ranks that hold them, by the bytes of their chunks."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_dcp.plan.conflicts import SMALL_NBYTES
from robust_dcp.plan.global_plan import GlobalPlan, make_global_plan
from tests.plan.structures import Item, chunk, obj, table, tensor

_LARGE = SMALL_NBYTES + 1
"""Sizes in these tests are multiples of this, since small chunks are not dealt out."""


def _loads(plan: GlobalPlan) -> list[int]:
    items = plan.items
    nbytes = items.nbytes // _LARGE
    return [int(nbytes[plan.written[items.rank[plan.written] == rank]].sum()) for rank in range(len(plan.kept))]


def _replicated(sizes: list[int], n_ranks: int) -> GlobalPlan:
    items = [tensor(f"t{n:03}", [size * _LARGE], torch.uint8) for n, size in enumerate(sizes)]
    return make_global_plan([table(*items)] * n_ranks)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(2, 3))
def test_the_largest_share_is_within_a_third_of_the_best_possible(sizes: list[int], n_ranks: int) -> None:
    """Largest first to the least loaded: at most 4/3 - 1/(3m) of the optimum (Graham 1969)."""
    best = min(
        max(sum(size for size, rank in zip(sizes, owners, strict=True) if rank == r) for r in range(n_ranks))
        for owners in itertools.product(range(n_ranks), repeat=len(sizes))
    )
    assert max(_loads(_replicated(sizes, n_ranks))) <= best * (4 / 3 - 1 / (3 * n_ranks)) + 1e-9


def test_what_only_one_rank_holds_counts_before_replicas_are_dealt_out() -> None:
    own = tensor("own", [1000 * _LARGE], torch.uint8)
    shared = [tensor(f"s{n}", [100 * _LARGE], torch.uint8) for n in range(10)]
    plan = make_global_plan([table(own, *shared), table(*shared)])
    assert _loads(plan) == [1000, 1000]


def test_each_pair_of_replicas_shares_its_shard_evenly() -> None:
    """HSDP: 4 shards, 2 replicas, 20 layers of 8 units."""

    def items(shard: int) -> list[Item]:
        return [chunk(f"layers.{n:02}.w", [8, _LARGE], [2 * shard, 0], [2, _LARGE], torch.uint8) for n in range(20)]

    loads = _loads(make_global_plan([table(*items(rank % 4)) for rank in range(8)]))
    assert loads == [20] * 8


def test_objects_and_small_tensors_go_to_the_lowest_rank_that_holds_them() -> None:
    small = [tensor(f"t{n}", [SMALL_NBYTES], torch.uint8) for n in range(5)]
    held = table(*(obj(f"o{n}") for n in range(4)), *small)
    tables = [table(), held, held]
    assert [len(kept) for kept in make_global_plan(tables).kept] == [0, 9, 0]
