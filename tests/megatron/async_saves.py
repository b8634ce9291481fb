"""What tests of asynchronous saves share: where they are written, and what the ranks of a job do with a queue."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from robust_dcp.megatron import dcp_formats
from robust_dcp.megatron import save as torch_dist_save
from robust_dcp.storage import RobustWriter
from robust_dcp.storage.files.disk import Disk
from tests.harness.disks import GatedDisk
from tests.megatron.torch_dist import chosen, cut, queue_option, replicated_object, save
from tests.megatron.training_job import children

__all__ = ["expected", "loaded", "save_beside_training", "state", "written_on"]

_ROWS = 1000


@contextmanager
def written_on(disk: Disk) -> Iterator[None]:
    """Saves that this rank asks for within the block are written on ``disk``, also when it is over."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (torch_dist_save, dcp_formats):
            patch.setattr(module, "RobustWriter", functools.partial(RobustWriter, disk=disk))
        yield


def state(value: float) -> dict[str, Any]:
    return {
        "weight": cut("weight", torch.full((_ROWS,), value + dist.get_rank())),
        "object": replicated_object("object", {"value": value}),
        "iteration": value,
    }


def loaded(directory: Path) -> tuple[float, float, float, float]:
    """What stock Megatron loads: the first and the last element of this rank's rows, the object, and the iteration."""
    found = dist_checkpointing.load(state(-2.0), str(directory))
    weight = found["weight"]
    return weight.min().item(), weight.max().item(), found["object"]["value"], found["iteration"]


def save_beside_training(directory: Path, queue: Any, request_class: Any = None) -> dict[str, Any]:
    """Save by ``queue`` while rank 1 cannot write, change all tensors, and let rank 1 write.

    Args:
        directory: an empty one, or none yet.
        queue: an ``AsyncCallsQueue``.
        request_class: its ``AsyncRequest``, where that is not the one of this Megatron.

    Returns:
        What the rank saw on the way.
    """
    tracker, disk = directory / "latest_checkpointed_iteration.txt", GatedDisk()
    before, held, seen = children(), state(1.0), {}
    if dist.get_rank() == 0:
        disk.gate.set()
    with chosen(), written_on(disk):
        request = save(held, directory / "1", async_sharded_save=True, **queue_option())
        if request_class is not None:
            request = request_class(**request._asdict())

        def move_tracker() -> None:
            seen["committed"] = [(directory / "1" / name).exists() for name in (".metadata", "metadata.json")]
            if dist.get_rank() == 0:
                tracker.write_text("1")

        request.add_finalize_fn(move_tracker)
        queue.schedule_async_request(request)
    held["weight"].data.fill_(-1.0)
    held["object"].data["value"] = -1.0
    seen["while it is written"] = [
        (queue.maybe_finalize_async_calls(blocking=False), queue.get_num_unfinalized_calls()) for _ in range(3)
    ]
    seen["early"] = tracker.exists(), (directory / "1" / ".metadata").exists()
    seen["processes"] = len(children() - before)
    dist.barrier()
    disk.gate.set()
    seen["finalized"] = queue.maybe_finalize_async_calls(blocking=True), queue.get_num_unfinalized_calls()
    dist.barrier()
    seen["tracker"] = tracker.read_text()
    seen["loaded"] = loaded(directory / "1")
    return seen


def expected(rank: int) -> dict[str, Any]:
    """What :func:`save_beside_training` returns."""
    return {
        "while it is written": [([], 1)] * 3,
        "early": (False, False),
        "processes": 0,
        "committed": [True, True],
        "finalized": ([0], 0),
        "tracker": "1",
        "loaded": (1.0 + rank, 1.0 + rank, 1.0, 1.0),
    }
