"""Measures what async saves cost training, ours and stock's, in one run on ranks of this machine.

Run it for a table: ``python -m benchmarks.async_save --ranks 2 --mib 512 --json async_save.json``. Each contender runs
in its own processes and saves the same state dict several times. The first save also has to allocate memory. Later
saves give a median.

The state dict has 64 DTensors that are sharded over all ranks.

"blocked" is the time that the caller waits in the call. With lazy staging the wait of the optimizer step is added. The
limit is the time to copy the data that a rank writes into memory that it already has. The table also shows how much
slower a training loop runs during a save, and the longest time that a thread of pure Python was held up, in the call
and after it. That thread takes part of a core, also while the limit is measured.

Before each contender the program allocates memory and frees it. On a virtual machine the host has to find memory that
the machine has not used yet, and otherwise a contender would pay for that.
"""

from __future__ import annotations

import argparse
import mmap
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
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import robust_dcp
from benchmarks.measuring import Row, run, show, write_json

__all__ = ["Save", "Saved", "at_once", "measure", "nothing", "ours", "stock"]

_MIB = 1 << 20
_STEPS_BETWEEN = 8
_TENSORS = 64

_COLUMNS = {
    "who": "who",
    "limit_ratio": "blocked, of the limit",
    "repeated_ratio": "ours blocks so many times less",
    "slowdown": "training slower by",
    "first_blocked_seconds": "first: blocked s",
    "repeated_blocked_seconds": "repeated: blocked s",
    "save_seconds": "until committed, s",
    "pause_in_call_seconds": "longest pause of Python in the call, s",
    "pause_seconds": "behind it, s",
}


Saved = tuple[Callable[[], object], Callable[[], object]]
"""What an async save returns: a function that waits until tensors may change, and one that waits for the commit."""

Save = Callable[[dict[str, Any], str], Saved]
"""Saves a state dict in a directory."""


def nothing() -> None:
    """There is nothing to wait for."""


def ours(**options: Any) -> Save:
    """Our async save, with these options."""

    def save(state_dict: dict[str, Any], path: str) -> Saved:
        saving = robust_dcp.async_save(state_dict, checkpoint_id=path, **options)
        return saving.wait_staged, saving.result

    return save


def at_once(save: Callable[..., object]) -> Save:
    """A synchronous save."""

    def call(state_dict: dict[str, Any], path: str) -> Saved:
        save(state_dict, checkpoint_id=path)
        return nothing, nothing

    return call


def stock(kind: AsyncCheckpointerType = AsyncCheckpointerType.THREAD, staging: StagingOptions | None = None) -> Save:
    """Stock's async save.

    Args:
        staging: how a DefaultStager copies. It keeps its memory between saves, as ours does, if torch lets it: torch
            2.11 closes it after each save, so that the next save needs another.
    """
    stager: Any = None

    def save(state_dict: dict[str, Any], path: str) -> Saved:
        nonlocal stager
        if staging is not None and (stager is None or not stager._state_dict_stager._deepcopy_dispatch):
            stager = DefaultStager(staging)
        more = {} if stager is None else {"async_stager": stager}
        saving = dcp.async_save(state_dict, checkpoint_id=path, async_checkpointer_type=kind, **more)
        if isinstance(saving, Future):
            return nothing, saving.result
        return saving.staging_completion.result, saving.upload_completion.result

    return save


_THREAD, _PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
# Positionally: pinned memory, shared memory, a thread that copies, copies that do not block.
CONTENDERS: dict[str, Callable[[], Save]] = {
    "ours": ours,
    "ours, process": lambda: ours(executor="process"),
    "ours, lazy": lambda: ours(staging="lazy"),
    "ours, synchronous": lambda: at_once(robust_dcp.save),
    "stock, thread": stock,
    "stock, process": lambda: stock(_PROCESS),
    "stock, thread, DefaultStager": lambda: stock(_THREAD, StagingOptions(False, False, False, False)),
    "stock, process, DefaultStager": lambda: stock(_PROCESS, StagingOptions(False, True, False, False)),
}


class _Training:
    """A training loop of matrix products, and a thread that only runs Python and reads the clock."""

    def __init__(self) -> None:
        self._left, self._right = torch.randn(384, 384), torch.randn(384, 384)

    def step_seconds(self, goes_on: Callable[[int], bool]) -> tuple[float, int]:
        """The mean time of a step, and the number of steps."""
        started, steps = time.perf_counter(), 0
        while goes_on(steps):
            self._left = torch.mm(self._left, self._right) / 100
            steps += 1
        return (time.perf_counter() - started) / max(steps, 1), steps


