"""What is kept of equal shards between saves: used again when nothing has changed, and never when anything has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from robust_dcp.errors import PlanConflict
from robust_dcp.megatron.access import described
from robust_dcp.megatron.shards import ShardFacts, saved_shards
from robust_dcp.structure_cache import clear_caches


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    clear_caches()
    yield
    clear_caches()


def _shards() -> list[Any]:
    """As Megatron makes them, anew for every save."""
    return [
        ShardedTensor.from_rank_offsets("weight", torch.ones(4, 6), (0, 1, 3), replica_id=(0, 0, 1)),
        ShardedTensor.from_rank_offsets("bias", torch.ones(4), replica_id=0),
        ShardedTensor.from_rank_offsets("layers", torch.ones(2), (0, 1, 2), prepend_axis_num=1),
        ShardedObject("rng", {"seed": 1}, (2,), (1,), replica_id=0),
    ]


def _described(shards: list[Any]) -> Any:
    """All that a save takes from the shards, without the data."""
    facts = ShardFacts(shards)
    _, items = saved_shards(facts)
    return items.names, items.structures, facts.once(described).message


def test_equal_shards_of_another_save_are_described_by_what_is_known_and_their_data_is_their_own() -> None:
    before = _described(_shards())
    assert all(again is each for again, each in zip(_described(_shards()), before, strict=True))
    shards = _shards()
    for shard in shards[:3]:
        shard.data = torch.full_like(shard.data, 7.0)
    _, items = saved_shards(ShardFacts(shards))
    tensors = [data for data in items.data if isinstance(data, torch.Tensor)]
    assert [tensor.data_ptr() for tensor in tensors] == [shard.data.data_ptr() for shard in shards[:3]]
    assert [tuple(tensor.shape) for tensor in tensors] == [(4, 6), (4,), (1, 2)]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(torch.ones(4).to_sparse(), id="sparse"),
        pytest.param(torch._neg_view(torch.ones(4)), id="waits for a negation"),
        pytest.param(torch.ones(4).as_subclass(type("Own", (torch.Tensor,), {})), id="of a class of its own"),
    ],
)
def test_data_of_another_kind_is_noticed(data: torch.Tensor) -> None:
    shards = _shards()
    shards[1].data = data
    assert ShardFacts(shards).facts != ShardFacts(_shards()).facts


def test_every_property_that_this_megatron_gives_a_shard_is_compared() -> None:
    for place in (1, 3):
        for field in dataclasses.fields(type(_shards()[place])):
            if field.name != "data":
                shards = _shards()
                setattr(shards[place], field.name, "changed")
                assert ShardFacts(shards).facts != ShardFacts(_shards()).facts, field.name


def test_a_shape_that_the_caller_changes_in_place_does_not_change_what_is_known() -> None:
    shards = _shards()
    shards[0].global_shape = [12, 6]
    _described(shards)
    changed = _shards()
    changed[0].global_shape = shards[0].global_shape
    changed[0].global_shape[0] = 24
    assert _described(changed)[1][0].shape == (24, 6)


def test_two_main_replicas_that_were_one_tensor_and_are_no_more_are_refused_though_all_else_is_known() -> None:
    one = torch.ones(4)
    tied = [ShardedTensor.from_rank_offsets("tied", one), ShardedTensor.from_rank_offsets("tied", one)]
    assert saved_shards(ShardFacts(tied))[1].names == ["tied"]
    untied = [ShardedTensor.from_rank_offsets("tied", one), ShardedTensor.from_rank_offsets("tied", one.clone())]
    with pytest.raises(PlanConflict, match="two tensors that claim to be the main replica of 'tied'"):
        saved_shards(ShardFacts(untied))
