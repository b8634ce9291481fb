"""State dicts and checkpoints of a shape that nobody expects are saved right, or refused on all ranks in words."""

from __future__ import annotations

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
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

import robust_dcp
from demo import megatron_cpu
from robust_dcp.comm import Stopped
from robust_dcp.errors import ExchangeError, RankFailure, RobustCheckpointError
from robust_dcp.megatron import RobustLoadStrategy
from robust_dcp.megatron.failures import failure_sent_to_all
from robust_dcp.storage import RobustReader
from tests.harness.ranks import run_ranks, values
from tests.megatron.stock import stock_strategy
from tests.megatron.torch_dist import (
    Scenarios,
    chosen,
    cut,
    failures_of,
    replicated,
    replicated_object,
    save,
    warnings_of,
)

SCENARIOS = Scenarios()


def _all_scenarios(directory: Path) -> dict[str, Any]:
    megatron_cpu.install()
    return SCENARIOS.run(directory)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """For each scenario what it returned on each of the two ranks."""
    ranks = values(run_ranks(2, _all_scenarios, tmp_path_factory.mktemp("odd"), timeout_seconds=150))
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@SCENARIOS.add
def _tensor_and_object_of_one_name(directory: Path) -> Any:
    name = "thing/shard_0_1" if dist.get_rank() == 1 else "another"
    state = {"object": replicated_object("thing", [1]), "tensor": replicated(name, torch.ones(2), replica_id=0)}
    with chosen():
        error, failures = failures_of(lambda: save(state, directory / "1", validate_access_integrity=False))
    return type(error).__name__, failures, (directory / "1" / "metadata.json").exists()


def test_a_tensor_and_an_object_under_one_name_are_refused_and_the_rank_that_has_them_is_named(
    found: dict[str, list[Any]],
) -> None:
    for kind, failures, is_there in found["_tensor_and_object_of_one_name"]:
        assert kind == "PlanConflict" and not is_there
        assert [rank for rank, _ in failures] == [1]
        assert "a ShardedTensor and a ShardedObject under the key 'thing/shard_0_1'; give one of them" in failures[0][1]


class _Mine(torch.Tensor):
    """A class of a user, as quantization libraries have them."""


@SCENARIOS.add
def _tensors_that_are_not_plain(directory: Path) -> Any:
    rank = dist.get_rank()
    numbers = torch.complex(torch.full((2, 3), 1.0 + rank), torch.full((2, 3), 2.0))

    def state(factor: float) -> dict[str, Any]:
        return {
            "mine": cut("mine", (factor * torch.full((2, 3), 3.0 + rank)).as_subclass(_Mine)),
            "conjugate": cut("conjugate", (factor * numbers).conj()),
            "both": replicated("both", (factor * torch.arange(3.0)).as_subclass(_Mine)),
            "plain": cut("plain", factor * torch.ones(2)),
        }

    torch.serialization.add_safe_globals([_Mine])
    with chosen():
        save(state(1.0), directory / "1")
        by_ours = dist_checkpointing.load(state(0.0), str(directory / "1"))
    by_stock = dist_checkpointing.load(state(0.0), str(directory / "1"))
    return [{key: value.tolist() for key, value in loaded.items()} for loaded in (by_ours, by_stock)]


def test_tensors_of_other_classes_are_saved_and_both_ours_and_stock_load_them(found: dict[str, list[Any]]) -> None:
    for rank, loads in enumerate(found["_tensors_that_are_not_plain"]):
        for loaded in loads:
            assert loaded == {
                "mine": [[3.0 + rank] * 3] * 2,
                "conjugate": [[complex(1.0 + rank, -2.0)] * 3] * 2,
                "both": [0.0, 1.0, 2.0],
                "plain": [1.0, 1.0],
            }


def _template() -> dict[str, Any]:
    return {"weight": cut("weight", torch.zeros(2))}


