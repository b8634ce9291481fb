"""Ranks on pretended nodes that do not share the checkpoint's directory. Imported by the ranks of the tests."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import robust_dcp
from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.files.paths import SAVING_PREFIX
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.harness.faults import kill_in
from tests.harness.file_calls import FileCalls
from tests.harness.nodes import become_node

ROWS = 24


def start(path: str, nodes: str, placing: Sequence[str]) -> int:
    """Become the node that ``placing`` gives for this rank, and start the process group. Returns the rank."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(list(placing[:rank]).count(placing[rank]))
    os.environ["LOCAL_WORLD_SIZE"] = str(list(placing).count(placing[rank]))
    become_node(f"host-{placing[rank]}", path, Path(nodes, placing[rank]))
    dist.init_process_group("gloo")
    return rank


def values_of(step: int, *, more: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    state = {
        "weight": torch.randn(ROWS, 16, generator=generator),
        "embedding": torch.randn(ROWS, 3, generator=generator).to(torch.bfloat16),
        "shared": torch.arange(100) * step,
    }
    return {**state, **{f"more.{number}": torch.full((ROWS,), float(step + number)) for number in range(more)}}


def sharded(step: int, *, more: int = 0, blank: bool = False) -> dict[str, Any]:
    """The state dict of a step: some tensors are sharded over all ranks, one is replicated, and one is an object."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for name, value in values_of(step, more=more).items():
        full = torch.zeros_like(value) if blank else value
        state[name] = distribute_tensor(full, mesh, [Replicate() if name == "shared" else Shard(0)])
    return {**state, "step": -1 if blank else step, "text": "" if blank else f"step {step} " * 10}


def check(state: dict[str, Any], step: int, *, more: int = 0) -> None:
    for name, value in values_of(step, more=more).items():
        got = state[name].full_tensor()
        assert got.dtype == value.dtype and torch.equal(got.view(torch.uint8), value.view(torch.uint8)), name
    assert (state["step"], state["text"]) == (step, f"step {step} " * 10)


def save(path: str, nodes: str, placing: Sequence[str], steps: Sequence[int], more: Sequence[int] = ()) -> list[str]:
    """Save each of ``steps`` into the same checkpoint. Returns what became of the plan each time."""
    start(path, nodes, placing)
    plans: list[str] = []
    for number, step in enumerate(steps):
        n_more = more[number] if more else 0
        plans.append(robust_dcp.save(sharded(step, more=n_more), checkpoint_id=f"{path}/ckpt").plan)
    return plans


def save_many_files(path: str, nodes: str, placing: Sequence[str]) -> None:
    start(path, nodes, placing)
    writer = robust_dcp.RobustWriter(f"{path}/ckpt", files_per_rank=40)
    robust_dcp.save(sharded(1, more=80), storage_writer=writer)


def load(path: str, nodes: str, placing: Sequence[str], step: int, more: int = 0) -> tuple[int, int]:
    """Load and compare. Returns the bytes that came from other ranks, and the time that they were counted."""
    start(path, nodes, placing)
    state = sharded(step, more=more, blank=True)
    report = robust_dcp.load(state, checkpoint_id=f"{path}/ckpt")
    check(state, step, more=more)
    return report.shared_nbytes, report.nbytes


def save_killed(
    path: str, nodes: str, placing: Sequence[str], killed_rank: int, killed_before: int | None
) -> tuple[int, list[str]]:
    """Save step 1, and then step 2, in which one rank is killed before one of its calls to the file system.

    Returns the number of calls, and the names of the errors of the second save."""
    rank = start(path, nodes, placing)
    robust_dcp.save(sharded(1), checkpoint_id=f"{path}/ckpt")
    calls = FileCalls(f"{path}/ckpt", killed_before if rank == killed_rank else None)
    try:
        robust_dcp.save(sharded(2), checkpoint_id=f"{path}/ckpt", timeout_seconds=20)
    except robust_dcp.errors.RobustCheckpointError as error:
        return calls.count, [type(error).__name__]
    return calls.count, []


class KillingDisk(PosixDisk):
    """Kills its process at an instant of the commit."""

    def __init__(self, instant: str) -> None:
        super().__init__()
        self.instant = instant

    def rename(self, source: str, target: str) -> None:
        is_commit = target.endswith("/.metadata")
        if is_commit and self.instant == "before its commit":
            os.kill(os.getpid(), signal.SIGKILL)
        super().rename(source, target)
        if is_commit and self.instant == "after its commit":
            os.kill(os.getpid(), signal.SIGKILL)

    def unlink(self, path: str) -> None:
        if self.instant == "while it removes the old files":
            os.kill(os.getpid(), signal.SIGKILL)
        super().unlink(path)


def save_killed_at(path: str, nodes: str, placing: Sequence[str], killed_rank: int, instant: str) -> None:
    rank = start(path, nodes, placing)
    robust_dcp.save(sharded(1), checkpoint_id=f"{path}/ckpt")
    disk = KillingDisk(instant) if rank == killed_rank else PosixDisk()
    robust_dcp.save(sharded(2), storage_writer=robust_dcp.RobustWriter(f"{path}/ckpt", disk=disk), timeout_seconds=20)


def load_either(path: str, nodes: str, placing: Sequence[str], next_step: int) -> int:
    """Load what a killed save has left, then save and load another step. Returns which step was there."""
    start(path, nodes, placing)
    state = sharded(1, blank=True)
    robust_dcp.load(state, checkpoint_id=f"{path}/ckpt")
    found: int = state["step"]
    check(state, found)
    robust_dcp.save(sharded(next_step), checkpoint_id=f"{path}/ckpt")
    state = sharded(next_step, blank=True)
    robust_dcp.load(state, checkpoint_id=f"{path}/ckpt")
    check(state, next_step)
    return found


class LateDisk(PosixDisk):
    """A shared directory in which other machines see new journals late, as an NFS client with an old cache does."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
        if SAVING_PREFIX in path and self.looks:
            self.looks -= 1
            raise StorageError(f"open {path}", path=path, operation="open", errno=errno.ENOENT)
        return super().open_read(path, direct=direct)


def save_late(path: str) -> tuple[bool, int]:
    """Save into a shared directory that rank 1 sees late. Returns whether it took it for another directory, and how
    many looks it did not take."""
    disk = LateDisk(3 if dist.get_rank() else 0)
    report = robust_dcp.save(sharded(1), storage_writer=robust_dcp.RobustWriter(path, disk=disk))
    state = sharded(1, blank=True)
    robust_dcp.load(state, checkpoint_id=path)
    check(state, 1)
    return report.leads_directory, disk.looks


def save_async(path: str, nodes: str, placing: Sequence[str], executor: Any) -> None:
    start(path, nodes, placing)
    for step in (1, 2):
        state = sharded(step)
        saving: Any = robust_dcp.async_save(state, checkpoint_id=f"{path}/ckpt", executor=executor)
        saving.result()
    state = sharded(2, blank=True)
    robust_dcp.load(state, checkpoint_id=f"{path}/ckpt")
    check(state, 2)


def stock_save(path: str, nodes: str, placing: Sequence[str], planner: str) -> None:
    start(path, nodes, placing)
    dcp.save(
        sharded(1),
        storage_writer=robust_dcp.RobustWriter(f"{path}/ckpt"),
        planner=robust_dcp.RobustPlanner() if planner == "ours" else None,
    )


def save_safetensors(path: str, nodes: str, placing: Sequence[str]) -> None:
    start(path, nodes, placing)
    state = {name: value for name, value in sharded(1).items() if isinstance(value, torch.Tensor)}
    robust_dcp.save(state, storage_writer=robust_dcp.RobustWriter(f"{path}/ckpt", layout="safetensors"))


def manage(path: str, nodes: str, placing: Sequence[str], is_async: bool) -> list[int]:
    """Save four steps, and keep the last two. Returns the steps that this rank's node has."""
    start(path, nodes, placing)
    manager = robust_dcp.CheckpointManager(f"{path}/run", keep_last=1, keep_best="loss")
    for step in (1, 2, 3, 4):
        if is_async:
            saving: Any = manager.async_save(step, sharded(step), metrics={"loss": abs(step - 2)})
            is_tidied_up = threading.Event()  # the manager's own callback comes before this one
            saving.add_done_callback(lambda _, event=is_tidied_up: event.set())
            assert is_tidied_up.wait(30) and saving.result().leads_directory == (placing[dist.get_rank()] == "b")
        else:
            manager.save(step, sharded(step), metrics={"loss": abs(step - 2)})
    dist.barrier()
    return [each.step for each in manager.checkpoints()]


def go_on(path: str, nodes: str, placing: Sequence[str]) -> int:
    start(path, nodes, placing)
    state = sharded(4, blank=True)
    loaded = robust_dcp.CheckpointManager(f"{path}/run").load_latest(state)
    assert loaded is not None
    check(state, loaded.checkpoint.step)
    return loaded.checkpoint.step


def load_alone(path: str, nodes: str, placing: Sequence[str]) -> None:
    start(path, nodes, placing)
    robust_dcp.load(sharded(1, blank=True), checkpoint_id=f"{path}/ckpt")


def load_killed(path: str, nodes: str, placing: Sequence[str]) -> None:
    start(path, nodes, placing)
    with kill_in("share", rank=1):
        robust_dcp.load(sharded(1, blank=True), checkpoint_id=f"{path}/ckpt", timeout_seconds=20)


def save_failing(path: str, nodes: str, placing: Sequence[str], operation: str) -> None:
    """Save step 1 well, and step 2 with a disk that fails on rank 2."""
    rank = start(path, nodes, placing)
    robust_dcp.save(sharded(1), checkpoint_id=f"{path}/ckpt")
    disk = FailingDisk(operation) if rank == 2 else PosixDisk()
    robust_dcp.save(sharded(2), storage_writer=robust_dcp.RobustWriter(f"{path}/ckpt", disk=disk))


class FailingDisk(PosixDisk):
    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation = operation

    def rename(self, source: str, target: str) -> None:
        if self.operation == "rename" and target.endswith(".metadata"):
            raise StorageError("no rename here", path=target, operation="rename", errno=errno.EIO)
        super().rename(source, target)

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        if self.operation in path:
            raise StorageError("no file here", path=path, operation="create", errno=errno.ENOSPC)
        return super().open_new(path, direct=direct)
