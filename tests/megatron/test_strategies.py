"""RobustSaveStrategy on small sharded state dicts: what Megatron's contract asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from demo import megatron_cpu
from robust_dcp import RobustCheckpointError
from robust_dcp.megatron import RobustSaveStrategy
from tests.harness.ranks import run_ranks, values
from tests.megatron.torch_dist import queue_option

_SCENARIOS: list[Callable[[Path], Any]] = []


def _scenario(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Marks what the ranks do; all of them do it in one go, since importing Megatron takes each rank seconds."""
    _SCENARIOS.append(function)
    return function


def _all_scenarios(directory: Path) -> dict[str, Any]:
    megatron_cpu.install()
    return {function.__name__: function(directory / function.__name__) for function in _SCENARIOS}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """For each scenario what it returned on each of the two ranks."""
    ranks = values(run_ranks(2, _all_scenarios, tmp_path_factory.mktemp("scenarios"), timeout_seconds=120))
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def _cut(key: str, data: torch.Tensor) -> ShardedTensor:
    """One row block of a tensor for each rank."""
    return ShardedTensor.from_rank_offsets(key, data, (0, dist.get_rank(), dist.get_world_size()))


def _replicated(key: str, data: torch.Tensor | None, replica_id: int | None = None) -> ShardedTensor:
    replica_id = dist.get_rank() if replica_id is None else replica_id
    tensor = ShardedTensor.from_rank_offsets(key, torch.zeros(0) if data is None else data, replica_id=replica_id)
    if data is None:
        tensor.data = None
    return tensor


def _replicated_object(key: str, value: Any) -> ShardedObject:
    return ShardedObject(key, value, (1,), (0,), replica_id=dist.get_rank())


def _save(state_dict: dict[str, Any], directory: Path, strategy: Any, **options: Any) -> None:
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state_dict, str(directory), strategy, **options)


@_scenario
def _balanced(directory: Path) -> list[int]:
    written = []
    for name in ("alone", "wrapped"):
        inner = RobustSaveStrategy()
        strategy = inner if name == "alone" else FullyParallelSaveStrategyWrapper(inner, dist.group.WORLD)
        _save({str(n): _replicated(str(n), torch.ones(1024)) for n in range(8)}, directory / name, strategy)
        items = FileSystemReader(directory / name).read_metadata().state_dict_metadata
        n_others = len(items) - 8 if dist.get_rank() == 0 else 0  # the common state, from 0.19 on
        written.append(inner.last_report.items - n_others if inner.last_report else -1)
    return written


def test_the_main_replica_is_written_and_the_fully_parallel_wrapper_spreads_the_work_over_its_group(
    found: dict[str, list[Any]],
) -> None:
    assert found["_balanced"] == [[8, 4], [0, 4]]


@_scenario
def _object_with_unlike_replicas(directory: Path) -> Any:
    state = {"rng": _replicated_object("rng", {"seed": dist.get_rank()})}
    _save(state, directory / "checkpoint", RobustSaveStrategy())
    return dist_checkpointing.load({"rng": _replicated_object("rng", None)}, str(directory / "checkpoint"))["rng"]


def test_of_an_object_the_main_replica_is_saved(found: dict[str, list[Any]]) -> None:
    assert found["_object_with_unlike_replicas"] == [{"seed": 0}, {"seed": 0}]


@_scenario
def _tied(directory: Path) -> Any:
    """A chunk that one rank holds twice, as with tied weights, and a replica that is only a placeholder."""
    main = dist.get_rank() == 0
    state = {
        "embedding": _replicated("tied", torch.ones(4), replica_id=0 if main else 1),
        "output": _replicated("tied", torch.ones(4), replica_id=2),
        "gathered": _replicated("gathered", torch.full((4,), 7.0) if main else None),
    }
    strategy = RobustSaveStrategy()
    _save(state, directory / "checkpoint", strategy, validate_access_integrity=False)
    template = {key: _replicated(key, torch.zeros(4)) for key in ("tied", "gathered")}
    loaded = dist_checkpointing.load(template, str(directory / "checkpoint"))
    return loaded["tied"].tolist(), loaded["gathered"].tolist()


def test_a_chunk_held_twice_by_a_rank_and_a_replica_without_data_are_no_conflict(found: dict[str, list[Any]]) -> None:
    assert found["_tied"] == [([1.0] * 4, [7.0] * 4)] * 2


def _failures(save: Callable[[], None]) -> list[tuple[int, str]]:
    """The ranks that failed, and how, as this rank hears of it."""
    with pytest.raises(RobustCheckpointError) as caught:
        save()
    return [(failure.rank, failure.message) for failure in caught.value.rank_failures]


@_scenario
def _without_data(directory: Path) -> list[tuple[int, str]]:
    shard = _cut("weight", torch.ones(2))
    if dist.get_rank() == 1:
        shard.data = None
    strategy = RobustSaveStrategy(timeout_seconds=30)
    return _failures(lambda: _save({"weight": shard}, directory / "checkpoint", strategy))


def test_a_shard_without_data_on_one_rank_is_one_error_on_all(found: dict[str, list[Any]]) -> None:
    for failures in found["_without_data"]:
        assert [rank for rank, _ in failures] == [1]
        assert "`data` attr is None" in failures[0][1]


@_scenario
def _asynchronous(directory: Path) -> tuple[bool, list[str]]:
    if dist.get_rank() == 0:
        directory.mkdir()
    dist.barrier()
    state = {"weight": _cut("weight", torch.ones(2))}
    option = queue_option()
    request = dist_checkpointing.save(state, str(directory), RobustSaveStrategy(), async_sharded_save=True, **option)
    before = (directory / "metadata.json").exists()
    request.execute_sync()
    return before, sorted(path.name for path in directory.glob("*meta*"))


def test_an_asynchronous_save_by_our_strategy_is_a_checkpoint_once_its_request_is_executed(
    found: dict[str, list[Any]],
) -> None:
    assert found["_asynchronous"] == [(False, [".metadata", "metadata.json"])] * 2


def test_a_multi_storage_client_path_is_refused() -> None:
    with pytest.raises(ValueError, match="msc://profile/checkpoint"):
        RobustSaveStrategy().save({}, "msc://profile/checkpoint")
