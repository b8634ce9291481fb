"""One save or load in a process of its own: seconds, CPU seconds, memory.

A save ends when the files and their directory are durable: what a writer has not synced is synced within its time. A
load starts with the files out of the page cache and memory that is in use already, and its result is compared with
what was saved. Both start when the file system is done with what was written and removed before: one that discards
what it frees (mounted with ``discard``) does so in its next commit, which would be the next writer's. What the first
call of a process imports and starts is no part of either. CPU seconds are those of the process, its threads and its
children; the kernel's own threads, which write back the page cache and drive loop devices, are not counted for anybody.
Memory is the most resident memory above that before the call, of the process itself; buffers that a writer keeps from
an earlier save are not counted again.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from benchmarks.drive import probe
from benchmarks.drive.contenders import OURS, READERS, STOCK_READER, WRITERS
from benchmarks.drive.probe import Probe
from benchmarks.drive.shapes import StateDict, state_dict_of
from benchmarks.simulation.stopwatch import Stopwatch
from robust_dcp.plan.cache import PLANS
from robust_dcp.storage.records.checksum import crc32

__all__ = ["Figures", "in_new_process", "load", "probe_load", "probe_save", "save"]


class Figures(NamedTuple):
    """Of one save or load."""

    nbytes: int
    items: int
    seconds: float
    cpu_seconds: float
    peak_nbytes: int


_LOAD_PARTS = (OURS, STOCK_READER, "torch HuggingFaceStorageReader")
"""Those that load one tensor of a checkpoint if asked for one. The others are measured with their first call."""

_CONTEXT = multiprocessing.get_context("forkserver")
# Processes start with torch imported, and from a process that has done nothing else.
_CONTEXT.set_forkserver_preload(["benchmarks.drive.measurement"])


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` in a process that has not run anything before.

    Raises:
        BrokenProcessPool: the process died, of a lack of memory for instance.
    """
    with ProcessPoolExecutor(1, mp_context=_CONTEXT) as pool:
        return pool.submit(_quietly, function, args).result()


def save(writer: str, shape: str, nbytes: int, path: str) -> Figures:
    """Save into ``path``, which stays."""
    chosen = WRITERS[writer]
    state_dict = state_dict_of(shape, nbytes)
    warm_up = {"warm_up": torch.zeros(1)}
    for prepared in (warm_up, state_dict):
        chosen.prepare(prepared, path)
        if prepared is warm_up:
            chosen.save(prepared, path)
            shutil.rmtree(path)
            PLANS.clear()
    with _measured(_nbytes(state_dict), len(state_dict)) as figures:
        chosen.save(state_dict, path)
        make_durable(path)
    return figures[0]


def load(reader: str, shape: str, nbytes: int, path: str) -> Figures:
    """Load from ``path``, cold.

    Raises:
        ValueError: something else was loaded than was saved.
    """
    state_dict = state_dict_of(shape, nbytes)
    expected = _checksums(state_dict)
    for tensor in state_dict.values():
        tensor.reshape(-1).view(torch.uint8).zero_()
    if reader in _LOAD_PARTS:
        first = min(state_dict, key=lambda name: state_dict[name].nbytes)
        READERS[reader].load({first: state_dict[first]}, path)
        state_dict[first].reshape(-1).view(torch.uint8).zero_()
    evict(path)
    with _measured(_nbytes(state_dict), len(state_dict)) as figures:
        READERS[reader].load(state_dict, path)
    found = _checksums(state_dict)
    if found != expected:
        wrong = [name for name, value in expected.items() if found.get(name) != value]
        raise ValueError(f"{reader} loaded {len(wrong)} of {len(expected)} tensors wrongly, {wrong[0]} for one")
    return figures[0]


def probe_save(chosen: Probe, nbytes: int, path: str) -> Figures:
    """Write as many bytes to ``path`` as the drive can take; the files stay."""
    source = probe.source_of(nbytes)
    with _measured(len(source), chosen.threads) as figures:
        probe.write(path, source, chosen)
        make_durable(path)
    return figures[0]


def probe_load(chosen: Probe, nbytes: int, path: str) -> Figures:
    """Read what :func:`probe_save` wrote, cold."""
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
    """What is done within; the list has the figures afterwards."""
    found: list[Figures] = []
    os.sync()
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


def _nbytes(state_dict: StateDict) -> int:
    return sum(tensor.nbytes for tensor in state_dict.values())


def _checksums(state_dict: StateDict) -> dict[str, int]:
    return {
        name: crc32(memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data))
        for name, tensor in state_dict.items()
    }


def _quietly(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    warnings.simplefilter("ignore")  # what others' packages say of their own future
    return function(*args)
