"""``dist_checkpointing.save`` of Megatron with robust_dcp as the planner: what it saves, refuses, and how it fails."""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import save as save_bound_early
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from benchmarks.collectives import counted_collectives
from robust_dcp import PlanConflict, StorageError
from robust_dcp.megatron import RobustSaveStrategy
from robust_dcp.storage.files.paths import INDEX_NAME
from tests.megatron.stock import stock_strategy
from tests.megatron.torch_dist import (
    Scenarios,
    chosen,
    cut,
    failures_of,
    made,
    per_rank_object,
    replicated,
    replicated_object,
    save,
    warnings_of,
)

SCENARIOS = Scenarios()


def _halves(key: str, data: torch.Tensor) -> ShardedTensorFactory:
    """A factory as Megatron's SwiGLU has them: one tensor, saved as two."""

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        return {name: cut(f"{key}.{name}", part) for name, part in zip("ab", data.chunk(2), strict=True)}

    return ShardedTensorFactory(key, data, build, lambda parts: torch.cat([parts["a"], parts["b"]]))


def _state(step: int, *, is_template: bool = False) -> dict[str, Any]:
    rank, factor = dist.get_rank(), 0.0 if is_template else float(step)
    state: dict[str, Any] = {
        "model": {
            "weight": cut("weight", factor * (torch.arange(6.0).reshape(2, 3) + 10 * rank)),
            "halves": _halves("halves", factor * (torch.arange(4.0) + 10 * rank)),
            "layers": [replicated("bias", factor * torch.ones(5, dtype=torch.bfloat16))],
        },
        "rng": per_rank_object("rng", None if is_template else {"seed": step + rank}),
        "shared": replicated_object("shared", None if is_template else [step]),
        "here": LocalNonpersistentObject(f"rank {rank}"),
    }
    if not is_template:
        state |= {"iteration": step, "args": argparse.Namespace(lr=0.5, name="gpt")}
    return state


