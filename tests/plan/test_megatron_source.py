"""Sharded state dicts of Megatron are described as stock does, and their tensors taken straight from the shards."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import WriteItem

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from demo import megatron_cpu
from robust_dcp.megatron.saving.planner import MegatronPlanner
from robust_dcp.plan.share import Share
from robust_dcp.plan.state_dict.sources import StateDictSource
from robust_dcp.plan.structure import Replica
from tests.harness.ranks import run_ranks, values
from tests.plan.planner_reference import stock_items, stock_planner, stock_structures


def _sharded_state_dict() -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    blocks = [(0, 2 * rank + n, 2 * world) for n in range(2)]
    layer = torch.full((2, 3), float(rank))
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", torch.zeros(2, 3), (0, rank, world)),
        "blocks": [ShardedTensor.from_rank_offsets("blocks", torch.full((2,), n), blocks[n]) for n in range(2)],
        "layers": ShardedTensor.from_rank_offsets("layers", layer, (0, rank, world), prepend_axis_num=1),
        "replicated": ShardedTensor.from_rank_offsets("replicated", torch.ones(3), replica_id=rank),
        "object": ShardedObject("object", {"step": 7}, (world,), (rank,)),
    }


def _differences() -> list[str]:
    megatron_cpu.install()
    planner = MegatronPlanner()
    planner.set_up_planner(_sharded_state_dict(), is_coordinator=True)
    session = planner.open_session("checkpoint", no_dist=True)
    session.plan.local = planner.describe(session.channel)
    places = np.arange(len(session.plan.local.table))
    session.plan.share = Share(bytes(16), places, None)
    stock = stock_planner(planner.state_dict, flatten_state_dict=False, flatten_sharded_tensors=False)
    source = planner.source(session)
    differences = [] if isinstance(source, StateDictSource) else [type(source).__name__]

    expected = {(item.index.fqn, item.index.offset): item for item in stock_items(stock)}
    kept = planner.kept_items(session)
    found = [structure._replace(replica=Replica.ANY) for structure in planner._items.structures]
    if sorted(structure for _, structure in stock_structures(stock)) != sorted(found):
        differences.append("structures")
    if len(kept) != len(expected):
        differences.append(f"{len(kept)} items")
    for place, item in enumerate(kept):
        theirs = expected[item.index.fqn, item.index.offset]
        if (item.index, _without_strides(item)) != (theirs.index, _without_strides(theirs)):
            differences.append(f"{item} is not {theirs}")
        data = source.resolve(place)
        if isinstance(data, io.BytesIO):
            if data is not planner.state_dict[item.index.fqn]:
                differences.append(f"{item.index.fqn} was serialized again")
        elif data.data_ptr() != stock.resolve_data(theirs).data_ptr():  # type: ignore[union-attr]
            differences.append(f"{item.index} is resolved to another shard")
    return differences


def _without_strides(item: WriteItem) -> dict[str, Any] | None:
    """What an item says of its tensor. We leave out the strides of torch 2.15, which older ones cannot load."""
    found = None if item.tensor_data is None else dataclasses.asdict(item.tensor_data)
    if found is not None:
        found["properties"].pop("strides", None)
    return found


def test_what_megatron_shards_is_described_and_resolved_as_stock_does() -> None:
    assert values(run_ranks(2, _differences, timeout_seconds=120)) == [[], []]
