"""Measures one save or load in its own process: seconds, CPU seconds and memory.

A save ends when the files and their directory are durable. If a writer does not sync them, they are synced within its
time. Before a load the files are not in the page cache, and the target memory is in use already. The loaded values are
compared with the saved ones.

Both start when the file system has finished earlier writes and removals. For example, a file system that is mounted
with ``discard`` discards freed blocks in its next commit, and otherwise the next writer would pay for that. Imports and
other work of the first call in a process do not count.

CPU seconds are those of the process, its threads and its children. The kernel's own threads, which write back the page
cache and run loop devices, do not count for any contender. Memory is the peak of the process's resident memory above
that before the call. Buffers that a writer keeps from an earlier save are not counted again.

If several ranks save or load together (``shapes.ranks_of``), each is such a process in one gloo group. All begin at the
same time. Seconds are those of the last rank to end. All other figures are sums over the ranks.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.drive import probe
from benchmarks.drive.contenders import OURS, READERS, STOCK_READER, WRITERS, remove_checkpoint
from benchmarks.drive.probe import Probe
from benchmarks.drive.shapes import StateDict, leaves, ranks_of, state_dict_of
from benchmarks.simulation.stopwatch import Stopwatch
from robust_dcp.plan.cache import PLANS
from robust_dcp.storage.records.checksum import crc32

__all__ = ["Figures", "in_new_process", "load", "measure", "probe_load", "probe_save", "save"]


class Figures(NamedTuple):
    """The figures of one save or load by one process, or by all ranks together."""

    nbytes: int
    items: int
    seconds: float
    cpu_seconds: float
    peak_nbytes: int


_LOAD_PARTS = (OURS, STOCK_READER, "torch HuggingFaceStorageReader")
"""Readers that can load a single tensor of a checkpoint, for a first call that does not count. For the other readers
the first call is the measured one."""

_CONTEXT = multiprocessing.get_context("forkserver")
# New processes have torch imported. They are forked from a process that has done nothing else.
_CONTEXT.set_forkserver_preload(["benchmarks.drive.measurement"])


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` in a new process.

    Raises:
        BrokenProcessPool: the process died, for example because memory ran out.
    """
    with ProcessPoolExecutor(1, mp_context=_CONTEXT) as pool:
        return pool.submit(_quietly, function, args).result()


def measure(function: Callable[..., Figures], who: str, shape: str, nbytes: int, path: str) -> Figures:
    """Run :func:`save` or :func:`load` of a shape in a new process, or on as many new ranks as the shape has.

    Raises:
        BrokenProcessPool: a process died.
    """
    n_ranks = ranks_of(shape)
    if n_ranks == 1:
        return Figures(*in_new_process(function, who, shape, nbytes, path))
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, mp_context=_CONTEXT)) for _ in range(n_ranks)]
        futures = [
            pool.submit(_quietly, _as_rank, (rank, n_ranks, directory, function, who, shape, nbytes, path))
            for rank, pool in enumerate(pools)
        ]
        return _together([future.result() for future in futures])


def _as_rank(rank: int, n_ranks: int, directory: str, function: Callable[..., Figures], *args: Any) -> Figures:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    os.environ["LOCAL_WORLD_SIZE"] = str(n_ranks)  # as torchrun says it
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=n_ranks,
        timeout=datetime.timedelta(seconds=120),
    )
    figures = function(*args)
    dist.barrier()
    dist.destroy_process_group()
    return figures


def _together(ranks: Sequence[Figures]) -> Figures:
    return Figures(
        nbytes=sum(each.nbytes for each in ranks),
        items=sum(each.items for each in ranks),
        seconds=max(each.seconds for each in ranks),
        cpu_seconds=sum(each.cpu_seconds for each in ranks),
        peak_nbytes=sum(each.peak_nbytes for each in ranks),
    )


