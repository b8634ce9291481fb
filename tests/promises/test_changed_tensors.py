"""A tensor that somebody changes while it is saved: the save fails on all ranks, and the checkpoint before stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import robust_dcp
from robust_dcp import PlanConflict, RobustPlanner, RobustWriter
from tests.faults.disk import FaultDisk
from tests.harness.ranks import run_ranks, values

NUMEL = 2 << 20  # 8 MiB

SAVERS: dict[str, Callable[[dict[str, Any], str], object]] = {
    "ours": lambda state, path: robust_dcp.save(state, checkpoint_id=path),
    "stock with our plugins": lambda state, path: dcp.save(
        state, storage_writer=RobustWriter(path), planner=RobustPlanner()
    ),
}


@contextmanager
def changed_all_the_time(tensor: torch.Tensor) -> Iterator[None]:
    """A side thread adds to a tensor, whatever training does."""
    is_over = threading.Event()

    def change() -> None:
        while not is_over.is_set():
            tensor.add_(1)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def tensor_of(kind: str) -> torch.Tensor:
    local = torch.zeros(NUMEL)
    if kind == "transposed":
        return local.view(2, -1).t()
    if kind == "parameter":
        return torch.nn.Parameter(local, requires_grad=False)
    if kind == "DTensor":
        return DTensor.from_local(local, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)], run_check=False)
    return local


def save_while_it_changes(path: str, kind: str, saver: str) -> tuple[str, bool]:
    rank = dist.get_rank()
    state = {f"rank {rank}": tensor_of(kind) if kind != "DTensor" else torch.zeros(3), "fine": torch.ones(4)}
    changed = state[f"rank {rank}"]
    if kind == "DTensor":
        changed = state["sharded"] = tensor_of(kind)
    SAVERS[saver](state, path)
    told = "saved"
    with changed_all_the_time(changed if rank == 1 else torch.zeros(2)):
        try:
            SAVERS[saver](state, path)
        except (PlanConflict, CheckpointException) as error:  # stock wraps the errors of ranks into its own
            told = str(error)
    dist.barrier()
    loaded = {key: torch.ones_like(value) if torch.is_tensor(value) else value for key, value in state.items()}
    robust_dcp.load(loaded, checkpoint_id=path)
    same = all(not value.any() for key, value in loaded.items() if key != "fine")
    return told, same and bool(loaded["fine"].eq(1).all())


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("kind", ["plain", "transposed", "parameter", "DTensor"])
def test_a_side_thread_that_changes_a_tensor_fails_the_save_on_all_ranks(kind: str, saver: str, tmp_path: Path) -> None:
    for told, before_stays in values(run_ranks(2, save_while_it_changes, str(tmp_path), kind, saver)):
        assert ("'sharded'" if kind == "DTensor" else "'rank 1'") in told and "changed while it was saved" in told
        assert before_stays


def test_a_change_between_two_writes_fails_the_save(tmp_path: Path) -> None:
    """As by a hook that somebody calls between two writes."""
    tensor = torch.zeros(NUMEL)

    def save() -> None:
        robust_dcp.save({"w": tensor}, checkpoint_id=tmp_path)

    save()
    changing = FaultDisk(tmp_path, on={"write:*.distcp": lambda call: tensor.add_(1)})
    with changing, pytest.raises(PlanConflict, match="'w' was changed while it was saved"):
        save()
    found = {"w": torch.ones(NUMEL)}
    robust_dcp.load(found, checkpoint_id=tmp_path)
    assert not found["w"].any() and tensor.any()
    save()
    robust_dcp.load(found, checkpoint_id=tmp_path)
    assert torch.equal(found["w"], tensor)


def test_a_tensor_without_a_count_of_its_changes_is_saved(tmp_path: Path) -> None:
    with torch.inference_mode():
        state = {"large": torch.ones(NUMEL), "small": torch.ones(4)}
    robust_dcp.save(state, checkpoint_id=tmp_path)
    found = {"large": torch.zeros(NUMEL), "small": torch.zeros(4)}
    robust_dcp.load(found, checkpoint_id=tmp_path)
    assert found["large"].all() and found["small"].all()
