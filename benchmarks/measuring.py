"""Runs functions on ranks and in new processes, measures their time and memory, and prints tables."""

from __future__ import annotations

import ctypes
import datetime
import errno
import gc
import json
import mmap
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "Row",
    "Stopwatch",
    "evict",
    "in_new_process",
    "make_durable",
    "raw_seconds",
    "run",
    "show",
    "with_ratios",
    "write_json",
]

Row = dict[str, Any]
"""One line of a table."""

_BLOCK_NBYTES = 8 << 20
_CONTEXT = multiprocessing.get_context("forkserver")
# New processes have torch and both packages imported, as a training program has. They are forked from a process that
# has done nothing else.
_CONTEXT.set_forkserver_preload(["torch.distributed.checkpoint", "robust_dcp"])


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


def with_ratios(rows: Sequence[Row], same: Sequence[str], ratios: dict[str, str]) -> None:
    """Add to each row how many times more stock takes: a ratio for each figure, if stock has a row of the same case.

    Args:
        rows: the rows. Stock's have ``stock`` as their ``who``.
        same: the keys that say which rows are one case.
        ratios: name of the ratio to name of the figure.
    """
    stock = {tuple(row[key] for key in same): row for row in rows if row["who"] == "stock"}
    for row in rows:
        of_stock = stock.get(tuple(row[key] for key in same))
        if of_stock is not None:
            row.update({name: of_stock[figure] / max(row[figure], 1e-9) for name, figure in ratios.items()})


def write_json(path: str | None, content: object) -> None:
    """Write ``content`` to ``path`` if there is one."""
    if path:
        Path(path).write_text(json.dumps(content, indent=1), encoding="utf-8")


@dataclass(eq=False)
class Stopwatch:
    """Runs from :meth:`start` to :meth:`stop`.

    Attributes:
        cpu_seconds: user and system time of all threads. ``wall_seconds``: the time on the clock.
        peak_nbytes: the most resident memory above that at the start, while the watch ran. Outside Linux the peak of
            the whole process counts, so that it is an upper bound.
    """

    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    peak_nbytes: int = 0
    _floor_nbytes: int = 0
    _mark: tuple[float, float] = (0.0, 0.0)

    def start(self) -> None:
        gc.collect()
        _give_back_memory()
        self._floor_nbytes = _memory_nbytes("VmRSS:")
        self._resume()

    def stop(self) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        self.cpu_seconds += cpu - self._mark[0]
        self.wall_seconds += wall - self._mark[1]
        self.peak_nbytes = max(self.peak_nbytes, _memory_nbytes("VmHWM:") - self._floor_nbytes)

    def figures(self) -> Row:
        """What the watch has measured, as part of a row."""
        peak_mib = self.peak_nbytes / (1 << 20)
        return {"cpu_seconds": self.cpu_seconds, "wall_seconds": self.wall_seconds, "peak_mib": peak_mib}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time and memory of the block."""
        self.stop()
        try:
            yield
        finally:
            _give_back_memory()
            self._resume()

    def _resume(self) -> None:
        if os.path.exists("/proc/self/clear_refs"):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak of the resident memory
        self._mark = time.process_time(), time.perf_counter()


def raw_seconds(nbytes: int, threads: int, path: str) -> dict[str, float]:
    """The seconds to write and to read ``nbytes`` below ``path`` with direct I/O, each thread a file.

    The memory is as large as a checkpoint, because a buffer that stays in the processor's cache would be faster than
    any checkpoint can be. If the file system refuses ``O_DIRECT``, the page cache is used.
    """
    memory = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    memory[:] = os.urandom(mmap.PAGESIZE) * (len(memory) // mmap.PAGESIZE)
    each = -(-len(memory) // (threads * _BLOCK_NBYTES)) * _BLOCK_NBYTES
    os.makedirs(path)

    def move(number: int, flags: int, call: Callable[[int, list[memoryview], int], int]) -> None:
        begin, end = min(len(memory), number * each), min(len(memory), (number + 1) * each)
        fd = _open_direct(os.path.join(path, f"raw-{number}"), flags)
        try:
            if flags != os.O_RDONLY and end > begin and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, end - begin)
            with memoryview(memory) as view:
                for at in range(begin, end, _BLOCK_NBYTES):
                    part = view[at : min(end, at + _BLOCK_NBYTES)]
                    if call(fd, [part], at - begin) != len(part):
                        raise OSError(errno.EIO, f"not all of {len(part)} bytes at offset {at - begin}")
            if flags != os.O_RDONLY:
                os.fsync(fd)
        finally:
            os.close(fd)

    with ThreadPoolExecutor(threads) as pool:
        os.sync()
        started = time.perf_counter()
        list(pool.map(lambda number: move(number, os.O_WRONLY | os.O_CREAT, os.pwritev), range(threads)))
        make_durable(path)
        saved = time.perf_counter()
        evict(path)
        os.sync()
        resumed = time.perf_counter()
        list(pool.map(lambda number: move(number, os.O_RDONLY, os.preadv), range(threads)))
        return {"save": saved - started, "load": time.perf_counter() - resumed}


def _open_direct(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)


def make_durable(path: str) -> None:
    """Sync every file and directory below ``path``, and the name of ``path`` itself."""
    paths = [os.path.dirname(path)]
    for directory, _, files in os.walk(path):
        paths += [os.path.join(directory, name) for name in (*files, ".")]
    for each in paths:
        fd = os.open(each, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def evict(path: str) -> None:
    """Take the files below ``path`` out of the page cache."""
    for directory, _, files in os.walk(path) if hasattr(os, "posix_fadvise") else ():
        for name in files:
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


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
