"""The worker that Megatron-Bridge starts for asynchronous saves, with the lines of ``GlobalState`` that start it.

The package itself runs in tests/frameworks/test_megatron_bridge.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from robust_dcp.megatron.saving import async_patches
from tests.megatron.torch_dist import chosen

_STATE = "megatron.bridge.training.state"


class GlobalState:
    def __init__(self, **checkpoint: Any) -> None:
        wanted = {"ckpt_format": "torch_dist", "use_persistent_ckpt_worker": True, **checkpoint}
        self.cfg = SimpleNamespace(checkpoint=SimpleNamespace(**wanted))
        self.async_calls_queue: AsyncCallsQueue | None = None
        self.has_worker = False

    def initialize_async_checkpoint_worker(self) -> None:
        if self.async_calls_queue is None:
            self.async_calls_queue = AsyncCallsQueue(persistent=self.cfg.checkpoint.use_persistent_ckpt_worker)
            if self.cfg.checkpoint.use_persistent_ckpt_worker:
                self.has_worker = True


@contextmanager
def _bridge() -> Iterator[None]:
    sys.modules[_STATE] = module = ModuleType(_STATE)
    module.GlobalState = GlobalState  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del sys.modules[_STATE]


@pytest.mark.parametrize(
    ("is_chosen", "checkpoint", "has_worker"),
    [
        (True, {}, False),
        (True, {"ckpt_format": "fsdp_dtensor"}, False),
        (True, {"ckpt_format": "zarr"}, True),
        (True, {"non_persistent_ckpt_type": "local"}, True),
        (False, {}, True),
    ],
)
def test_the_worker_is_started_only_where_stock_has_work_for_it(
    is_chosen: bool, checkpoint: dict[str, Any], has_worker: bool
) -> None:
    state = GlobalState(**checkpoint)
    with _bridge(), chosen(patches=async_patches.PATCHES) if is_chosen else nullcontext():
        state.initialize_async_checkpoint_worker()
        state.initialize_async_checkpoint_worker()
    assert state.has_worker is has_worker
    # What stock saves after all still goes through a worker that is kept, and not through a new process for each save.
    assert state.async_calls_queue is not None and state.async_calls_queue.persistent
    assert state.cfg.checkpoint.use_persistent_ckpt_worker


def test_a_job_without_a_persistent_worker_keeps_its_queue() -> None:
    state = GlobalState(use_persistent_ckpt_worker=False)
    with _bridge(), chosen(patches=async_patches.PATCHES):
        state.initialize_async_checkpoint_worker()
    assert state.async_calls_queue is not None and not state.async_calls_queue.persistent
    assert not state.has_worker
