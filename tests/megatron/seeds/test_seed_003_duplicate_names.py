"""Seed 003 (Megatron-LM with PyTorch 2.4): one name stands for two things in what the ranks want to save.

Stock ends in a bare ``AssertionError`` on the coordinator alone, or keeps one of the two without a word. Ours is the
same error on all ranks, with the key and the ranks, whether or not the caller asks for the sharding to be validated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as megatron_torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

from robust_dcp import PlanConflict
from tests.megatron.torch_dist import Scenarios, chosen, save

SCENARIOS = Scenarios()


def _tensor(key: str, data: torch.Tensor, replica_id: int = 0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, replica_id=replica_id)


def _object(key: str, value: Any) -> ShardedObject:
    return ShardedObject(key, value, (1,), (0,))


def _duplicates() -> list[tuple[dict[str, Any], dict[str, Any], str, str, list[int]]]:
    """The sharded state dicts of both ranks, what stock makes of them, and the key and the ranks to be named."""
    other = {"other": _tensor("other", torch.ones(2))}
    half = torch.ones(4, dtype=torch.bfloat16)
    return [
        (
            *({"x": _tensor("x/shard_0_1", torch.ones(3))}, {"x": _object("x", {"a": 1})}),
            *("AssertionError", "x/shard_0_1", [0, 1]),
        ),
        ({"a": _tensor("w", torch.zeros(3)), "b": _tensor("w", torch.ones(3))}, other, "", "w", [0]),
        ({"a": _object("w", {"a": 1}), "b": _object("w", {"b": 2})}, other, "no error", "w", [0]),
        ({"a": _tensor("w", torch.ones(4))}, {"a": _tensor("w", torch.ones(6), 1)}, "no error", "w", [0, 1]),
        ({"a": _tensor("w", torch.ones(4))}, {"a": _tensor("w", half, 1)}, "no error", "w", [0, 1]),
    ]


def _stock_plans(state_dicts: tuple[dict[str, Any], dict[str, Any]]) -> str:
    """What stock makes of the plans of both ranks, and of the global plan on the coordinator."""
    plans = []
    try:
        for rank, state_dict in enumerate(state_dicts):
            grouped, _, _ = megatron_torch._replace_state_dict_keys_with_sharded_keys(state_dict, True)
            planner = MCoreSavePlanner(flatten_state_dict=False)
            planner.set_up_planner(megatron_torch.mcore_to_pyt_state_dict(grouped, False), None, rank == 0)
            plans.append(planner.create_local_plan())
        planner.create_global_plan(plans)
    except Exception as error:
        return type(error).__name__
    return "no error"


@SCENARIOS.add
def stocks_coordinator_asserts_or_says_nothing(_: Path) -> None:
    for of_rank_0, of_rank_1, outcome, _key, _ranks in _duplicates():
        if outcome:
            assert _stock_plans((of_rank_0, of_rank_1)) == outcome


@SCENARIOS.add
def ours_is_one_error_on_all_ranks_that_names_key_and_ranks(directory: Path) -> None:
    for number in range(len(_duplicates())):
        for is_validated in (True, False):
            *state_dicts, _, key, ranks = _duplicates()[number]
            target, mine = directory / f"{number}{is_validated}", state_dicts[dist.get_rank()]
            with chosen(), pytest.raises(PlanConflict) as caught:
                save(mine, target, validate_access_integrity=is_validated)
            assert caught.value.key in (key, f"{key}/shard_0_1")  # of an object the plan knows the part
            assert caught.value.ranks == ranks
            assert list(target.iterdir()) == []


test_on_two_ranks = SCENARIOS.test()
