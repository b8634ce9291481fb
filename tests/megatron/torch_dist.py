"""What tests of ``torch_dist`` share: robust_dcp switched on in this process, and small shards."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from robust_dcp import RobustCheckpointError
from robust_dcp.megatron import install, uninstall

__all__ = [
    "Scenarios",
    "chosen",
    "cut",
    "failures_of",
    "made",
    "per_rank_object",
    "queue_option",
    "replicated",
    "replicated_object",
    "save",
    "warnings_of",
]


class Scenarios:
    """What the ranks do, by name; all of them do it in one go, since importing Megatron takes each rank seconds."""

    def __init__(self) -> None:
        self._functions: list[Callable[[Path], Any]] = []

    def add(self, function: Callable[[Path], Any]) -> Callable[[Path], Any]:
        self._functions.append(function)
        return function

    def run(self, directory: Path) -> dict[str, Any]:
        found = {}
        for function in self._functions:
            made(directory / function.__name__)
            found[function.__name__] = function(directory / function.__name__)
            dist.barrier()
        return found


@contextmanager
def chosen(*, timeout_seconds: float = 30, switch: str = "1", **environment: str) -> Iterator[None]:
    """robust_dcp is installed within this block, and is the planner of Megatron; with ``switch="0"`` Megatron is."""
    more = {
        "ROBUST_DCP": switch,
        "ROBUST_DCP_EXCHANGE_TIMEOUT_SECONDS": str(timeout_seconds),
        **{f"ROBUST_DCP_{name.upper()}": value for name, value in environment.items()},
    }
    before = dict(os.environ)
    install()
    os.environ.update(more)
    try:
        yield
    finally:
        uninstall()
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """The messages that a logger gets within the block, warnings and worse."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger(name).addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger(name).removeHandler(handler)


def made(directory: Path) -> Path:
    """The directory, made by rank 0 before any rank goes on."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()
    return directory


def save(state_dict: dict[str, Any], directory: Path, strategy: Any = None, **options: Any) -> Any:
    """``dist_checkpointing.save``, whichever that is now, into a new directory."""
    return dist_checkpointing.save(state_dict, str(made(directory)), strategy, **options)


def queue_option() -> dict[str, str]:
    """The argument of ``dist_checkpointing.save`` that says whose queue an asynchronous save goes into: Megatron's.
    From 0.17 on there is a choice, and the other queue is of a package of its own."""
    has_queues = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": "mcore"} if has_queues else {}


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
