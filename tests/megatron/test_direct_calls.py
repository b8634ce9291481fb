"""Callers that hold Megatron's own functions or call strategies themselves, and jobs in which robust_dcp was not asked
for: all of them save and load, and what each has written the others read."""

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
from megatron.core.dist_checkpointing import load as megatrons_load
from megatron.core.dist_checkpointing import save as megatrons_save
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

from demo import megatron_cpu
from robust_dcp.storage.files.paths import INDEX_NAME
from tests.harness.disks import FullDisk
from tests.harness.ranks import run_ranks, values
from tests.megatron.async_saves import loaded, state, written_on
from tests.megatron.stock import stock_strategy
from tests.megatron.torch_dist import Scenarios, chosen, cut, failures_of, made, queue_option, save, warnings_of

SCENARIOS = Scenarios()


def _all_scenarios(directory: Path) -> dict[str, Any]:
    megatron_cpu.install()
    return SCENARIOS.run(directory)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """For each scenario what it returned on each of the two ranks."""
    ranks = values(run_ranks(2, _all_scenarios, tmp_path_factory.mktemp("direct"), timeout_seconds=150))
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def _is_ours(directory: Path) -> bool:
    return (directory / INDEX_NAME).exists()


def _as_saved(rank: int, value: float) -> tuple[float, float, float, float]:
    return value + rank, value + rank, value, value


def _what(found: dict[str, Any]) -> tuple[float, float, float]:
    return found["weight"].min().item(), found["weight"].max().item(), found["object"]["value"]


@SCENARIOS.add
def _installed_but_not_asked_for(directory: Path) -> Any:
    """The patches are there, and the planner is stock's: as after ``--ckpt-planner default``."""
    with chosen(switch="0"):
        save(state(1.0), directory / "1", stock_strategy())
        wrapped = FullyParallelSaveStrategyWrapper(stock_strategy(), dist.group.WORLD)
        save(state(2.0), directory / "2", wrapped)
        found = [
            loaded(directory / "1"),
            loaded(directory / "2"),
            dist_checkpointing.load(
                state(-1.0),
                str(directory / "2"),
                FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), dist.group.WORLD),
            )["iteration"],
            sorted(TorchDistLoadShardedStrategy().load_sharded_metadata(str(directory / "1"))),
            dist_checkpointing.load_common_state_dict(str(directory / "1"))["iteration"],
        ]
    return found, _is_ours(directory / "1") or _is_ours(directory / "2")


def test_where_robust_dcp_was_not_asked_for_every_patched_function_is_stocks(found: dict[str, list[Any]]) -> None:
    for rank, (results, is_ours) in enumerate(found["_installed_but_not_asked_for"]):
        assert results == [_as_saved(rank, 1.0), _as_saved(rank, 2.0), 2.0, ["object/shard_0_1", "weight"], 1.0]
        assert not is_ours


@SCENARIOS.add
def _stock_functions_bound_earlier(directory: Path) -> Any:
    with chosen():
        megatrons_save(state(3.0), str(made(directory / "1")), stock_strategy())
        wrapped = FullyParallelSaveStrategyWrapper(stock_strategy(), dist.group.WORLD)
        megatrons_save(state(4.0), str(made(directory / "2")), wrapped)
        plain = megatrons_load(state(-1.0), str(directory / "1"))
        parallel = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), dist.group.WORLD)
        shared = megatrons_load(state(-1.0), str(directory / "2"), parallel)
    return _what(plain), _what(shared), _is_ours(directory / "1") and _is_ours(directory / "2")


def test_megatrons_functions_that_were_bound_earlier_save_and_load_through_robust_dcp(
    found: dict[str, list[Any]],
) -> None:
    for rank, (plain, shared, is_ours) in enumerate(found["_stock_functions_bound_earlier"]):
        assert plain == (3.0 + rank, 3.0 + rank, 3.0) and shared == (4.0 + rank, 4.0 + rank, 4.0)
        assert is_ours


@SCENARIOS.add
def _strategies_called_themselves(directory: Path) -> Any:
    shard = {"weight": cut("weight", torch.full((4,), 5.0 + dist.get_rank()))}
    wrapper = FullyParallelSaveStrategyWrapper(stock_strategy(), dist.group.WORLD)
    with chosen():
        wrapper.save(shard, made(directory / "1"))
        template = {"weight": cut("weight", torch.zeros(4))}
        plain = TorchDistLoadShardedStrategy().load(template, directory / "1")
        template = {"weight": cut("weight", torch.zeros(4))}
        parallel = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), dist.group.WORLD)
        shared = parallel.load(template, directory / "1")
    return plain["weight"].tolist(), shared["weight"].tolist(), _is_ours(directory / "1")


def test_strategies_that_are_called_themselves_save_and_load_through_robust_dcp(found: dict[str, list[Any]]) -> None:
    for rank, each in enumerate(found["_strategies_called_themselves"]):
        assert each == ([5.0 + rank] * 4, [5.0 + rank] * 4, True)


class _FrameworkQueue:
    """A module in the place of ``megatron.training.async_utils``, with a queue of Megatron-Core's."""

    def __init__(self) -> None:
        self.queue = AsyncCallsQueue()
        self.module = types.ModuleType("megatron.training.async_utils")

        def maybe_finalize_async_save(blocking: bool = False) -> list[int]:
            return list(self.queue.maybe_finalize_async_calls(blocking))

        self.module.maybe_finalize_async_save = maybe_finalize_async_save  # type: ignore[attr-defined]

    def ask_for(self, directory: Path, value: float) -> None:
        self.queue.schedule_async_request(save(state(value), directory, async_sharded_save=True, **queue_option()))


@SCENARIOS.add
def _failed_async_save(directory: Path) -> Any:
    framework, results = _FrameworkQueue(), []
    module = framework.module
    sys.modules[module.__name__] = module
    full = FullDisk(0) if dist.get_rank() == 1 else None
    try:
        with (
            chosen(save_failure="warn"),
            warnings_of("robust_dcp.megatron.failures") as messages,
        ):
            for name, fails in (("1", False), ("2", True), ("3", False)):
                if fails and full is not None:
                    with written_on(full):
                        framework.ask_for(directory / name, float(name))
                else:
                    framework.ask_for(directory / name, float(name))
            results.append(module.maybe_finalize_async_save(blocking=True))
        with chosen():
            if full is not None:
                with written_on(full):
                    framework.ask_for(directory / "4", 4.0)
            else:
                framework.ask_for(directory / "4", 4.0)
            error, failures = failures_of(lambda: module.maybe_finalize_async_save(blocking=True))
        results.append(module.maybe_finalize_async_save(blocking=True))
    finally:
        del sys.modules[module.__name__]
    dist.barrier()
    committed = [(directory / name / "metadata.json").exists() for name in "1234"]
    return results, messages, committed, [rank for rank, _ in failures], type(error).__name__, loaded(directory / "3")


def test_with_warn_a_failed_async_save_is_logged_and_the_saves_after_it_are_finalized(
    found: dict[str, list[Any]],
) -> None:
    for rank, each in enumerate(found["_failed_async_save"]):
        results, messages, committed, failed, error, saved = each
        assert committed == [True, False, True, False]
        assert len(messages) == 1, "rank 0 tells it, and rank 1, which failed itself"
        assert "this checkpoint was not saved, and training goes on" in messages[0]
        assert "No space left on device" in messages[0]
        assert (failed, error) == ([1], "StorageError"), "without the option it is raised"
        assert results[-1] == [] and saved == _as_saved(rank, 3.0)