@SCENARIOS.add
def stock_megatron_loads_all_that_was_saved_and_nothing_went_through_object_collectives(directory: Path) -> None:
    torch.serialization.add_safe_globals([argparse.Namespace])
    with chosen(), counted_collectives() as calls:
        save(_state(3), directory / "1", content_metadata={"format": "x", "dp_cp_group": object()})
    rank = dist.get_rank()
    loaded = dist_checkpointing.load(_state(3, is_template=True), str(directory / "1"))
    assert torch.equal(loaded["model"]["weight"], 3 * (torch.arange(6.0).reshape(2, 3) + 10 * rank))
    assert torch.equal(loaded["model"]["halves"], 3 * (torch.arange(4.0) + 10 * rank))
    assert loaded["model"]["layers"][0].tolist() == [3.0] * 5
    assert (loaded["rng"], loaded["shared"], loaded["here"]) == ({"seed": 3 + rank}, [3], f"rank {rank}")
    assert (loaded["iteration"], loaded["args"]) == (3, argparse.Namespace(lr=0.5, name="gpt"))
    assert dist_checkpointing.load_content_metadata(str(directory / "1")) == {"format": "x"}
    assert json.loads((directory / "1" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert set(calls) <= {"barrier"}


@SCENARIOS.add
def a_repeated_save_reuses_the_plan_though_megatron_makes_the_state_dict_anew(directory: Path) -> None:
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    wrapped = FullyParallelSaveStrategyWrapper(strategy, dist.group.WORLD, do_cache_distribution=True)
    with chosen():
        for step, plans in ((1, ("built", "rebuilt")), (2, ("reused",))):  # with the wrapper's group it is another plan
            save(_state(step), directory / str(step), wrapped, validate_access_integrity=step == 1)
            assert strategy.last_report.plan in plans
    assert sum(phase.payload_nbytes for phase in strategy.last_report.phases) <= 256


@SCENARIOS.add
def functions_bound_early_and_strategies_that_are_called_themselves_save_by_robust_dcp(directory: Path) -> None:
    """With the switch at 0 the same calls are stock's."""
    for switch in "10":
        with chosen(switch=switch):
            for place, strategy in (("bound", stock_strategy()), ("parallel", stock_strategy())):
                if place == "parallel":
                    strategy = FullyParallelSaveStrategyWrapper(strategy, dist.group.WORLD)
                path = made(directory / f"{place}{switch}")
                save_bound_early({"weight": cut("weight", torch.ones(4))}, str(path), strategy)
                sharded = {"weight": cut("weight", torch.ones(4))}
                strategy.save(sharded, made(directory / f"{place}{switch} strategy"))
    dist.barrier()
    assert {path.name for path in directory.iterdir() if (path / INDEX_NAME).exists()} == {
        path.name for path in directory.iterdir() if "1" in path.name
    }
    assert len(list(directory.iterdir())) == 8


@SCENARIOS.add
def a_chunk_held_twice_by_a_rank_and_a_replica_without_data_are_no_conflict(directory: Path) -> None:
    main = dist.get_rank() == 0
    state = {
        "embedding": replicated("tied", torch.ones(4), replica_id=0 if main else 1),
        "output": replicated("tied", torch.ones(4), replica_id=2),  # as with tied weights
        "gathered": replicated("gathered", torch.full((4,), 7.0)),
    }
    if not main:
        state["gathered"].data = None
    save(state, directory / "1", RobustSaveStrategy(), validate_access_integrity=False)
    template = {key: replicated(key, torch.zeros(4)) for key in ("tied", "gathered")}
    loaded = dist_checkpointing.load(template, str(directory / "1"))
    assert (loaded["tied"].tolist(), loaded["gathered"].tolist()) == ([1.0] * 4, [7.0] * 4)


@SCENARIOS.add
def a_rank_that_cannot_make_its_part_is_one_error_on_all_and_nothing_is_left(directory: Path) -> None:
    failing_factory, without_data = _state(1), {"weight": cut("weight", torch.ones(2))}
    if dist.get_rank() == 1:
        failing_factory["model"]["halves"].build_fn = lambda *args: 1 / 0
        without_data["weight"].data = None
    with chosen():
        assert failures_of(lambda: save(failing_factory, directory / "1"))[1] == [(1, "division by zero")]
        ((rank, message),) = failures_of(lambda: save(without_data, directory / "2"))[1]
        assert rank == 1 and "`data` attr is None" in message
        unpicklable = {"weight": cut("weight", torch.ones(2)), "hook": lambda: None}
        ((rank, message),) = failures_of(lambda: save(unpicklable, directory / "3"))[1]
        assert rank == 0 and "lambda" in message
    assert not [path for name in "123" for path in (directory / name).iterdir()]


@SCENARIOS.add
def a_failure_to_write_metadata_json_is_an_error_on_all_ranks_and_megatron_finds_no_checkpoint(directory: Path) -> None:
    with chosen():
        made(directory / "1" / "metadata.json" / "x")
        error, failures = failures_of(lambda: dist_checkpointing.save(_state(1), str(directory / "1")))
    dist.barrier()
    assert isinstance(error, StorageError) and [rank for rank, _ in failures] == [0]
    with chosen():
        error, _ = failures_of(lambda: dist_checkpointing.load(_state(1), str(directory / "1")))
    assert error is not None


@SCENARIOS.add
def a_shard_without_main_replica_is_refused_on_all_ranks_as_megatron_would(directory: Path) -> None:
    state = {"weight": cut("weight", torch.ones(2), replica_id=dist.get_rank())}
    with chosen():
        error, failures = failures_of(lambda: save(state, directory / "1"))
    assert isinstance(error, CheckpointingException) and isinstance(error, PlanConflict)
    assert (error.key, failures) == ("weight", [])
    assert "Invalid access pattern" in str(error) and "1 of 2 shards" in str(error)


@SCENARIOS.add
def a_structure_that_is_claimed_to_be_constant_is_validated_once_it_is_not(directory: Path) -> None:
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    with chosen():
        save({"weight": cut("weight", torch.ones(2))}, directory / "1", strategy)
        grown = {"weight": cut("weight", torch.ones(2)), "rng": replicated_object("rng", 1)}
        grown["rng"].replica_id = 7
        error, _ = failures_of(lambda: save(grown, directory / "2", strategy, validate_access_integrity=False))
    assert isinstance(error, PlanConflict) and error.key == "rng"


@SCENARIOS.add
def a_common_state_that_differs_is_logged_by_the_rank_that_differs(directory: Path) -> None:
    def state() -> dict[str, Any]:
        return {"weight": cut("weight", torch.ones(2)), "lr": {"now": 0.1 * dist.get_rank()}, "same": [1, 2]}

    with chosen(), warnings_of("robust_dcp.megatron.common_state") as messages:
        save(state(), directory / "1", preprocess_common_before_consistancy_check=lambda common: {})
        assert messages == []
        save(state(), directory / "2")
    assert len(messages) == dist.get_rank()
    assert all("Mismatched keys: ['lr.now']" in message for message in messages)


@SCENARIOS.add
def a_strategy_that_saves_in_its_own_way_is_left_to_do_so(directory: Path) -> None:
    written = []

    class Own(TorchDistSaveShardedStrategy):
        def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
            written.append("weight" in sharded_state_dict)
            return AsyncRequest(async_fn=None, async_fn_args=(), finalize_fns=[])

    with chosen():
        save({"weight": cut("weight", torch.ones(2))}, directory / "1", Own("torch_dist", 1))
    assert written == [True]


@SCENARIOS.add
def main_replicas_that_two_ranks_claim_are_named_with_what_differs(directory: Path) -> None:
    rank = dist.get_rank()

    def state() -> dict[str, Any]:
        return {
            "differs": replicated("differs", torch.full((3,), float(rank)), replica_id=0),
            "equal": replicated("equal", torch.ones(3), replica_id=0),
            "object": ShardedObject("object", {"rank": rank}, (1,), (0,), replica_id=0),
            "unclaimed": replicated("unclaimed", torch.ones(3), replica_id=1),
            "right": replicated("right", torch.ones(3)),
        }

    with chosen(), warnings_of("robust_dcp.plan") as messages:
        for step in ("1", "2"):
            save(state(), directory / step, validate_access_integrity=False)
        error, _ = failures_of(lambda: save(state(), directory / "3"))
    assert type(error).__name__ == "InvalidAccess"
    template = {"differs": replicated("differs", torch.zeros(3)), "unclaimed": replicated("unclaimed", torch.zeros(3))}
    loaded = dist_checkpointing.load(template, str(directory / "2"), validate_access_integrity=False)
    assert (loaded["differs"].tolist(), loaded["unclaimed"].tolist()) == ([0.0] * 3, [1.0] * 3)
    told = [message for message in messages if "main replica" in message]
    if rank:
        assert told == []
        return
    without, claimed = told  # once, though both saves are of such a state dict
    assert "1 tensor(s) have shards without a main replica (replica_id 0) on any rank: 'unclaimed'." in without
    assert "3 shard(s) have more than one main replica" in claimed
    assert "the contents of 2 of them differ" in claimed
    assert "'differs' (rank 0 / rank 1)" in claimed and "'equal' (ranks 0-1)" in claimed
    assert "'object/shard_0_1' (rank 0 / rank 1)" in claimed and "right" not in claimed


@SCENARIOS.add
def with_warn_a_job_goes_on_after_a_save_that_failed_and_ranks_hear_of_one_that_failed_before_it(
    directory: Path,
) -> None:
    """A module in the place of Megatron-LM's, whose ``save_checkpoint`` goes as that does: state, save, tracker."""
    rank, tracker = dist.get_rank(), directory / "latest_checkpointed_iteration.txt"
    for iteration in range(1, 6):
        made(directory / str(iteration))
    training = types.ModuleType("megatron.training.checkpointing")

    def save_checkpoint(iteration: int) -> str:
        state = _state(iteration)
        if iteration == 2:
            state = {"weight": cut("weight", torch.ones(2), replica_id=rank)}
        if iteration == 3 and rank == 1:  # as ``model.sharded_state_dict()`` may
            raise ValueError("no state dict of the optimizer")
        dist_checkpointing.save(state, str(directory / str(iteration)))
        if iteration == 5 and rank == 1:
            raise ValueError("after the save")
        if rank == 0:
            tracker.write_text(str(iteration))
        return "saved"

    save_checkpoint.__module__ = training.__name__
    training.save_checkpoint = save_checkpoint  # type: ignore[attr-defined]
    sys.modules[training.__name__] = training
    try:
        with chosen(save_failure="warn"), warnings_of("robust_dcp.megatron.failures") as messages:
            assert [training.save_checkpoint(n) for n in (1, 2, 3)] == ["saved", None, None]
            dist.barrier()
            assert tracker.read_text() == "1"
            assert training.save_checkpoint(4) == "saved"
        with chosen():
            assert failures_of(lambda: training.save_checkpoint(3))[1] == [(1, "no state dict of the optimizer")]
            if rank == 1:
                with pytest.raises(ValueError, match="after the save"):
                    training.save_checkpoint(5)
            else:
                training.save_checkpoint(5)
    finally:
        del sys.modules[training.__name__]
    told = [message for message in messages if "training goes on" in message]
    assert any("no state dict of the optimizer" in message for message in told)
    assert sum("Invalid access pattern" in message for message in told) == (rank == 0)


test_on_two_ranks = SCENARIOS.test()


def test_a_multi_storage_client_path_is_refused() -> None:
    with pytest.raises(ValueError, match="msc://profile/checkpoint"):
        RobustSaveStrategy().save({}, "msc://profile/checkpoint")
