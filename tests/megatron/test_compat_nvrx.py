"""Asynchronous saves in the queue of ``nvidia_resiliency_ext``, which Megatron takes from 0.17 on unless it is told
otherwise. ``make test-compat`` puts that package on ``PYTHONPATH``: 0.4.1 with Megatron 0.16.1, 0.6.0 with 0.19.2."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed.checkpoint as dcp

pytest.importorskip("megatron.core")

from tests.faults.disk import FaultDisk, Gate
from tests.megatron.async_saves import as_saved, loaded, save_beside_training, state
from tests.megatron.torch_dist import Scenarios, chosen, queue_option, save

pytestmark = pytest.mark.compat

SCENARIOS = Scenarios()
_BRIDGE = """
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import save_state_dict_async_plan
from torch.distributed.checkpoint import DefaultSavePlanner

def save_async(state_dict, checkpoint_name):
    writer = FileSystemWriterAsync(checkpoint_name, thread_count=2, use_msc=False)
    planned = save_state_dict_async_plan(state_dict, writer, None, 0, planner=DefaultSavePlanner(), enable_cache=False)
    return get_save_and_finalize_callbacks(writer, planned)

def get_save_and_finalize_callbacks(writer, save_state_dict_ret):
    raise AssertionError("a save by robust_dcp was expected")
"""
"""The names that ``megatron/bridge/training/checkpointing.py`` of Megatron-Bridge 0.7 binds to save ``fsdp_dtensor``
asynchronously, and the calls that it makes."""


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
def a_queue_that_is_closed_finalizes_every_save_that_it_holds_unless_it_aborts(directory: Path) -> None:
    """Of 0.5 and newer a persistent queue does so only if it has started a process."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest

    finalized: list[str] = []
    with chosen():
        can_abort = "abort" in inspect.signature(AsyncCallsQueue.close).parameters  # 0.4.1 cannot
        for is_persistent, aborts in itertools.product((False, True), (False, True)[: 1 + can_abort]):
            queue, names = AsyncCallsQueue(persistent=is_persistent), [f"{is_persistent} {aborts} {n}" for n in "12"]
            for name in names:
                option = queue_option("nvrx")
                request = save(state(1.0), directory / name, async_sharded_save=True, **option)
                request = request if option else AsyncRequest(**request._asdict())
                request.add_finalize_fn(lambda name=name: finalized.append(name))
                queue.schedule_async_request(request)
            queue.close(**{"abort": True} if aborts else {})
            assert (finalized[-2:] == names) != aborts
            assert queue.get_num_unfinalized_calls() == (2 if aborts else 0)
            queue.maybe_finalize_async_calls(blocking=True)
            assert finalized[-2:] == names and loaded(directory / names[1]) == as_saved(1.0)


@SCENARIOS.add
def a_save_of_fsdp_dtensor_by_megatron_bridge_is_written_beside_training(directory: Path) -> None:
    name, path, gate = "megatron.bridge.training.checkpointing", directory / "saved", Gate()
    bridge = ModuleType(name)
    exec(_BRIDGE, vars(bridge))
    weight = torch.ones(3)
    with pytest.MonkeyPatch.context() as patched, FaultDisk(path, on={"create:*.distcp": gate}):
        patched.setitem(sys.modules, name, bridge)
        with chosen():
            request = bridge.save_async({"weight": weight}, str(path))
        weight.fill_(-1)
        assert not (path / ".metadata").exists()
        gate.opened.set()
        request.execute_sync()
    loaded = {"weight": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=path)
    assert loaded["weight"].tolist() == [1.0] * 3


test_on_two_ranks = SCENARIOS.test()
