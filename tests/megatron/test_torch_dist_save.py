"""``dist_checkpointing.save`` of Megatron with robust_dcp as the planner: what it saves, refuses, and how it fails."""

from __future__ import annotations

import argparse
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from benchmarks.collectives import counted_collectives
from demo import megatron_cpu
from robust_dcp import PlanConflict
from robust_dcp.errors import StorageError
from tests.harness.ranks import run_ranks, values
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


def _all_scenarios(directory: Path) -> dict[str, Any]:
    megatron_cpu.install()
    torch.serialization.add_safe_globals([argparse.Namespace])
    return SCENARIOS.run(directory)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """For each scenario what it returned on each of the two ranks."""
    ranks = values(run_ranks(2, _all_scenarios, tmp_path_factory.mktemp("saves"), timeout_seconds=150))
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


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
def _loads_with_stock(directory: Path) -> dict[str, Any]:
    with chosen(), counted_collectives() as calls:
        save(_state(3), directory / "1", content_metadata={"format": "x", "dp_cp_group": object()})
    loaded = dist_checkpointing.load(_state(3, is_template=True), str(directory / "1"))
    return {
        "weight": loaded["model"]["weight"].tolist(),
        "halves": loaded["model"]["halves"].tolist(),
        "bias": loaded["model"]["layers"][0].tolist(),
        "objects": (loaded["rng"], loaded["shared"], loaded["here"]),
        "common": (loaded["iteration"], loaded["args"]),
        "content": dist_checkpointing.load_content_metadata(str(directory / "1")),
        "config": json.loads((directory / "1" / "metadata.json").read_text())["sharded_backend"],
        "objects gathered": {name: n for name, n in calls.items() if name != "barrier"},
    }


def test_stock_megatron_loads_all_that_was_saved_and_nothing_went_through_object_collectives(
    found: dict[str, list[Any]],
) -> None:
    for rank, loaded in enumerate(found["_loads_with_stock"]):
        assert loaded == {
            "weight": (3 * (torch.arange(6.0).reshape(2, 3) + 10 * rank)).tolist(),
            "halves": (3 * (torch.arange(4.0) + 10 * rank)).tolist(),
            "bias": [3.0] * 5,
            "objects": ({"seed": 3 + rank}, [3], f"rank {rank}"),
            "common": (3, argparse.Namespace(lr=0.5, name="gpt")),
            "content": {"format": "x"},
            "config": "torch_dist",
            "objects gathered": {},
        }


@SCENARIOS.add
def _repeated(directory: Path) -> list[Any]:
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    wrapped = FullyParallelSaveStrategyWrapper(strategy, dist.group.WORLD, do_cache_distribution=True)
    reports = []
    with chosen():
        for step in (1, 2):
            save(_state(step), directory / str(step), wrapped, validate_access_integrity=step == 1)
            report = strategy.last_report
            reports.append((report.plan, sum(phase.payload_nbytes for phase in report.phases)))
    return reports


def test_a_repeated_save_reuses_the_plan_though_megatron_makes_the_state_dict_anew(
    found: dict[str, list[Any]],
) -> None:
    for reports in found["_repeated"]:
        assert reports[0][0] in ("built", "rebuilt")  # with the wrapper's group it is another plan
        assert reports[1][0] == "reused"
        assert reports[1][1] <= 256


@SCENARIOS.add
def _failing_factory(directory: Path) -> Any:
    state = _state(1)
    if dist.get_rank() == 1:
        state["model"]["halves"].build_fn = lambda *args: 1 / 0
    with chosen():
        error, failures = failures_of(lambda: save(state, directory / "1"))
    return failures, sorted(path.name for path in (directory / "1").iterdir()), isinstance(error, ArithmeticError)


def test_a_factory_that_fails_on_one_rank_is_one_error_on_all_and_nothing_is_left(found: dict[str, list[Any]]) -> None:
    assert found["_failing_factory"] == [([(1, "division by zero")], [], False)] * 2


@SCENARIOS.add
def _unpicklable_common_state(directory: Path) -> Any:
    state = {"weight": cut("weight", torch.ones(2)), "hook": lambda: None}
    with chosen():
        return failures_of(lambda: save(state, directory / "1"))[1]


def test_a_common_state_that_does_not_pickle_on_rank_0_is_an_error_on_all_ranks(found: dict[str, list[Any]]) -> None:
    for failures in found["_unpicklable_common_state"]:
        assert [rank for rank, _ in failures] == [0]
        assert "lambda" in failures[0][1]


@SCENARIOS.add
def _failing_finish(directory: Path) -> Any:
    with chosen():
        (directory / "1" / "metadata.json" / "x").mkdir(parents=True, exist_ok=True)
        error, failures = failures_of(lambda: dist_checkpointing.save(_state(1), str(directory / "1")))
    dist.barrier()
    return isinstance(error, StorageError), [rank for rank, _ in failures], os.listdir(directory / "1")


