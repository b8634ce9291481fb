"""Asynchronous saves of ``torch_dist`` in Megatron's own queue: written beside training, finalized when committed."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from demo import megatron_cpu
from robust_dcp.megatron import RobustSaveStrategy
from robust_dcp.megatron.async_requests import BackgroundSave
from robust_dcp.save_queue import SaveFuture
from robust_dcp.storage.files.disk import Disk
from tests.harness.disks import FullDisk, GatedDisk
from tests.harness.ranks import run_ranks, values
from tests.megatron.async_saves import expected, loaded, save_beside_training, state, written_on
from tests.megatron.stock import stock_strategy
from tests.megatron.torch_dist import Scenarios, chosen, failures_of, made, queue_option, save

SCENARIOS = Scenarios()


def _all_scenarios(directory: Path) -> dict[str, Any]:
    megatron_cpu.install()
    return SCENARIOS.run(directory)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """For each scenario what it returned on each of the two ranks."""
    ranks = values(run_ranks(2, _all_scenarios, tmp_path_factory.mktemp("async"), timeout_seconds=150))
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@SCENARIOS.add
def _in_a_queue(directory: Path) -> Any:
    return save_beside_training(directory, AsyncCallsQueue())


@SCENARIOS.add
def _in_a_queue_with_a_persistent_worker(directory: Path) -> Any:
    queue = AsyncCallsQueue(persistent=True)
    seen = save_beside_training(directory, queue)
    queue.close()
    return seen


@pytest.mark.parametrize("scenario", ["_in_a_queue", "_in_a_queue_with_a_persistent_worker"])
def test_training_goes_on_while_shards_are_written_and_the_tracker_moves_after_the_commit(
    found: dict[str, list[Any]], scenario: str
) -> None:
    assert found[scenario] == [expected(rank) for rank in range(2)]


@SCENARIOS.add
def _several(directory: Path) -> Any:
    queue, finalized, own = AsyncCallsQueue(), [], state(0.0)
    with chosen():
        for step in (1.0, 2.0, 3.0):
            own["weight"].data.fill_(step + dist.get_rank())
            own["object"].data["value"] = own["iteration"] = step
            request = save(dict(own), directory / str(step), async_sharded_save=True, **queue_option())
            request.add_finalize_fn(lambda step=step: finalized.append(step))
            queue.schedule_async_request(request)
        told = queue.maybe_finalize_async_calls(blocking=True)
    return told, finalized, [loaded(directory / str(step)) for step in (1.0, 2.0, 3.0)]


def test_saves_that_are_asked_for_while_another_is_under_way_are_finalized_in_order(
    found: dict[str, list[Any]],
) -> None:
    for rank in range(2):
        saved = [(step + rank, step + rank, step, step) for step in (1.0, 2.0, 3.0)]
        assert found["_several"][rank] == ([0, 1, 2], [1.0, 2.0, 3.0], saved)


@SCENARIOS.add
def _a_rank_fails(directory: Path) -> Any:
    queue, finalized = AsyncCallsQueue(), []
    with chosen():
        with written_on(FullDisk() if dist.get_rank() == 1 else Disk()):
            request = save(state(1.0), directory / "1", async_sharded_save=True, **queue_option())
        request.add_finalize_fn(lambda: finalized.append(1))
        queue.schedule_async_request(request)
        request = save(state(2.0), directory / "2", async_sharded_save=True, **queue_option())
        request.add_finalize_fn(lambda: finalized.append(2))
        queue.schedule_async_request(request)
        error, failures = failures_of(lambda: queue.maybe_finalize_async_calls(blocking=True))
        told = queue.maybe_finalize_async_calls(blocking=True)
    left = [(directory / "1" / name).exists() for name in (".metadata", "metadata.json")]
    return type(error).__name__, failures, left, told, finalized, loaded(directory / "2")


def test_a_rank_that_cannot_write_fails_the_finalizer_on_all_ranks_and_not_the_next_save(
    found: dict[str, list[Any]],
) -> None:
    for rank in range(2):
        error, failures, left, told, finalized, saved = found["_a_rank_fails"][rank]
        assert error == "StorageError"
        assert [failed for failed, _ in failures] == [1] and "No space left on device" in failures[0][1]
        assert (left, told, finalized) == ([False, False], [1], [2])
        assert saved == (2.0 + rank, 2.0 + rank, 2.0, 2.0)


@SCENARIOS.add
def _nobody_knows_us(directory: Path) -> Any:
    """Requests that end in ``execute_sync``, and in a queue that is stock's."""
    queue, finalized = AsyncCallsQueue(), []
    with chosen():
        requests = [save(state(n), directory / str(n), async_sharded_save=True, **queue_option()) for n in (1.0, 2.0)]
    for n, request in zip((1.0, 2.0), requests, strict=True):
        request.add_finalize_fn(lambda n=n: finalized.append((directory / str(n) / "metadata.json").exists()))
    requests[0].execute_sync()
    queue.schedule_async_request(requests[1])
    told = queue.maybe_finalize_async_calls(blocking=True)
    return told, finalized, [loaded(directory / str(n)) for n in (1.0, 2.0)]


