"""Runs functions on ranks and in new processes, measures their time and memory, and prints tables."""

from __future__ import annotations

import ctypes
import datetime
import gc
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Cost", "Row", "Stopwatch", "in_new_process", "run", "show", "write_json"]

Row = dict[str, Any]
"""One line of a table."""

_CONTEXT = multiprocessing.get_context("forkserver")
# New processes have torch imported. They are forked from a process that has done nothing else.
_CONTEXT.set_forkserver_preload(["robust_dcp"])


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` in a new process, so that no caches or memory of another run help it.

    Raises:
        BrokenProcessPool: the process died, for example because memory ran out.
    """
    return run(1, function, *args, has_group=False)[0]


def run(world_size: int, function: Callable[..., Any], *args: Any, has_group: bool = True) -> list[Any]:
    """Call ``function(*args)`` on each of ``world_size`` new ranks in a gloo group. Returns results in rank order.

    Raises:
        BrokenProcessPool: a rank died. Its output says why.
    """
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, mp_context=_CONTEXT)) for _ in range(world_size)]
        where = (world_size, directory) if has_group else None
        futures = [pool.submit(_be_rank, rank, where, function, args) for rank, pool in enumerate(pools)]
        return [future.result() for future in futures]


def _be_rank(rank: int, where: tuple[int, str] | None, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    torch.set_num_threads(1)
    if where is None:
        return function(*args)
    world_size, directory = where
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)  # as torchrun says it
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=600),
    )
    result = function(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result


def show(columns: dict[str, str], rows: Sequence[Row]) -> None:
    """Print ``rows`` as a table, right-aligned under the titles in ``columns`` (key to title). Floats get 3 digits."""
    lines = [list(columns.values())]
    for row in rows:
        values = [row.get(key, "") for key in columns]
        lines.append([f"{value:.3f}" if isinstance(value, float) else f"{value}" for value in values])
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def write_json(path: str | None, content: object) -> None:
    """Write ``content`` to ``path`` if there is one."""
    if path:
        Path(path).write_text(json.dumps(content, indent=1), encoding="utf-8")


@dataclass
class Cost:
    """The cost of a step: user and system time of all threads, and wall time."""

    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0


@dataclass(eq=False)
class Stopwatch:
    """Runs from :meth:`start`. Every :meth:`lap` gives a name to the time since the last lap.

    Attributes:
        laps: costs by name, in the order of their first lap.
        peak_nbytes: the most resident memory above that at the start, while the watch ran. Outside Linux the peak of
            the whole process counts, so that it is an upper bound.
    """

    laps: dict[str, Cost] = field(default_factory=dict)
    peak_nbytes: int = 0
    _floor_nbytes: int = 0
    _mark: tuple[float, float] = (0.0, 0.0)
    _pending: Cost = field(default_factory=Cost)

    def start(self) -> None:
        gc.collect()
        _give_back_memory()
        self._floor_nbytes = _memory_nbytes("VmRSS:")
        self._resume()

    def lap(self, name: str) -> None:
        self._halt()
        cost = self.laps.setdefault(name, Cost())
        cost.cpu_seconds += self._pending.cpu_seconds
        cost.wall_seconds += self._pending.wall_seconds
        self._pending = Cost()
        self._resume()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time and memory of the block."""
        self._halt()
        try:
            yield
        finally:
            _give_back_memory()
            self._resume()

    @property
    def total(self) -> Cost:
        """The cost of all laps."""
        costs = self.laps.values()
        return Cost(sum(cost.cpu_seconds for cost in costs), sum(cost.wall_seconds for cost in costs))

    def _halt(self) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        self._pending.cpu_seconds += cpu - self._mark[0]
        self._pending.wall_seconds += wall - self._mark[1]
        self.peak_nbytes = max(self.peak_nbytes, _memory_nbytes("VmHWM:") - self._floor_nbytes)

    def _resume(self) -> None:
        if os.path.exists("/proc/self/clear_refs"):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak of the resident memory
        self._mark = time.process_time(), time.perf_counter()


def _memory_nbytes(key: str) -> int:
    """The resident memory, or its peak. Only Linux knows the former, so that elsewhere both are the peak."""
    if os.path.exists("/proc/self/status"):
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _give_back_memory() -> None:
    """Give freed memory back to the system. Otherwise the allocator could use it again without a visible growth."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if malloc_trim is not None:
        malloc_trim(0)