def test_a_failure_to_write_metadata_json_is_an_error_on_all_ranks_and_nothing_that_was_saved_stays(
    found: dict[str, list[Any]],
) -> None:
    assert found["_failing_finish"] == [(True, [0], ["metadata.json"])] * 2


@SCENARIOS.add
def _missing_main_replica(directory: Path) -> Any:
    state = {"weight": cut("weight", torch.ones(2), replica_id=dist.get_rank())}
    with chosen():
        error, failures = failures_of(lambda: save(state, directory / "1"))
    return isinstance(error, CheckpointingException), isinstance(error, PlanConflict), error.key, str(error), failures


def test_a_shard_without_main_replica_is_refused_on_all_ranks_as_megatron_would(found: dict[str, list[Any]]) -> None:
    for is_megatrons, is_ours, key, message, failures in found["_missing_main_replica"]:
        assert (is_megatrons, is_ours, key, failures) == (True, True, "weight", [])
        assert "Invalid access pattern" in message
        assert "1 of 2 shards" in message


@SCENARIOS.add
def _claimed_constant(directory: Path) -> Any:
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    with chosen():
        save({"weight": cut("weight", torch.ones(2))}, directory / "1", strategy)
        grown = {"weight": cut("weight", torch.ones(2)), "rng": replicated_object("rng", 1)}
        grown["rng"].replica_id = 7
        error, _ = failures_of(
            lambda: save(grown, directory / "2", strategy, validate_access_integrity=False),
        )
    return error.key


def test_a_structure_that_is_claimed_to_be_constant_is_validated_once_it_is_not(found: dict[str, list[Any]]) -> None:
    assert found["_claimed_constant"] == ["rng", "rng"]


@SCENARIOS.add
def _differing_common_state(directory: Path) -> list[str]:
    state = {"weight": cut("weight", torch.ones(2)), "lr": {"now": 0.1 * dist.get_rank()}, "same": [1, 2]}
    with chosen(), warnings_of("robust_dcp.megatron.common_state") as messages:
        save(state, directory / "1")
    return messages


def test_a_common_state_that_differs_is_logged_by_the_rank_that_differs(found: dict[str, list[Any]]) -> None:
    first, second = found["_differing_common_state"]
    assert first == []
    assert len(second) == 1
    assert "Mismatched keys: ['lr.now']" in second[0]


@SCENARIOS.add
def _ignored_common_state(directory: Path) -> list[str]:
    state = {"weight": cut("weight", torch.ones(2)), "rank": dist.get_rank()}
    with chosen(), warnings_of("robust_dcp.megatron.common_state") as messages:
        save(state, directory / "1", preprocess_common_before_consistancy_check=lambda common: {})
    return messages


def test_what_the_caller_takes_out_of_the_common_state_is_not_compared(found: dict[str, list[Any]]) -> None:
    assert found["_ignored_common_state"] == [[], []]


@SCENARIOS.add
def _a_strategy_of_ones_own(directory: Path) -> list[bool]:
    written = []

    class Own(TorchDistSaveShardedStrategy):
        def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
            written.append("weight" in sharded_state_dict)
            return AsyncRequest(async_fn=None, async_fn_args=(), finalize_fns=[])

    with chosen():
        save({"weight": cut("weight", torch.ones(2))}, directory / "1", Own("torch_dist", 1))
    return written


def test_a_strategy_that_saves_in_its_own_way_is_left_to_do_so(found: dict[str, list[Any]]) -> None:
    assert found["_a_strategy_of_ones_own"] == [[True], [True]]


def _megatron_training(tracker: Path) -> types.ModuleType:
    """A module in the place of Megatron-LM's, whose ``save_checkpoint`` goes as that does: state, save, tracker."""
    module = types.ModuleType("megatron.training.checkpointing")

    def save_checkpoint(iteration: int, directory: Path, state: dict[str, Any]) -> str:
        save(state, directory)
        dist.barrier()
        if dist.get_rank() == 0:
            tracker.write_text(str(iteration))
        return "saved"

    save_checkpoint.__module__ = module.__name__
    module.save_checkpoint = save_checkpoint  # type: ignore[attr-defined]
    return module


@SCENARIOS.add
def _failing_save_of_a_job_that_goes_on(directory: Path) -> Any:
    tracker = directory / "latest_checkpointed_iteration.txt"
    training = _megatron_training(tracker)
    sys.modules[training.__name__] = training
    bad = {"weight": cut("weight", torch.ones(2), replica_id=dist.get_rank())}
    results: list[Any] = []
    try:
        with chosen(save_failure="warn"), warnings_of("robust_dcp.megatron.failures") as messages:
            results.append(training.save_checkpoint(1, directory / "1", _state(1)))
            results.append(training.save_checkpoint(2, directory / "2", bad))
            results.append(training.save_checkpoint(3, directory / "3", _state(3)))
            dist.barrier()
            results.append(tracker.read_text())
        with chosen():
            failures_of(lambda: training.save_checkpoint(4, directory / "4", bad))
        dist.barrier()
        results.append(tracker.read_text())
    finally:
        del sys.modules[training.__name__]
    old = dist_checkpointing.load(_state(1, is_template=True), str(directory / "1"))["iteration"]
    return results, old, messages


