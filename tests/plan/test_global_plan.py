"""Every element of every tensor is written exactly once, by a rank that holds it; checked by counting elements.

Replicas are spread over the ranks that hold them, by the bytes of their chunks.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from robust_dcp.errors import ExchangeError, PlanConflict
from robust_dcp.plan.conflicts import SMALL_NBYTES, find_differing
from robust_dcp.plan.global_plan import GlobalPlan, make_global_plan
from tests.plan.structures import Box, Item, World, chunk, obj, partitions, table, tensor, worlds, written_items


def _plan(*ranks: list[Item], lowest_rank: bool = False) -> GlobalPlan:
    return make_global_plan([table(*items) for items in ranks], lowest_rank=lowest_rank)


def _times_written(world: World, plan: GlobalPlan) -> dict[str, np.ndarray]:
    """For each tensor how often each of its elements is written."""
    counts = {name: np.zeros(shape, dtype=np.int64) for name, shape in world.tensors.items()}
    for name, offset, size in itertools.chain.from_iterable(written_items(plan)):
        if name in counts:
            counts[name][tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] += 1
    return counts


@settings(max_examples=60)
@given(worlds(), st.booleans())
def test_every_element_is_written_exactly_once_by_a_rank_that_holds_it(world: World, lowest_rank: bool) -> None:
    plan = make_global_plan(world.tables, lowest_rank=lowest_rank)
    for name, count in _times_written(world, plan).items():
        assert (count == 1).all(), name
    for rank, written in enumerate(written_items(plan)):
        held = Counter((item.name, item.offset, item.size) for item in world.ranks[rank])
        assert not Counter(written) - held
    writers_of_objects = Counter(name for written in written_items(plan) for name, _, _ in written if name[0] == "o")
    assert writers_of_objects == Counter(world.objects.keys())


@settings(max_examples=25)
@given(worlds())
def test_the_same_structures_always_give_the_same_plan(world: World) -> None:
    shuffled = World(tuple(tuple(reversed(items)) for items in world.ranks))
    first, second = make_global_plan(world.tables), make_global_plan(shuffled.tables)
    assert written_items(first) == written_items(second)
    assert first.written.tolist() == second.written.tolist()


@settings(max_examples=25)
@given(worlds())
def test_the_lowest_rank_writes_if_asked(world: World) -> None:
    written = written_items(make_global_plan(world.tables, lowest_rank=True))
    for rank, items in enumerate(written):
        for name, offset, size in items:
            holders = [
                other
                for other, held in enumerate(world.ranks)
                if any((i.name, i.offset, i.size) == (name, offset, size) for i in held)
            ]
            # An empty chunk may be taken from any holder of the offsets: it has nothing to write.
            assert rank == min(holders) or 0 in size


@st.composite
def _haphazard_chunks(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A partition with chunks dropped, moved or added: valid only by chance."""
    shape, boxes = draw(partitions(max_dims=2))
    boxes = draw(st.lists(st.sampled_from(boxes), min_size=1, unique=True)) if draw(st.booleans()) else boxes
    for _ in range(draw(st.integers(0, 2))):
        offset = tuple(draw(st.integers(-1, extent)) for extent in shape)
        boxes = [*boxes, (offset, tuple(draw(st.integers(0, extent + 1)) for extent in shape))]
    return shape, boxes


def _lies_inside(shape: tuple[int, ...], box: Box) -> bool:
    return all(o >= 0 and o + s <= extent for o, s, extent in zip(*box, shape, strict=True))


def _counted(shape: tuple[int, ...], boxes: set[Box]) -> bool:
    """Whether the chunks, all inside, cover each element once: the definition, by counting."""
    count = np.zeros(shape, dtype=np.int64)
    for offset, size in boxes:
        count[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] += 1
    return bool((count == 1).all())


@settings(max_examples=150)
@given(_haphazard_chunks(), st.data())
def test_a_plan_is_made_exactly_if_the_chunks_cover_the_tensor_once(
    drawn: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = drawn
    ranks: list[dict[tuple[int, ...], Item]] = [{}, {}, {}, {}]
    held: set[Box] = set()
    for offset, size in boxes:
        for rank in sorted(data.draw(st.sets(st.integers(0, 3), min_size=1, max_size=2))):
            if offset not in ranks[rank]:
                ranks[rank][offset] = chunk("w", shape, offset, size)
                held.add((offset, size))
    tables = [table(*items.values()) for items in ranks]
    # An empty chunk holds nothing: it must lie inside, but gives way to a filled one, or to another, at its offsets.
    filled = {offset for offset, size in held if 0 not in size}
    empty = [(offset, size) for offset, size in held if 0 in size and offset not in filled]
    assume(len(empty) == len({offset for offset, _ in empty}))
    relevant = {(offset, size) for offset, size in held if 0 not in size} | set(empty)
    if all(_lies_inside(shape, box) for box in held) and _counted(shape, relevant):
        make_global_plan(tables)
        return
    with pytest.raises(PlanConflict) as caught:
        make_global_plan(tables)
    assert caught.value.key == "w"
    assert caught.value.ranks == sorted(set(caught.value.ranks or ()))
    assert set(caught.value.ranks) <= {rank for rank, items in enumerate(ranks) if items}
    assert "'w'" in str(caught.value)
    assert "rank" in str(caught.value)


def test_what_differs_between_ranks_is_found_by_its_digests() -> None:
    large = tensor("large", [SMALL_NBYTES + 1], torch.uint8)
    both = [obj("rng"), obj("same"), tensor("seed"), tensor("unknown"), large]
    plan = _plan([obj("own"), *both], both, [obj("rng")])
    digests = [np.array(each, dtype="<u8").tobytes() for each in ([9, 1, 5, 7, 0], [2, 5, 8, 3], [1])]
    found = find_differing(plan.items, plan.contested, digests)
    assert [(each.key, each.ranks) for each in found] == [("rng", ((0, 2), (1,))), ("seed", ((0,), (1,)))]
    only_rank_1 = find_differing(plan.items, plan.contested, [b"", digests[1], b""])
    assert only_rank_1 == []  # of the others nothing is known
    with pytest.raises(ExchangeError, match="rank 2 did not send"):
        find_differing(plan.items, plan.contested, [*digests[:2], digests[0]])


def test_one_rank_alone_may_save_its_part_of_a_sharded_tensor() -> None:
    part = chunk("w", [8], [4], [2])
    assert len(_plan([part]).written) == 1
    with pytest.raises(PlanConflict, match="leave gaps"):
        _plan([part], [])
    with pytest.raises(PlanConflict, match="overlap"):
        _plan([part, chunk("w", [8], [5], [2])])


def test_paths_of_all_ranks_are_joined() -> None:
    left = table(tensor("a.b"), paths={"a.b": ("a", "b")})
    right = table(tensor("a.b"), obj("c.0"), paths={"a.b": ("a", "b"), "c.0": ("c", 0)})
    plan = make_global_plan([left, right])
    assert plan.items.paths is not None
    assert dict(zip(plan.items.names, plan.items.paths, strict=True)) == {"a.b": ("a", "b"), "c.0": ("c", 0)}


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
    assert [int(kept.sum()) for kept in make_global_plan(tables).kept] == [0, 9, 0]
