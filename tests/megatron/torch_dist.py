"""What tests of ``torch_dist`` share: robust_dcp switched on in this process, and small shards."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from demo import megatron_cpu
from robust_dcp import RobustCheckpointError
from robust_dcp.megatron import install, uninstall
from tests.harness.ranks import run_ranks, values

__all__ = [
    "Scenarios",
    "chosen",
    "cut",
    "failures_of",
    "made",
    "per_rank_object",
    "plain",
    "queue_option",
    "replicated",
    "replicated_object",
    "save",
    "stock_strategy",
]


class Scenarios:
    """What ranks do and assert, by the names of functions. They do all of it in one go, since importing Megatron takes
    each rank seconds.

        SCENARIOS = Scenarios()

        @SCENARIOS.add
        def what_is_saved_can_be_loaded(directory: Path) -> None:
            ...  # on each rank, with an empty directory

        test_on_all_ranks = SCENARIOS.test()
    """

    def __init__(self, n_ranks: int = 2) -> None:
        self.n_ranks = n_ranks
        self._functions: list[Callable[[Path], None]] = []

    def add(self, function: Callable[[Path], None]) -> Callable[[Path], None]:
        self._functions.append(function)
        return function

    def run(self, directory: Path) -> dict[str, str]:
        """What has failed on this rank, by scenario."""
        megatron_cpu.install()
        failed = {}
        for function in self._functions:
            try:
                function(made(directory / function.__name__))
            except BaseException:  # of pytest, too
                failed[function.__name__] = traceback.format_exc()
            dist.barrier()
        return failed

    def test(self) -> Callable[..., None]:
        """A test for each scenario. The first one runs them all."""
        of_ranks: list[dict[str, str]] = []

        @pytest.mark.parametrize("scenario", [function.__name__ for function in self._functions])
        def test(scenario: str, tmp_path_factory: pytest.TempPathFactory) -> None:
            if not of_ranks:
                of_ranks.extend([{}] * self.n_ranks)
                directory = tmp_path_factory.mktemp("scenarios")
                outcomes = run_ranks(self.n_ranks, self.run, directory, group_timeout_seconds=40)
                of_ranks[:] = values(outcomes)
            told = [f"rank {rank}: {each[scenario]}" for rank, each in enumerate(of_ranks) if scenario in each]
            assert not told, "\n".join(told)

        return test


@contextmanager
def chosen(*, timeout_seconds: float = 30, switch: str = "1", **environment: str) -> Iterator[None]:
    """robust_dcp is installed within this block, and is the planner of Megatron; with ``switch="0"`` Megatron is."""
    more = {
        "ROBUST_DCP": switch,
        "ROBUST_DCP_EXCHANGE_TIMEOUT_SECONDS": str(timeout_seconds),
        **{f"ROBUST_DCP_{name.upper()}": value for name, value in environment.items()},
    }
    install()
    try:
        with mock.patch.dict(os.environ, more):
            yield
    finally:
        uninstall()


def made(directory: Path) -> Path:
    """The directory, made by rank 0 before any rank goes on."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return directory


def save(state_dict: dict[str, Any], directory: Path, strategy: Any = None, **options: Any) -> Any:
    """``dist_checkpointing.save``, whichever that is now, into a new directory."""
    return dist_checkpointing.save(state_dict, str(made(directory)), strategy, **options)


def stock_strategy(**options: Any) -> TorchDistSaveShardedStrategy:
    """Megatron's own ``torch_dist`` strategy, but for the process that it starts for a queue: here that is forked.

    Stock starts it afresh, which takes seconds on each rank. The demo runs stock with what it starts.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    return TorchDistSaveShardedStrategy("torch_dist", 1, **options)


def plain(value: Any) -> Any:
    """A state dict as values that can be compared: of a tensor dtype and numbers, of a DTensor those of this rank."""

    def compared(leaf: Any) -> Any:
        leaf = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        return (str(leaf.dtype), leaf.tolist()) if isinstance(leaf, torch.Tensor) else leaf

    return _pytree.tree_map(compared, value)


def queue_option(owner: str = "mcore") -> dict[str, str]:
    """The argument of ``dist_checkpointing.save`` that says whose queue an asynchronous save goes into: Megatron's.
    From 0.17 on there is a choice, and the other queue (``"nvrx"``) is of a package of its own."""
    has_queues = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": owner} if has_queues else {}


def cut(key: str, data: torch.Tensor, **options: Any) -> ShardedTensor:
    """One row block of a tensor for each rank."""
    return ShardedTensor.from_rank_offsets(key, data, (0, dist.get_rank(), dist.get_world_size()), **options)


def replicated(key: str, data: torch.Tensor, replica_id: int | None = None, **options: Any) -> ShardedTensor:
    """The same tensor on each rank."""
    replica_id = dist.get_rank() if replica_id is None else replica_id
    return ShardedTensor.from_rank_offsets(key, data, replica_id=replica_id, **options)


def per_rank_object(key: str, value: Any) -> ShardedObject:
    """An object with a part for each rank."""
    return ShardedObject(key, value, (dist.get_world_size(),), (dist.get_rank(),))


def replicated_object(key: str, value: Any) -> ShardedObject:
    """The same object on each rank."""
    return ShardedObject(key, value, (1,), (0,), replica_id=dist.get_rank())


def failures_of(call: Callable[[], Any]) -> tuple[RobustCheckpointError, list[tuple[int, str]]]:
    """The error that ``call`` raises on this rank, and the ranks that failed, each with its message."""
    with pytest.raises(RobustCheckpointError) as caught:
        call()
    return caught.value, [(failure.rank, failure.message) for failure in caught.value.rank_failures]
