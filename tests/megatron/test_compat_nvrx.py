"""Asynchronous saves in the queue of ``nvidia_resiliency_ext``, which Megatron takes from 0.17 on unless it is told
otherwise. ``make test-compat`` puts that package on ``PYTHONPATH``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

pytest.importorskip("megatron.core")

from tests.faults.disk import FaultDisk, Gate
from tests.megatron.async_saves import save_beside_training
from tests.megatron.torch_dist import Scenarios, chosen
from tests.megatron.training_checkpointing import named

pytestmark = pytest.mark.compat

SCENARIOS = Scenarios()


@pytest.fixture(scope="module", autouse=True)
def nvidia_resiliency_ext() -> None:
    assert importlib.util.find_spec("nvidia_resiliency_ext") is not None, "run make test-compat"


@SCENARIOS.add
def training_goes_on_while_shards_are_written_and_the_tracker_moves_after_the_commit(directory: Path) -> None:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest

    for is_persistent in (False, True):
        queue = AsyncCallsQueue(persistent=is_persistent)
        save_beside_training(directory / str(is_persistent), queue, AsyncRequest)
        queue.close()


@SCENARIOS.add
def a_save_of_fsdp_dtensor_by_megatron_bridge_is_written_beside_training(directory: Path) -> None:
    name, path, gate = "megatron.bridge.training.checkpointing", directory / "saved", Gate()
    bridge = named(name, str(Path(__file__).with_name("bridge_checkpointing.py")))
    sys.modules[name] = bridge
    weight = torch.ones(3)
    with FaultDisk(path, on={"create:*.distcp": gate}):
        try:
            with chosen():
                request = bridge.save_async({"weight": weight}, str(path))
        finally:
            del sys.modules[name]
        weight.fill_(-1)
        assert not (path / ".metadata").exists()
        gate.opened.set()
        request.execute_sync()
    loaded = {"weight": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=path)
    assert loaded["weight"].tolist() == [1.0] * 3


test_on_two_ranks = SCENARIOS.test()