def save(writer: str, shape: str, nbytes: int, path: str) -> Figures:
    """Measure a save into ``path``. The files stay there."""
    chosen = WRITERS[writer]
    state_dict = state_dict_of(shape, nbytes)
    warm_up = {"warm_up": torch.zeros(1)}
    for prepared in (warm_up, state_dict):
        chosen.prepare(prepared, path)
        if prepared is warm_up:
            chosen.save(prepared, path)
            remove_checkpoint(path)
            PLANS.clear()
    with _measured(_nbytes(state_dict), len(leaves(state_dict))) as figures:
        chosen.save(state_dict, path)
        if _is_first():  # when save returns, all ranks have written
            make_durable(path)
    return figures[0]


def load(reader: str, shape: str, nbytes: int, path: str) -> Figures:
    """Measure a load from ``path``, with the files out of the page cache.

    Raises:
        ValueError: the loaded values are not those that were saved.
    """
    state_dict = state_dict_of(shape, nbytes)
    expected = _checksums(state_dict)
    _clear(state_dict)
    if reader in _LOAD_PARTS:
        READERS[reader].load(_smallest_part(state_dict), path)
        _clear(state_dict)
    if _is_first():
        evict(path)
    with _measured(_nbytes(state_dict), len(leaves(state_dict))) as figures:
        READERS[reader].load(state_dict, path)
    found = _checksums(state_dict)
    if found != expected:
        wrong = [".".join(name) for name, value in expected.items() if found.get(name) != value]
        raise ValueError(f"{reader} loaded {len(wrong)} of {len(expected)} tensors wrongly, {wrong[0]} for one")
    return figures[0]


def probe_save(chosen: Probe, nbytes: int, path: str) -> Figures:
    """Measure raw writes of ``nbytes`` to ``path``. The files stay there."""
    source = probe.source_of(nbytes)
    with _measured(len(source), chosen.threads) as figures:
        probe.write(path, source, chosen)
        make_durable(path)
    return figures[0]


def probe_load(chosen: Probe, nbytes: int, path: str) -> Figures:
    """Measure raw reads of what :func:`probe_save` wrote, with the files out of the page cache."""
    target = probe.source_of(nbytes)
    evict(path)
    with _measured(len(target), chosen.threads) as figures:
        probe.read(path, target, chosen)
    return figures[0]


def make_durable(path: str) -> None:
    """Sync every file and directory below ``path``, and the name of ``path`` itself."""
    for directory, _, files in os.walk(path):
        for name in (*files, "."):
            _sync(os.path.join(directory, name))
    _sync(os.path.dirname(path))


def evict(path: str) -> None:
    """Take the files below ``path`` out of the page cache."""
    make_durable(path)
    if hasattr(os, "posix_fadvise"):
        for directory, _, files in os.walk(path):
            for name in files:
                fd = os.open(os.path.join(directory, name), os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _measured(nbytes: int, items: int) -> Iterator[list[Figures]]:
    """Measure the block. Afterwards the list has the figures."""
    found: list[Figures] = []
    if _is_first():
        os.sync()
    if dist.is_initialized():
        dist.barrier()
    watch = Stopwatch()
    children = _cpu_seconds_of_children()
    watch.start()
    yield found
    watch.lap("all")
    cpu_seconds = watch.total.cpu_seconds + _cpu_seconds_of_children() - children
    found.append(Figures(nbytes, items, watch.total.wall_seconds, cpu_seconds, watch.peak_nbytes))


def _cpu_seconds_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _nbytes(state_dict: StateDict) -> int:
    return sum(tensor.nbytes for tensor in leaves(state_dict).values())


def _clear(state_dict: StateDict) -> None:
    for tensor in leaves(state_dict).values():
        tensor.reshape(-1).view(torch.uint8).zero_()


def _smallest_part(state_dict: StateDict) -> StateDict:
    """A state dict with only the smallest tensor. If there are several, all ranks take the first."""
    found = leaves(state_dict)
    path = min(found, key=lambda path: found[path].nbytes)
    value: Any = state_dict
    for key in path:
        value = value[key]
    for key in reversed(path):
        value = {key: value}
    part: StateDict = value
    return part


def _checksums(state_dict: StateDict) -> dict[tuple[str, ...], int]:
    return {
        path: crc32(memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data))
        for path, tensor in leaves(state_dict).items()
    }


def _quietly(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    warnings.simplefilter("ignore")  # deprecation warnings of other packages
    return function(*args)