class _Clock:
    """Measures the longest time that a Python thread was held up by work of this process.

    The thread also waits when other processes use the cores. So the CPU time of this process counts if it is less.
    """

    def __init__(self) -> None:
        self._longest_seconds = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Clock:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def lap(self) -> float:
        """The longest time since the last lap."""
        longest, self._longest_seconds = self._longest_seconds, 0.0
        return longest

    def _run(self) -> None:
        before, cpu_before = time.perf_counter(), time.process_time()
        while not self._is_over.is_set():
            now, cpu = time.perf_counter(), time.process_time()
            self._longest_seconds = max(self._longest_seconds, min(now - before, cpu - cpu_before))
            before, cpu_before = now, cpu
            time.sleep(0)


def _state_dict(nbytes: int) -> dict[str, Any]:
    """A state dict with ``nbytes`` of tensors on each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(dist.get_world_size() * max(nbytes // _TENSORS // 4096, 1), 1024)
    return {f"layers.{n}.weight": distribute_tensor(whole + n, mesh, [Shard(0)]) for n in range(_TENSORS)}


def _copy_seconds(state_dict: dict[str, Any]) -> float:
    """The time to copy the data that this rank writes into memory that was used before."""
    originals = [value.to_local() for value in state_dict.values()]
    copies = [torch.empty_like(original) for original in originals]
    found = []
    for _ in range(4):
        started = time.perf_counter()
        torch._foreach_copy_(copies, originals)
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])


def _find_memory(nbytes: int) -> None:
    """Allocate and touch this much memory in huge pages, and free it."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, nbytes, mmap.PAGESIZE):
            memory[at] = 0


def measure(who: str, directory: str, nbytes: int, saves: int) -> dict[str, float]:
    """Measure one contender on one rank."""
    state_dict = _state_dict(nbytes)
    save = CONTENDERS[who]()
    training = _Training()
    calm, _ = training.step_seconds(lambda steps: steps < 100)
    blocked, until_committed, slow, pauses_in_call, pauses = [], [], [], [], []
    for number in range(saves):
        dist.barrier()
        with _Clock() as clock:
            started = time.perf_counter()
            wait_staged, wait_saved = save(state_dict, f"{directory}/{number}")
            kept_seconds = time.perf_counter() - started
            pauses_in_call.append(clock.lap())
            _, _ = training.step_seconds(lambda steps: steps < _STEPS_BETWEEN)
            waiting = time.perf_counter()
            wait_staged()
            blocked.append(kept_seconds + time.perf_counter() - waiting)
            saver = threading.Thread(target=wait_saved)
            saver.start()

            def goes_on(_: int, saver: threading.Thread = saver) -> bool:
                return saver.is_alive()

            during, steps = training.step_seconds(goes_on)
            saver.join()
            until_committed.append(time.perf_counter() - started)
            pauses.append(clock.lap())
        if steps >= _STEPS_BETWEEN:
            slow.append(during / calm)
    # Last: memory that was used and freed stays with the C library, and stock's first save would find it touched.
    with _Clock():
        copying = _copy_seconds(state_dict)
    return {
        "first_blocked_seconds": blocked[0],
        "repeated_blocked_seconds": statistics.median(blocked[1:]),
        "save_seconds": statistics.median(until_committed[1:]),
        "copy_seconds": copying,
        "pause_in_call_seconds": statistics.median(pauses_in_call[1:]),
        "pause_seconds": statistics.median(pauses[1:]),
        "slowdown": statistics.median(slow) if slow else float("nan"),
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256, help="MiB that each rank saves")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--who", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for who in arguments.who:
        print(f"{who} ...", flush=True)
        _find_memory(3 * arguments.ranks * arguments.mib * _MIB)
        with tempfile.TemporaryDirectory() as directory:
            found = run(arguments.ranks, measure, who, directory, arguments.mib * _MIB, arguments.saves)
        worst = {key: max(rank[key] for rank in found) for key in found[0]}
        rows.append({"who": who, "ranks": arguments.ranks, "mib": arguments.mib, **worst})
    ours = next((row for row in rows if row["who"] == "ours"), rows[0])
    for row in rows:
        row["limit_ratio"] = row["repeated_blocked_seconds"] / row["copy_seconds"]
        row["repeated_ratio"] = row["repeated_blocked_seconds"] / ours["repeated_blocked_seconds"]
    show(_COLUMNS, rows)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