def _error_of_load(directory: Path, strategy: Any = None) -> tuple[bool, str]:
    try:
        dist_checkpointing.load(_template(), str(directory), strategy)
    except CheckpointingException as error:
        return True, str(error)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    return False, "loaded"


@SCENARIOS.add
def _directories_that_lack_something(directory: Path) -> Any:
    save({"weight": cut("weight", torch.ones(2))}, directory / "1", stock_strategy())
    if dist.get_rank() == 0:
        (directory / "1" / "common.pt").rename(directory / "common.pt")
    dist.barrier()
    with chosen():
        without_common = _error_of_load(directory / "1")
        dist.barrier()
        if dist.get_rank() == 0:
            (directory / "1" / "metadata.json").rename(directory / "metadata.json")
        dist.barrier()
        without_config = _error_of_load(directory / "1")
    return without_common, without_config


def test_a_checkpoint_that_lacks_a_file_is_megatrons_exception_on_all_ranks_and_names_it(
    found: dict[str, list[Any]],
) -> None:
    for (is_megatrons, common), (is_too, config) in found["_directories_that_lack_something"]:
        assert is_megatrons and "common.pt does not exist" in common
        assert is_too and "is not a distributed checkpoint" in config


@SCENARIOS.add
def _another_format(directory: Path) -> Any:
    save({"weight": cut("weight", torch.ones(2))}, directory / "1", stock_strategy())
    if dist.get_rank() == 0:
        path = directory / "1" / "metadata.json"
        path.write_text(path.read_text().replace('"torch_dist"', '"of_tomorrow"'))
    dist.barrier()
    by_stock = _error_of_load(directory / "1")
    with chosen(), warnings_of("robust_dcp.switch.patching") as messages:
        by_ours = _error_of_load(directory / "1")
    return by_stock == by_ours, by_ours, messages


def test_a_checkpoint_of_another_format_is_left_to_megatron_and_that_is_said(found: dict[str, list[Any]]) -> None:
    for is_same, (_, error), messages in found["_another_format"]:
        assert is_same and "of_tomorrow" in error
        assert len(messages) == 1 and "loads of of_tomorrow checkpoints (only torch_dist is taken over)" in messages[0]


@SCENARIOS.add
def _a_load_strategy_of_ones_own(directory: Path) -> Any:
    asked: list[list[str]] = []

    class Own(TorchDistLoadShardedStrategy):
        def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            asked.append(sorted(sharded_state_dict))
            return {"weight": torch.full((2,), 7.0)}

    with chosen():
        save({"weight": cut("weight", torch.ones(2)), "iteration": 3}, directory / "1")
        loaded = dist_checkpointing.load(_template(), str(directory / "1"), Own())
    return asked, loaded["weight"].tolist(), loaded["iteration"]


def test_a_strategy_that_loads_in_its_own_way_is_asked_and_the_common_state_is_there(
    found: dict[str, list[Any]],
) -> None:
    assert found["_a_load_strategy_of_ones_own"] == [([["weight"]], [7.0, 7.0], 3)] * 2


@SCENARIOS.add
def _removal(directory: Path) -> Any:
    robust_dcp.save({"model": {"a": torch.ones(2)}, "optimizer": {"b": torch.ones(3)}}, checkpoint_id=directory / "1")
    with warnings_of("robust_dcp.megatron.load") as messages:
        if dist.get_rank() == 0:
            before = (directory / "1" / ".metadata").read_bytes()
            RobustLoadStrategy().remove_sharded_tensors(str(directory / "1"), "nothing.")
            assert (directory / "1" / ".metadata").read_bytes() == before
            RobustLoadStrategy().remove_sharded_tensors(str(directory / "1"), "optimizer.")
        dist.barrier()
    metadata = RobustReader(directory / "1").read_metadata()
    loaded = {"model": {"a": torch.zeros(2)}}
    robust_dcp.load(loaded, checkpoint_id=directory / "1")
    return messages, sorted(metadata.planner_data or {}), loaded["model"]["a"].tolist()