def test_with_warn_a_failed_save_is_logged_the_tracker_stays_and_the_job_goes_on(found: dict[str, list[Any]]) -> None:
    for rank, (results, old, messages) in enumerate(found["_failing_save_of_a_job_that_goes_on"]):
        assert results == ["saved", None, "saved", "3", "3"]
        assert old == 1
        assert len(messages) == (1 if rank == 0 else 0)
        assert all("Invalid access pattern" in message for message in messages)


def _training_that_fails_on_rank_1(directory: Path) -> types.ModuleType:
    """As above, but making the state dict fails on rank 1 at iteration 2, as ``model.sharded_state_dict()`` may."""
    module = types.ModuleType("megatron.training.checkpointing")

    def save_checkpoint(iteration: int) -> str:
        if iteration == 2 and dist.get_rank() == 1:
            raise ValueError("no state dict of the optimizer")
        dist_checkpointing.save(_state(iteration), str(directory / str(iteration)))
        if iteration == 4 and dist.get_rank() == 1:
            raise ValueError("after the save")
        return "saved"

    save_checkpoint.__module__ = module.__name__
    module.save_checkpoint = save_checkpoint  # type: ignore[attr-defined]
    return module


@SCENARIOS.add
def _failing_state_dict(directory: Path) -> Any:
    training = _training_that_fails_on_rank_1(directory)
    sys.modules[training.__name__] = training
    found: list[Any] = []
    for iteration in (1, 2, 3, 4):
        made(directory / str(iteration))
    try:
        with chosen(save_failure="warn"), warnings_of("robust_dcp.megatron.failures") as messages:
            found += [training.save_checkpoint(iteration) for iteration in (1, 2, 3)]
        with chosen():
            error, failures = failures_of(lambda: training.save_checkpoint(2))
            found += [failures, str(error)]
            late = None
            try:
                training.save_checkpoint(4)
            except ValueError as raised:
                late = str(raised)
            found.append(late)
    finally:
        del sys.modules[training.__name__]
    return found, messages


def test_a_rank_that_fails_before_the_save_is_heard_of_by_all_and_with_warn_the_job_goes_on(
    found: dict[str, list[Any]],
) -> None:
    for rank, (results, messages) in enumerate(found["_failing_state_dict"]):
        saved, failed, again, failures, message, late = results
        assert (saved, failed, again) == ("saved", None, "saved")
        assert failures == [(1, "no state dict of the optimizer")]
        assert "no state dict of the optimizer" in message
        assert late == (None if rank == 0 else "after the save")
        assert any("training goes on" in text and "no state dict of the optimizer" in text for text in messages)


@SCENARIOS.add
def _claimed_by_two_ranks(directory: Path) -> Any:
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
    template = {"differs": replicated("differs", torch.zeros(3)), "unclaimed": replicated("unclaimed", torch.zeros(3))}
    loaded = dist_checkpointing.load(template, str(directory / "2"), validate_access_integrity=False)
    told = [message for message in messages if "main replica" in message]
    return told, type(error).__name__, loaded["differs"].tolist(), loaded["unclaimed"].tolist()


def test_main_replicas_that_two_ranks_claim_are_named_with_what_differs(found: dict[str, list[Any]]) -> None:
    for rank, (told, error, differs, unclaimed) in enumerate(found["_claimed_by_two_ranks"]):
        assert error == "InvalidAccess"
        assert (differs, unclaimed) == ([0.0] * 3, [1.0] * 3)
        if rank:
            assert told == []
            continue
        without, claimed = told  # once, though both saves are of such a state dict
        assert "1 tensor(s) have shards without a main replica (replica_id 0) on any rank: 'unclaimed'." in without
        assert "3 shard(s) have more than one main replica" in claimed
        assert "the contents of 2 of them differ" in claimed
        assert "'differs' (rank 0 / rank 1)" in claimed
        assert "'equal' (ranks 0-1)" in claimed
        assert "'object/shard_0_1' (rank 0 / rank 1)" in claimed
        assert "right" not in claimed


def _save_without_rank_1(directory: Path) -> Any:
    if dist.get_rank() == 1:
        return None
    with chosen(timeout_seconds=2):
        error, _ = failures_of(lambda: dist_checkpointing.save({"a": replicated("a", torch.ones(3))}, str(directory)))
    return type(error).__name__, getattr(error, "missing_ranks", None)


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    outcomes = values(run_ranks(2, _save_without_rank_1, tmp_path, timeout_seconds=60))
    assert outcomes == [("ExchangeTimeout", [1]), None]
