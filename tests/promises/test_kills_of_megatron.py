"""Megatron saves an iteration again and is killed, or the power is cut: weights and iteration are of one save."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from torch.distributed.checkpoint import FileSystemReader

from robust_dcp.errors import RobustCheckpointError
from robust_dcp.megatron import RobustLoadStrategy, RobustSaveStrategy
from robust_dcp.storage.files.paths import mark_of
from tests.megatron.torch_dist import chosen, queue_option
from tests.promises.scenarios import Scenario
from tests.promises.test_kills import left_by_kills, left_by_power_cuts

MANIFEST = {"verify_integrity": True} if "verify_integrity" in signature(dist_checkpointing.save).parameters else {}


def state(value: int) -> dict[str, Any]:
    tensor = torch.arange(3000.0) + value
    return {"w": ShardedTensor.from_rank_offsets("w", tensor, replica_id=0), "iteration": value, "lr": 0.5 * value}


def in_job(act: Callable[[], Any]) -> Any:
    """Do it as a job of one rank does, which has no thread before and after."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return act()
    finally:
        dist.destroy_process_group()


def save(directory: str, value: int, *, is_async: bool = False) -> None:
    """Now, or as ``--async-save`` and ``--ckpt-fully-parallel-save`` do."""
    path = f"{directory}/c"
    os.makedirs(path, exist_ok=True)

    def act() -> None:
        if not is_async:
            dist_checkpointing.save(state(value), path, RobustSaveStrategy(), **MANIFEST)
            return
        strategy = FullyParallelSaveStrategyWrapper(RobustSaveStrategy(), dist.group.WORLD, True)
        options = queue_option() | MANIFEST
        dist_checkpointing.save(state(value), path, strategy, async_sharded_save=True, **options).execute_sync()

    in_job(act)


def iteration(directory: str) -> int | None:
    """The iteration whose weights and learning rate are there; ``None`` if Megatron finds no checkpoint."""
    path = f"{directory}/c"
    try:
        loaded = in_job(lambda: dist_checkpointing.load(state(-1), path, RobustLoadStrategy(), **MANIFEST))
    except (CheckpointingException, RobustCheckpointError) as error:
        if "is not a distributed checkpoint" in str(error) or "does not exist" in str(error):
            return None
        raise
    value = int(loaded["w"][0])
    assert torch.equal(loaded["w"], torch.arange(3000.0) + value)
    assert (loaded["iteration"], loaded["lr"]) == (value, 0.5 * value), f"a mixture: w of {value}, {loaded}"
    save_id = FileSystemReader(path).read_metadata().storage_meta.save_id
    if os.path.exists(f"{path}/common.pt") and not os.path.exists(f"{path}/common.pt.{mark_of(save_id)}"):
        assert torch.load(f"{path}/common.pt")["iteration"] == value, "stock would load a mixture"
    return value


AGAIN = Scenario(
    "again",
    lambda directory: save(directory, 1),
    lambda directory: save(directory, 2),
    iteration,
    lambda directory: save(directory, 9),
    (1, 2),
)

SCENARIOS = (
    AGAIN,
    replace(AGAIN, name="again-async", act=lambda directory: save(directory, 2, is_async=True)),
    replace(AGAIN, name="first", prepare=os.makedirs, may_leave=(None, 2)),
)


@pytest.fixture(scope="module")
def warm() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as process:
        yield process


def left_by(test: Callable[..., list[int | None]], name: str, *args: Any) -> list[int | None]:
    """In a process of one thread, which may fork, and of which robust_dcp has taken over."""
    (scenario,) = (each for each in SCENARIOS if each.name == name)
    with chosen():
        return test(scenario, *args)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_kill_before_any_call_leaves_one_save(
    scenario: Scenario, memory_path: Path, warm: ProcessPoolExecutor
) -> None:
    left = warm.submit(left_by, left_by_kills, scenario.name, str(memory_path), 4).result()
    assert left == sorted(left, key=scenario.may_leave.index), "once the new one is there it stays"
    assert left[0] == scenario.may_leave[0]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_power_cut_after_any_call_leaves_one_save(
    scenario: Scenario, memory_path: Path, warm: ProcessPoolExecutor
) -> None:
    left = warm.submit(left_by, left_by_power_cuts, scenario.name, str(memory_path), 20).result()
    assert scenario.may_leave[0] in left
