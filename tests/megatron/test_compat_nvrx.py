"""Asynchronous saves in the queue of ``nvidia_resiliency_ext``, which Megatron takes from 0.17 on unless it is told
otherwise. ``make test-compat`` puts that package on ``PYTHONPATH``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

pytest.importorskip("megatron.core")

from demo import megatron_cpu
from tests.harness.disks import GatedDisk
from tests.harness.ranks import run_ranks, values
from tests.megatron.async_saves import expected, save_beside_training, written_on
from tests.megatron.torch_dist import chosen
from tests.megatron.training_checkpointing import named

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module", autouse=True)
def nvidia_resiliency_ext() -> None:
    assert importlib.util.find_spec("nvidia_resiliency_ext") is not None, "run make test-compat"


def _save_in_its_queues(directory: Path) -> list[dict[str, Any]]:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest

    megatron_cpu.install()
    seen = []
    for is_persistent in (False, True):
        queue = AsyncCallsQueue(persistent=is_persistent)
        seen.append(save_beside_training(directory / str(is_persistent), queue, AsyncRequest))
        queue.close()
    return seen


def test_training_goes_on_while_shards_are_written_and_the_tracker_moves_after_the_commit(tmp_path: Path) -> None:
    found = values(run_ranks(2, _save_in_its_queues, tmp_path))
    assert found == [[expected(rank)] * 2 for rank in range(2)]


def _save_as_bridge_does(directory: Path) -> tuple[bool, bool, list[float]]:
    name, path, disk = "megatron.bridge.training.checkpointing", directory / "saved", GatedDisk()
    bridge = named(name, str(Path(__file__).with_name("bridge_checkpointing.py")))
    sys.modules[name] = bridge
    weight = torch.ones(3)
    try:
        with chosen(), written_on(disk):
            request = bridge.save_async({"weight": weight}, str(path))
    finally:
        del sys.modules[name]
    weight.fill_(-1)
    is_early = (path / ".metadata").exists()
    disk.gate.set()
    request.execute_sync()
    loaded = {"weight": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=path)
    return is_early, (path / ".metadata").exists(), loaded["weight"].tolist()


def test_a_save_of_fsdp_dtensor_by_megatron_bridge_is_written_beside_training(tmp_path: Path) -> None:
    assert values(run_ranks(2, _save_as_bridge_does, tmp_path)) == [(False, True, [1.0] * 3)] * 2
