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

from demo import megatron_cpu
from robust_dcp import PlanConflict
from tests.harness.ranks import run_ranks, values
from tests.megatron.torch_dist import chosen, failures_of, save


def _tensor(key: str, data: torch.Tensor, replica_id: int = 0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, replica_id=replica_id)


def _object(key: str, value: Any) -> ShardedObject:
    return ShardedObject(key, value, (1,), (0,))


def _state_dicts() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """For each kind of duplicate the sharded state dicts of both ranks."""
    other = {"other": _tensor("other", torch.ones(2))}
    return {
        "tensor against bytes": (
            {"x": _tensor("x/shard_0_1", torch.ones(3))},
            {"x": _object("x", {"a": 1})},
        ),
        "tensor twice in a plan": ({"a": _tensor("w", torch.zeros(3)), "b": _tensor("w", torch.ones(3))}, other),
        "object twice in a plan": ({"a": _object("w", {"a": 1}), "b": _object("w", {"b": 2})}, other),
        "other shapes": ({"a": _tensor("w", torch.ones(4))}, {"a": _tensor("w", torch.ones(6), replica_id=1)}),
        "other dtypes": (
            {"a": _tensor("w", torch.ones(4))},
            {"a": _tensor("w", torch.ones(4, dtype=torch.bfloat16), replica_id=1)},
        ),
    }


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


def _run(directory: Path) -> dict[str, Any]:
    megatron_cpu.install()
    found: dict[str, Any] = {}
    for number, name in enumerate(_state_dicts()):
        stock = _stock_plans(_state_dicts()[name])
        ours = []
        for is_validated in (True, False):
            target = directory / f"ours{number}{is_validated}"
            with chosen():
                error, _ = failures_of(
                    lambda name=name, target=target, is_validated=is_validated: save(
                        _state_dicts()[name][dist.get_rank()], target, validate_access_integrity=is_validated
                    )
                )
            left = [path.name for path in target.iterdir()]
            ours.append(
                (isinstance(error, PlanConflict), getattr(error, "key", None), getattr(error, "ranks", None), left)
            )
        found[name] = (stock, ours)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(run_ranks(2, _run, tmp_path_factory.mktemp("seed_003"), timeout_seconds=100))


def test_stocks_coordinator_asserts_or_says_nothing(found: list[dict[str, Any]]) -> None:
    assert found[0]["tensor against bytes"][0] == "AssertionError"
    for silent in ("object twice in a plan", "other shapes", "other dtypes"):
        assert found[0][silent][0] == "no error"


@pytest.mark.parametrize(
    ("name", "key", "ranks"),
    [
        ("tensor against bytes", "x/shard_0_1", [0, 1]),
        ("tensor twice in a plan", "w", [0]),
        ("object twice in a plan", "w", [0]),
        ("other shapes", "w", [0, 1]),
        ("other dtypes", "w", [0, 1]),
    ],
)
def test_ours_is_one_error_on_all_ranks_that_names_key_and_ranks(
    found: list[dict[str, Any]], name: str, key: str, ranks: list[int]
) -> None:
    for rank in found:
        for is_conflict, named_key, named_ranks, left in rank[name][1]:
            assert is_conflict
            assert named_key in (key, f"{key}/shard_0_1")  # of an object the plan knows the part
            assert named_ranks == ranks
            assert left == []