def test_a_request_is_right_also_where_nobody_knows_what_it_is(found: dict[str, list[Any]]) -> None:
    for rank in range(2):
        saved = [(n + rank, n + rank, n, n) for n in (1.0, 2.0)]
        assert found["_nobody_knows_us"][rank] == ([0], [True, True], saved)


@SCENARIOS.add
def _by_strategies(directory: Path) -> Any:
    """Megatron's strategy by itself and in its wrapper, for callers that ask it directly; ours; and its report."""
    queue, outcomes = AsyncCallsQueue(), []
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
            report = getattr(strategy, "base_strategy", strategy).last_report
            outcomes.append(((directory / name / ".metadata").exists(), report.items))
    return outcomes


def test_a_strategy_that_is_asked_directly_saves_beside_training_too(found: dict[str, list[Any]]) -> None:
    for rank in range(2):
        assert [committed for committed, _ in found["_by_strategies"][rank]] == [True] * 3
    assert [sum(rank[n][1] for rank in found["_by_strategies"]) for n in range(3)] == [3, 3, 3]


@SCENARIOS.add
def _requests_of_others(directory: Path) -> Any:
    queue, finalized = AsyncCallsQueue(), []
    with chosen():
        ours = save(state(1.0), directory / "1", async_sharded_save=True, **queue_option())
        others = AsyncRequest(async_fn=None, async_fn_args=(), finalize_fns=[lambda: finalized.append("others")])
        for request in (ours, others):
            queue.schedule_async_request(request)
        callers = [type(call.async_caller).__name__ for call in queue.async_calls]
        told = queue.maybe_finalize_async_calls(blocking=True)
    return callers, told, finalized


def test_requests_of_others_in_the_same_queue_stay_stock(found: dict[str, list[Any]]) -> None:
    assert found["_requests_of_others"] == [(["BackgroundSave", "TemporalAsyncCaller"], [0, 1], ["others"])] * 2


@SCENARIOS.add
def _over_on_one_rank(directory: Path) -> list[bool]:
    future: SaveFuture[Any] = SaveFuture()
    queue = AsyncCallsQueue()
    with chosen():
        request = AsyncRequest(async_fn=None, async_fn_args=(BackgroundSave(future),), finalize_fns=[])
        queue.schedule_async_request(request)
    caller = queue.async_calls[0].async_caller
    seen = [caller.is_current_async_call_done(blocking=False)]
    if dist.get_rank() == 0:
        future.set_result(None)
    seen += [caller.is_current_async_call_done(no_dist=True), caller.is_current_async_call_done(blocking=False)]
    if dist.get_rank() == 1:
        future.set_result(None)
    return [*seen, caller.is_current_async_call_done(blocking=True)]


def test_a_save_is_over_for_all_ranks_alike(found: dict[str, list[Any]]) -> None:
    assert found["_over_on_one_rank"] == [[False, True, False, True], [False, False, False, True]]


_ENDS_WITHOUT_FINALIZING = """
import sys
import torch.distributed as dist
from pathlib import Path
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from tests.megatron.async_saves import state
from tests.megatron.torch_dist import chosen, queue_option, save

directory = Path(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), 1), rank=0, world_size=1)
with chosen():
    request = save(state(1.0), directory / "1", async_sharded_save=True, **queue_option())
    AsyncCallsQueue().schedule_async_request(request)
"""


def test_a_process_that_ends_commits_the_shards_but_no_checkpoint_that_nobody_finalized(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _ENDS_WITHOUT_FINALIZING, str(tmp_path)], check=True, timeout=100)
    assert (tmp_path / "1" / ".metadata").exists()
    assert not (tmp_path / "1" / "metadata.json").exists()


@SCENARIOS.add
def _memory(directory: Path) -> int:
    """How many of the tensors that were saved are still held once the request is there."""
    disk, own = GatedDisk(), state(1.0)
    held = weakref.ref(own["weight"].data)
    with chosen(), written_on(disk):
        request = save(own, directory / "1", async_sharded_save=True, **queue_option())
        del own
        gc.collect()
        n_held = int(held() is not None)
        disk.gate.set()
        request.execute_sync()
    return n_held


def test_tensors_are_let_go_of_once_they_have_been_copied(found: dict[str, list[Any]]) -> None:
    assert found["_memory"] == [0, 0]
