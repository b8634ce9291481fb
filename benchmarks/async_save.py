"""What async saves cost training: ours and stock's, in one run, on ranks of this machine.

Run it for a table: ``python -m benchmarks.async_save --ranks 2 --mib 512 --json async_save.json``. Each contender runs
in processes of its own and saves the same FSDP2-like state dict several times: the first save, which also takes memory,
and repeated ones (median). "blocked" is how long the call keeps the caller, and for lazy staging also how long the
optimizer step then waits. The limit is one pass of copies of what a rank writes into memory that it has already. Beside
it: how much slower a training loop runs while a save is under way, and the longest time for which a thread that only
runs Python did not get on.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import robust_dcp
from benchmarks.ranks import run, show

__all__ = ["CONTENDERS", "measure"]

_MIB = 1 << 20
_STEPS_BETWEEN = 8

_RATIOS = {
    "who": "who",
    "limit_ratio": "blocked, of the limit",
    "repeated_ratio": "ours blocks so many times less",
    "slowdown": "training slower by",
}
_COSTS = {
    "who": "who",
    "first_blocked_seconds": "first: blocked s",
    "repeated_blocked_seconds": "repeated: blocked s",
    "blocked_seconds_per_gib": "blocked s/GiB",
    "save_seconds": "until committed, s",
    "blocked_share": "blocked, of a sync save",
    "pause_seconds": "longest pause of Python, s",
}

Saved = tuple[Callable[[], object], Callable[[], object]]
"""What an async save gives: how to wait until tensors may change, and until the checkpoint is committed."""


def _nothing() -> None:
    return None


def _ours(state_dict: dict[str, Any], path: str) -> Saved:
    saving = robust_dcp.async_save(state_dict, checkpoint_id=path)
    assert isinstance(saving, Future)
    return _nothing, saving.result


def _ours_by_process(state_dict: dict[str, Any], path: str) -> Saved:
    saving = robust_dcp.async_save(state_dict, checkpoint_id=path, executor="process")
    assert isinstance(saving, Future)
    return _nothing, saving.result


def _ours_lazily(state_dict: dict[str, Any], path: str) -> Saved:
    saving = robust_dcp.async_save(state_dict, checkpoint_id=path, staging="lazy")
    assert isinstance(saving, robust_dcp.AsyncSave)
    return saving.wait_staged, saving.upload_completion.result


def _ours_at_once(state_dict: dict[str, Any], path: str) -> Saved:
    robust_dcp.save(state_dict, checkpoint_id=path)
    return _nothing, _nothing


def _stock(kind: AsyncCheckpointerType, stager: Callable[[], Any] = _nothing) -> Callable[[dict[str, Any], str], Saved]:
    kept: list[Any] = []  # a stager keeps its memory between saves, as ours does

    def save(state_dict: dict[str, Any], path: str) -> Saved:
        if not kept:
            kept.append(stager())
        more = {} if kept[0] is None else {"async_stager": kept[0]}
        saving = dcp.async_save(state_dict, checkpoint_id=path, async_checkpointer_type=kind, **more)
        if isinstance(saving, Future):
            return _nothing, saving.result
        return saving.staging_completion.result, saving.upload_completion.result

    return save


def _stager(*, is_async: bool, is_shared: bool) -> Callable[[], Any]:
    def make() -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        return DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=is_shared,
                use_async_staging=is_async,
                use_non_blocking_copy=False,
            )
        )

    return make


CONTENDERS: dict[str, Callable[[], Callable[[dict[str, Any], str], Saved]]] = {
    "ours": lambda: _ours,
    "ours, process": lambda: _ours_by_process,
    "ours, lazy": lambda: _ours_lazily,
    "ours, synchronous": lambda: _ours_at_once,
    "stock, thread": lambda: _stock(AsyncCheckpointerType.THREAD),
    "stock, process": lambda: _stock(AsyncCheckpointerType.PROCESS),
    "stock, thread, DefaultStager": lambda: _stock(
        AsyncCheckpointerType.THREAD, _stager(is_async=False, is_shared=False)
    ),
    "stock, process, DefaultStager": lambda: _stock(
        AsyncCheckpointerType.PROCESS, _stager(is_async=False, is_shared=True)
    ),
}


class _Training:
    """Steps of matrix products, and a thread that does nothing but run Python and look at the clock."""

    def __init__(self) -> None:
        self._left, self._right = torch.randn(384, 384), torch.randn(384, 384)

    def step_seconds(self, goes_on: Callable[[int], bool]) -> tuple[float, int]:
        """Mean time of a step, and how many were done."""
        started, steps = time.perf_counter(), 0
        while goes_on(steps):
            self._left = torch.mm(self._left, self._right) / 100
            steps += 1
        return (time.perf_counter() - started) / max(steps, 1), steps


class _Clock:
    """The longest time for which a Python thread did not get on."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Clock:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        before = time.perf_counter()
        while not self._is_over.is_set():
            now = time.perf_counter()
            self.longest_seconds = max(self.longest_seconds, now - before)
            before = now
            time.sleep(0)


