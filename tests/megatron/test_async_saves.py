"""Asynchronous saves of ``torch_dist`` in Megatron's own queue: written beside training, finalized when committed."""

from __future__ import annotations

import errno
import gc
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from robust_dcp.megatron import RobustSaveStrategy
from tests.faults.disk import FaultDisk, Gate
from tests.harness.verdicts import lines_of_the_log
from tests.megatron.async_saves import as_saved, loaded, save_beside_training, state
from tests.megatron.torch_dist import Scenarios, chosen, failures_of, made, queue_option, save, stock_strategy

SCENARIOS = Scenarios()


@SCENARIOS.add
def training_goes_on_while_shards_are_written_and_the_tracker_moves_after_the_commit(directory: Path) -> None:
    for is_persistent in (False, True):
        queue = AsyncCallsQueue(persistent=is_persistent)
        save_beside_training(directory / str(is_persistent), queue)
        queue.close()


@SCENARIOS.add
def saves_that_are_asked_for_while_another_is_under_way_are_finalized_in_order_and_those_of_others_by_stock(
    directory: Path,
) -> None:
    queue, finalized, own = AsyncCallsQueue(), [], state(0.0)
    with chosen():
        for step in (1.0, 2.0, 3.0):
            own["weight"].data.fill_(step + dist.get_rank())
            own["object"].data["value"] = own["iteration"] = step
            request = save(dict(own), directory / str(step), async_sharded_save=True, **queue_option())
            request.add_finalize_fn(lambda step=step: finalized.append(step))
            queue.schedule_async_request(request)
        others = AsyncRequest(async_fn=None, async_fn_args=(), finalize_fns=[lambda: finalized.append(4.0)])
        queue.schedule_async_request(others)
        callers = [type(call.async_caller).__name__ for call in queue.async_calls]
        assert callers == ["BackgroundSave"] * 3 + ["TemporalAsyncCaller"]
        assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2, 3]
    assert finalized == [1.0, 2.0, 3.0, 4.0]
    assert [loaded(directory / str(step)) for step in finalized[:3]] == [as_saved(step) for step in finalized[:3]]


@SCENARIOS.add
def a_request_is_right_also_where_nobody_knows_what_it_is(directory: Path) -> None:
    """Requests that end in ``execute_sync``, and in a queue that is stock's."""
    queue, finalized = AsyncCallsQueue(), []
    with chosen():
        requests = [save(state(n), directory / str(n), async_sharded_save=True, **queue_option()) for n in (1.0, 2.0)]
    for n, request in zip((1.0, 2.0), requests, strict=True):
        request.add_finalize_fn(lambda n=n: finalized.append((directory / str(n) / "metadata.json").exists()))
    requests[0].execute_sync()
    queue.schedule_async_request(requests[1])
    assert queue.maybe_finalize_async_calls(blocking=True) == [0] and finalized == [True, True]
    assert [loaded(directory / str(n)) for n in (1.0, 2.0)] == [as_saved(n) for n in (1.0, 2.0)]


@SCENARIOS.add
def a_strategy_that_is_asked_directly_saves_beside_training_too(directory: Path) -> None:
    """Megatron's strategy by itself and in its wrapper, and ours; and its report."""
    queue = AsyncCallsQueue()
    with chosen():
        for name, strategy in (
            ("stock", stock_strategy()),
            ("parallel", FullyParallelSaveStrategyWrapper(stock_strategy())),
            ("ours", RobustSaveStrategy()),
        ):
            sharded = {key: value for key, value in state(1.0).items() if key != "iteration"}
            request = strategy.async_save(sharded, str(made(directory / name)), *queue_option().values())
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
            assert (directory / name / ".metadata").exists()
            assert getattr(strategy, "base_strategy", strategy).last_report.items in (1, 2)


@SCENARIOS.add
def a_rank_that_cannot_write_fails_the_finalizer_on_all_ranks_and_not_the_next_save(directory: Path) -> None:
    """With ``warn`` the failure is logged, by a module in the place of ``megatron.training.async_utils``."""
    queue = AsyncCallsQueue()
    module = types.ModuleType("megatron.training.async_utils")

    def maybe_finalize_async_save(blocking: bool = False) -> list[int]:
        return list(queue.maybe_finalize_async_calls(blocking))

    def ask_for(name: str) -> None:
        path = directory / name
        queue.schedule_async_request(save(state(float(name)), path, async_sharded_save=True, **queue_option()))

    module.maybe_finalize_async_save = maybe_finalize_async_save  # type: ignore[attr-defined]
    is_full = {"write:[24]/*.distcp": OSError(errno.ENOSPC, "")} if dist.get_rank() == 1 else {}
    with pytest.MonkeyPatch.context() as patched, FaultDisk(directory, on=is_full):
        patched.setitem(sys.modules, module.__name__, module)
        with chosen(save_failure="warn"):
            messages = lines_of_the_log("robust_dcp.megatron.failures")
            for name in "123":
                ask_for(name)
            module.maybe_finalize_async_save(blocking=True)
        with chosen():
            ask_for("4")
            ask_for("5")
            error, failures = failures_of(lambda: module.maybe_finalize_async_save(blocking=True))
            module.maybe_finalize_async_save(blocking=True)
    dist.barrier()
    assert [name for name in "12345" if (directory / name / "metadata.json").exists()] == ["1", "3", "5"]
    assert not (directory / "4" / ".metadata").exists()
    (message,) = messages  # rank 0 tells it, and rank 1, which failed itself
    assert "this checkpoint was not saved, and training goes on" in message and "No space left on device" in message
    ((rank, message),) = failures
    assert (type(error).__name__, rank) == ("StorageError", 1) and "No space left on device" in message
    assert [loaded(directory / name) for name in "35"] == [as_saved(3.0), as_saved(5.0)]


@SCENARIOS.add
def tensors_are_let_go_of_once_they_have_been_copied(directory: Path) -> None:
    gate, own = Gate(), state(1.0)
    held = weakref.ref(own["weight"].data)
    with chosen(), FaultDisk(directory, on={"create:*.distcp": gate}):
        request = save(own, directory / "1", async_sharded_save=True, **queue_option())
        del own
        gc.collect()
        is_held = held() is not None
        gate.opened.set()
        request.execute_sync()
    assert not is_held


test_on_two_ranks = SCENARIOS.test()
