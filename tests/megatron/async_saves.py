"""What tests of asynchronous saves share: what is saved and loaded, and what the ranks of a job do with a queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from tests.faults.disk import FaultDisk, Gate
from tests.megatron.torch_dist import chosen, cut, queue_option, replicated_object, save
from tests.megatron.training_job import children

__all__ = ["as_saved", "loaded", "save_beside_training", "state"]

_ROWS = 1000


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


def save_beside_training(directory: Path, queue: Any, request_class: Any = None) -> None:
    """Save by ``queue`` while rank 1 cannot write, change all tensors, let rank 1 write, and assert that what was held
    first is saved, and that nothing was named before it was committed.

    Args:
        directory: an empty one, or none yet.
        queue: an ``AsyncCallsQueue``.
        request_class: its ``AsyncRequest``, where that is not Megatron's. From 0.17 on Megatron makes such a request.
    """
    rank, tracker, gate = dist.get_rank(), directory / "latest_checkpointed_iteration.txt", Gate()
    before, held = children(), state(1.0)
    if rank == 0:
        gate.opened.set()
    disk = FaultDisk(directory, on={"create:*.distcp": gate}).install()
    with chosen():
        option = queue_option("mcore" if request_class is None else "nvrx")
        request = save(held, directory / "1", async_sharded_save=True, **option)
        if request_class is not None and not option:
            request = request_class(**request._asdict())

        def move_tracker() -> None:
            assert all((directory / "1" / name).exists() for name in (".metadata", "metadata.json"))
            if rank == 0:
                tracker.write_text("1")

        request.add_finalize_fn(move_tracker)
        queue.schedule_async_request(request)
    held["weight"].data.fill_(-1.0)
    held["object"].data["value"] = -1.0
    for _ in range(3):
        assert queue.maybe_finalize_async_calls(blocking=False) == [] and queue.get_num_unfinalized_calls() == 1
    assert not tracker.exists() and not (directory / "1" / ".metadata").exists()
    assert children() == before
    dist.barrier()
    gate.opened.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0] and queue.get_num_unfinalized_calls() == 0
    dist.barrier()
    assert tracker.read_text() == "1"
    assert loaded(directory / "1") == as_saved(1.0)
    disk.__exit__()


def as_saved(value: float) -> tuple[float, float, float, float]:
    """What :func:`loaded` gives of :func:`state`."""
    return value + dist.get_rank(), value + dist.get_rank(), value, value