def _state_dict(nbytes: int, tensors: int) -> dict[str, Any]:
    """DTensors sharded over all ranks, and their optimizer's state: ``nbytes`` for each rank."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    rows = max(nbytes // tensors // 4096, 1)
    whole = torch.randn(world_size * rows, 1024)
    return {f"layers.{n}.weight": distribute_tensor(whole + n, mesh, [Shard(0)]) for n in range(tensors)}


def _copy_seconds(state_dict: dict[str, Any]) -> float:
    """One pass of copies of what this rank holds, into memory that was used before."""
    originals = [value.to_local() for value in state_dict.values()]
    copies = [torch.empty_like(original) for original in originals]
    found = []
    for _ in range(4):
        started = time.perf_counter()
        torch._foreach_copy_(copies, originals)
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])


def measure(who: str, directory: str, nbytes: int, saves: int, tensors: int) -> dict[str, float]:
    """One contender on one rank."""
    state_dict = _state_dict(nbytes, tensors)
    save = CONTENDERS[who]()
    training = _Training()
    calm, _ = training.step_seconds(lambda steps: steps < 100)
    copying = _copy_seconds(state_dict)
    blocked, until_committed, slow, pauses = [], [], [], []
    for number in range(saves):
        dist.barrier()
        with _Clock() as clock:
            started = time.perf_counter()
            wait_staged, wait_saved = save(state_dict, f"{directory}/{number}")
            kept_seconds = time.perf_counter() - started
            _, _ = training.step_seconds(lambda steps: steps < _STEPS_BETWEEN)
            waiting = time.perf_counter()
            wait_staged()
            blocked.append(kept_seconds + time.perf_counter() - waiting)
            saver = threading.Thread(target=wait_saved)
            saver.start()
            during, steps = training.step_seconds(lambda _, saver=saver: saver.is_alive())
            saver.join()
            until_committed.append(time.perf_counter() - started)
        pauses.append(clock.longest_seconds)
        if steps >= _STEPS_BETWEEN:
            slow.append(during / calm)
    return {
        "first_blocked_seconds": blocked[0],
        "repeated_blocked_seconds": statistics.median(blocked[1:]),
        "save_seconds": statistics.median(until_committed[1:]),
        "copy_seconds": copying,
        "pause_seconds": statistics.median(pauses[1:]),
        "slowdown": statistics.median(slow) if slow else float("nan"),
    }


def main() -> None:
    """Measure and print: ratios, then what each contender took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256, help="that each rank saves")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=64, help="that hold these bytes")
    parser.add_argument("--who", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--directory")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for who in arguments.who:
        print(f"{who} ...", flush=True)
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            found = run(
                arguments.ranks, measure, who, directory, arguments.mib * _MIB, arguments.saves, arguments.tensors
            )
        worst = {key: max(rank[key] for rank in found) for key in found[0]}
        rows.append({"who": who, "ranks": arguments.ranks, "mib": arguments.mib, **worst})
    of = {row["who"]: row for row in rows}
    ours = of.get("ours", rows[0])
    at_once = of.get("ours, synchronous", ours)
    for row in rows:
        row["limit_ratio"] = row["repeated_blocked_seconds"] / row["copy_seconds"]
        row["repeated_ratio"] = row["repeated_blocked_seconds"] / ours["repeated_blocked_seconds"]
        row["blocked_share"] = row["repeated_blocked_seconds"] / at_once["repeated_blocked_seconds"]
        row["blocked_seconds_per_gib"] = row["repeated_blocked_seconds"] * 1024 / arguments.mib
    show(_RATIOS, rows, None)
    print()
    show(_COSTS, rows, arguments.json)


if __name__ == "__main__":
    main()
