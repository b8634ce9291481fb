"""A load fills its targets in place: for one process, for FSDP2 and for Megatron it takes little memory besides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import robust_dcp
from tests.harness.ranks import run_ranks, values

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

from tests.megatron.torch_dist import chosen, cut, save

MIB = 1 << 20
TARGETS_NBYTES, BUFFER_NBYTES = 96 * MIB, 16 * MIB
N_TENSORS = 6


def peak_nbytes(load: Callable[[], object]) -> int:
    """By how much the memory of this process grows at most while it loads."""

    def status(name: str) -> int:
        return 1024 * int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    load()
    return status("VmHWM") - before


def loads(root: Path) -> dict[str, int]:
    """The peak of each load. All targets are touched before."""
    rank, peaks = dist.get_rank(), {}
    n_elements = TARGETS_NBYTES // N_TENSORS // 4

    alone = {f"w{number}": torch.ones(n_elements) for number in range(N_TENSORS)}
    robust_dcp.save(alone, checkpoint_id=root / f"alone_{rank}", no_dist=True)
    reader = robust_dcp.RobustReader(root / f"alone_{rank}", buffer_bytes=BUFFER_NBYTES)
    peaks["one process"] = peak_nbytes(lambda: robust_dcp.load(alone, storage_reader=reader, no_dist=True))

    layers = [torch.nn.Linear(1024, 2048, bias=False) for _ in range(8)]  # with AdamW's moments 96 MiB on each rank
    model = fully_shard(torch.nn.Sequential(*layers), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state_dict = {"model": model, "optimizer": optimizer}
    robust_dcp.save(state_dict, checkpoint_id=root / "fsdp2")
    reader = robust_dcp.RobustReader(root / "fsdp2", buffer_bytes=BUFFER_NBYTES)
    peaks["FSDP2"] = peak_nbytes(lambda: robust_dcp.load(state_dict, storage_reader=reader))

    target = {f"w{number}": cut(f"w{number}", torch.ones(n_elements)) for number in range(N_TENSORS)}
    with chosen(timeout_seconds=60):
        save(target, root / "megatron", TorchDistSaveShardedStrategy("torch_dist", 1))
        strategy, path = TorchDistLoadShardedStrategy(), str(root / "megatron")
        peaks["Megatron"] = peak_nbytes(lambda: dist_checkpointing.load(target, path, strategy))
    return peaks


def test_a_load_takes_its_targets_and_a_bounded_buffer(tmp_path: Path) -> None:
    threads, block_nbytes = robust_dcp.ReadOptions().fitted()
    for peaks in values(run_ranks(2, loads, tmp_path, timeout_seconds=150)):
        assert peaks.pop("Megatron") < threads * block_nbytes + 24 * MIB < TARGETS_NBYTES  # by the default options
        assert max(peaks.values()) < BUFFER_NBYTES + 16 * MIB, peaks