def test_a_prefix_that_fits_nothing_removes_nothing_and_of_what_is_removed_no_path_stays(
    found: dict[str, list[Any]],
) -> None:
    for rank, (messages, paths, loaded) in enumerate(found["_removal"]):
        assert len(messages) == (rank == 0) and all("begins with 'nothing.': nothing is" in each for each in messages)
        assert paths == ["model.a"] and loaded == [1.0, 1.0]


@SCENARIOS.add
def _a_framework_around_megatron(directory: Path) -> Any:
    """``training.save_checkpoint`` calls ``checkpointing.save_checkpoint``, and both are replaced."""
    ended: list[bool] = []
    checkpointing = types.ModuleType("megatron.training.checkpointing")
    training = types.ModuleType("megatron.training.training")
    integration = types.SimpleNamespace(on_checkpointing_end=lambda is_async_finalization: ended.append(True))

    def save_checkpoint(name: str, replica_id: int) -> str:
        save({"weight": replicated("weight", torch.ones(2), replica_id)}, directory / name)
        return name

    def save_checkpoint_of_training(name: str, replica_id: int) -> str:
        return f"training: {checkpointing.save_checkpoint(name, replica_id)}"

    save_checkpoint.__module__ = checkpointing.__name__
    save_checkpoint_of_training.__module__ = training.__name__
    checkpointing.save_checkpoint = save_checkpoint  # type: ignore[attr-defined]
    training.save_checkpoint = save_checkpoint_of_training  # type: ignore[attr-defined]
    training.ft_integration = checkpointing.ft_integration = integration  # type: ignore[attr-defined]
    sys.modules.update({checkpointing.__name__: checkpointing, training.__name__: training})
    try:
        with chosen(save_failure="warn"), warnings_of("robust_dcp.megatron.failures") as messages:
            found = [training.save_checkpoint("1", dist.get_rank()), list(ended)]
            found += [training.save_checkpoint("2", 1), list(ended)]  # no rank has the main replica
            found += [training.save_checkpoint("3", dist.get_rank())]
    finally:
        del sys.modules[checkpointing.__name__], sys.modules[training.__name__]
    dist.barrier()
    return found, [(directory / name / "metadata.json").exists() for name in "123"], len(messages)


def test_a_failed_save_ends_megatrons_checkpointing_section_and_nested_calls_are_one_save(
    found: dict[str, list[Any]],
) -> None:
    for rank, (results, committed, n_messages) in enumerate(found["_a_framework_around_megatron"]):
        assert results[0] == "training: 1" and results[1] == [] and results[4] == "training: 3"
        assert results[2] in (None, "training: None") and results[3] == [True]
        assert committed == [True, False, True] and n_messages == (rank == 0)


def _failed(rank: int) -> RobustCheckpointError:
    failure = RankFailure(rank=rank, type_name="KeyError", message="no weight", traceback_text="")
    return RobustCheckpointError("'plan' failed", failures=[failure])


def test_of_a_smaller_group_only_the_rank_that_failed_reports_it_to_the_larger_one() -> None:
    with pytest.raises(Stopped), failure_sent_to_all(0):
        raise _failed(1)
    with pytest.raises(KeyError), failure_sent_to_all(1):
        raise _failed(1) from KeyError("no weight")
    unknown = _failed(1)
    with pytest.raises(RobustCheckpointError) as caught, failure_sent_to_all(1):
        raise unknown
    assert caught.value is unknown, "without a cause the error itself is all there is to say"


@pytest.mark.parametrize("error", [ExchangeError("rank 3 is gone"), RobustCheckpointError("of this rank alone")])
def test_errors_that_name_no_rank_of_the_smaller_group_pass_unchanged(error: RobustCheckpointError) -> None:
    with pytest.raises(type(error)) as caught, failure_sent_to_all(0):
        raise error
    assert caught.value is error
