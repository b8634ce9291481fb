"""Measures how fast ours and torch write and read checkpoints, compared with the drive itself.

``python -m benchmarks.storage --path /data --gib 2 --rounds 3 --json storage.json``

All contenders take part in one run, one after the other in each round. ``benchmarks/fastdisk.sh`` makes a drive that is
faster than this machine's. Each save and load has its own process, or one for each rank of the shape:

* A save ends when the files and their directory are durable. If a writer does not sync them, they are synced within its
  time. Before a load the files are not in the page cache (``--cached`` leaves them there), and the target memory is in
  use already. The loaded values are compared with the saved ones.
* Both start when the file system has finished earlier writes and removals. Imports and other work of the first call in
  a process do not count.
* CPU seconds are those of the process, its threads and its children. The kernel's own threads do not count for any
  contender. Memory is the peak of the resident memory above that before the call.
* With several ranks, seconds are those of the last rank to end, and all other figures are sums.
* The raw probe writes and reads with direct I/O, each thread a file, without formats, checksums or plans.
"""

from __future__ import annotations

import argparse
import errno
import logging
import mmap
import os
import platform
import shutil
import statistics
import sys
import tempfile
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

import robust_dcp
from benchmarks.measuring import Row, Stopwatch, in_new_process, run, show, write_json
from benchmarks.shapes import SHAPES, StateDict, leaves, nbytes_of, ranks_of, state_dict_of

__all__ = ["main"]

_GIB = 1 << 30
_PAGE_NBYTES = 4096
_PROBE_BLOCK_NBYTES = 8 << 20
_PROBES = {f"raw probe, {threads} threads": threads for threads in (1, 2, 4)}
_STOCK = "stock, 1 thread"

_COLUMNS = {
    "shape": "shape",
    "what": "what",
    "who": "who",
    "checkpoint": "checkpoint by",
    "to_probe": "x raw probe",
    "to_stock": "x stock",
    "to_stock_best": "x stock's best",
    "gib_per_second": "GiB/s",
    "cpu_seconds_per_gib": "CPU-s/GiB",
    "peak_mib": "extra MiB",
    "seconds": "s",
    "items": "items",
}


class Figures(NamedTuple):
    """The figures of one save or load by one process, or by all ranks together."""

    nbytes: int
    items: int
    seconds: float
    cpu_seconds: float
    peak_nbytes: int


class Case(NamedTuple):
    """What was measured. For a load ``checkpoint`` is the writer of the checkpoint. For a save it is empty."""

    shape: str
    what: str
    who: str
    checkpoint: str = ""


def _is_alone() -> bool:
    return not dist.is_initialized()


def _ours(state_dict: StateDict, path: str, **options: Any) -> None:
    robust_dcp.save(state_dict, storage_writer=robust_dcp.RobustWriter(path, **options), no_dist=_is_alone())


def _ours_safetensors(state_dict: StateDict, path: str) -> None:
    _ours(state_dict, path, layout="safetensors")


def _stock(threads: int) -> Callable[[StateDict, str], None]:
    def save(state_dict: StateDict, path: str) -> None:
        dcp.save(
            state_dict, storage_writer=dcp.FileSystemWriter(path, thread_count=threads), no_dist=_is_alone()
        )  # stock's own default has one thread

    return save


def _stock_cached_plan(state_dict: StateDict, path: str) -> None:
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state_dict, storage_writer=dcp.FileSystemWriter(path), planner=planner, no_dist=_is_alone())


WRITERS: dict[str, Callable[[StateDict, str], None]] = {
    "ours": _ours,
    "ours, repeated save": _ours,
    "ours, safetensors": _ours_safetensors,
    _STOCK: _stock(1),
    "stock, 2 threads": _stock(2),
    "stock, 4 threads": _stock(4),
    "stock, repeated save": _stock_cached_plan,
    "stock, HuggingFaceStorageWriter": lambda state_dict, path: dcp.save(
        state_dict, storage_writer=HuggingFaceStorageWriter(path), no_dist=True
    ),
}
"""Each saves a state dict into a directory that does not exist yet. A repeated save follows one of equal structure."""

READERS: dict[str, Callable[[StateDict, str], None]] = {
    "ours": lambda state_dict, path: robust_dcp.load(
        state_dict, storage_reader=robust_dcp.RobustReader(path), no_dist=_is_alone()
    ),
    "stock": lambda state_dict, path: dcp.load(
        state_dict, storage_reader=dcp.FileSystemReader(path), no_dist=_is_alone()
    ),
    "stock, HuggingFaceStorageReader": lambda state_dict, path: dcp.load(
        state_dict, storage_reader=HuggingFaceStorageReader(path), no_dist=True
    ),
}
"""Each loads a directory into the tensors of a state dict, in place."""

_READERS_OF = {
    "ours": ("ours", "stock"),
    "ours, safetensors": ("ours", "stock, HuggingFaceStorageReader"),
    _STOCK: ("ours", "stock"),
    "stock, HuggingFaceStorageWriter": ("ours", "stock, HuggingFaceStorageReader"),
}


def save(writer: str, shape: str, nbytes: int, path: str) -> Figures:
    """Measure a save into ``path``. The files stay there."""
    warnings.simplefilter("ignore")  # deprecation warnings of torch
    state_dict = state_dict_of(shape, nbytes)
    repeats = writer.endswith("repeated save")
    for prepared in (state_dict,) if repeats else ({"warm_up": torch.zeros(1)},):
        WRITERS[writer](prepared, path)
        if _is_first():
            shutil.rmtree(path)
        if not _is_alone():
            dist.barrier()
    with _measured(state_dict) as figures:
        WRITERS[writer](state_dict, path)
        if _is_first():  # when save returns, all ranks have written
            _make_durable(path)
    return figures[0]


def load(reader: str, shape: str, nbytes: int, path: str, is_cached: bool) -> Figures:
    """Measure a load from ``path``.

    Raises:
        ValueError: the loaded values are not those that were saved.
    """
    warnings.simplefilter("ignore")
    logging.getLogger("robust_dcp").setLevel(logging.ERROR)  # the warm-up loads a part of the keys
    state_dict = state_dict_of(shape, nbytes)
    expected = _checksums(state_dict)
    _clear(state_dict)
    READERS[reader](_smallest_part(state_dict), path)
    _clear(state_dict)
    if _is_first():
        _make_durable(path)
        if not is_cached:
            _evict(path)
    with _measured(state_dict) as figures:
        READERS[reader](state_dict, path)
    loaded = _checksums(state_dict)
    if loaded != expected:
        wrong = [".".join(name) for name, value in expected.items() if loaded.get(name) != value]
        raise ValueError(f"{reader} loaded {len(wrong)} of {len(expected)} tensors wrongly, {wrong[0]} for one")
    return figures[0]


def probe(nbytes: int, threads: int, path: str, is_cached: bool) -> tuple[Figures, Figures]:
    """Measure raw direct writes and reads. If the file system refuses ``O_DIRECT``, the page cache is used.

    The memory is as large as a checkpoint, because a buffer that stays in the processor's cache would be faster than
    any checkpoint can be.
    """
    memory = mmap.mmap(-1, -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES)
    memory[:] = os.urandom(_PAGE_NBYTES) * (len(memory) // _PAGE_NBYTES)
    each = -(-len(memory) // (threads * _PROBE_BLOCK_NBYTES)) * _PROBE_BLOCK_NBYTES
    os.makedirs(path)

    def move(number: int, flags: int, call: Callable[[int, list[memoryview], int], int]) -> None:
        begin, end = min(len(memory), number * each), min(len(memory), (number + 1) * each)
        fd = _open(os.path.join(path, f"probe-{number}"), flags)
        try:
            if flags != os.O_RDONLY and end > begin and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, end - begin)
            with memoryview(memory) as view:
                for at in range(begin, end, _PROBE_BLOCK_NBYTES):
                    part = view[at : min(end, at + _PROBE_BLOCK_NBYTES)]
                    if call(fd, [part], at - begin) != len(part):
                        raise OSError(errno.EIO, f"not all of {len(part)} bytes at offset {at - begin}")
            if flags != os.O_RDONLY:
                os.fsync(fd)
        finally:
            os.close(fd)

    with ThreadPoolExecutor(threads) as pool:
        with _measured({"memory": torch.frombuffer(memory, dtype=torch.uint8)}) as saved:
            list(pool.map(lambda number: move(number, os.O_WRONLY | os.O_CREAT, os.pwritev), range(threads)))
            _make_durable(path)
        if not is_cached:
            _evict(path)
        with _measured({"memory": torch.frombuffer(memory, dtype=torch.uint8)}) as loaded:
            list(pool.map(lambda number: move(number, os.O_RDONLY, os.preadv), range(threads)))
    return saved[0], loaded[0]


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)


@contextmanager
def _measured(state_dict: StateDict) -> Iterator[list[Figures]]:
    """Measure the block. Afterwards the list has the figures."""
    tensors = leaves(state_dict)
    measured: list[Figures] = []
    if _is_first():
        os.sync()
    if not _is_alone():
        dist.barrier()
    watch, before = Stopwatch(), os.times()
    watch.start()
    yield measured
    watch.lap("all")
    after, total = os.times(), watch.total
    children = after.children_user + after.children_system - before.children_user - before.children_system
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    measured.append(Figures(nbytes, len(tensors), total.wall_seconds, total.cpu_seconds + children, watch.peak_nbytes))


def _is_first() -> bool:
    return _is_alone() or dist.get_rank() == 0


def _make_durable(path: str) -> None:
    """Sync every file and directory below ``path``, and the name of ``path`` itself."""
    paths = [os.path.dirname(path)]
    for directory, _, files in os.walk(path):
        paths += [os.path.join(directory, name) for name in (*files, ".")]
    for each in paths:
        fd = os.open(each, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _evict(path: str) -> None:
    """Take the files below ``path`` out of the page cache."""
    for directory, _, files in os.walk(path) if hasattr(os, "posix_fadvise") else ():
        for name in files:
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _clear(state_dict: StateDict) -> None:
    for tensor in leaves(state_dict).values():
        tensor.reshape(-1).view(torch.uint8).zero_()


def _smallest_part(state_dict: StateDict) -> StateDict:
    """A state dict with only the smallest tensor. If there are several, all ranks take the first."""
    tensors = leaves(state_dict)
    path = min(tensors, key=lambda path: tensors[path].nbytes)
    value: Any = state_dict
    for key in path:
        value = value[key]
    for key in reversed(path):
        value = {key: value}
    part: StateDict = value
    return part


def _checksums(state_dict: StateDict) -> dict[tuple[str, ...], int]:
    return {
        path: zlib.crc32(memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data))
        for path, tensor in leaves(state_dict).items()
    }


def _together(ranks: list[Figures]) -> Figures:
    return Figures(
        nbytes=sum(each.nbytes for each in ranks),
        items=sum(each.items for each in ranks),
        seconds=max(each.seconds for each in ranks),
        cpu_seconds=sum(each.cpu_seconds for each in ranks),
        peak_nbytes=sum(each.peak_nbytes for each in ranks),
    )


def measure(directory: str, options: argparse.Namespace) -> dict[Case, list[Figures]]:
    """Measure all cases. Returns the figures of all rounds for each."""
    measured: dict[Case, list[Figures]] = defaultdict(list)
    nbytes, path = int(options.gib * _GIB), os.path.join(directory, "checkpoint")
    order = [*_PROBES, *options.who]
    for number in range(options.rounds):
        # Each round begins with another contender, so a drive that gets slower does so for all, also the raw probe.
        first = number * len(order) // options.rounds
        for shape in options.shapes:
            print(f"round {number + 1} of {options.rounds}: {shape}", file=sys.stderr)
            ranks = ranks_of(shape)
            for who in order[first:] + order[:first]:
                if ranks > 1 and "HuggingFace" in who:
                    continue  # it writes what one process holds
                try:
                    if who in _PROBES:
                        both = in_new_process(probe, nbytes_of(shape, nbytes), _PROBES[who], path, options.cached)
                        for what, figures in zip(("save", "load"), both, strict=True):
                            measured[Case(shape, what, who)].append(figures)
                        continue
                    saved = run(ranks, save, who, shape, nbytes, path, has_group=ranks > 1)
                    measured[Case(shape, "save", who)].append(_together(saved))
                    for reader in () if options.saves_only else _READERS_OF.get(who, ()):
                        if ranks > 1 and "HuggingFace" in reader:
                            continue
                        arguments = (reader, shape, nbytes, path, options.cached)
                        loaded = run(ranks, load, *arguments, has_group=ranks > 1)
                        measured[Case(shape, "load", reader, who)].append(_together(loaded))
                finally:
                    shutil.rmtree(path, ignore_errors=True)
    return measured


def rows_of(measured: dict[Case, list[Figures]]) -> list[Row]:
    """A row for each case: medians over the rounds, the peak of memory, and ratios within this run.

    ``to_probe`` is the speed relative to the fastest raw probe, ``to_stock`` to stock's default, and ``to_stock_best``
    to stock's best thread count. For loads the last two refer to stock's reader on stock's checkpoint.
    """
    seconds = {case: statistics.median(each.seconds for each in rounds) for case, rounds in measured.items()}
    rows = []
    for case in sorted(measured, key=lambda case: (SHAPES.index(case.shape), case.what == "load")):
        rounds, gib = measured[case], measured[case][0].nbytes / _GIB

        def ratio(case: Case, *others: Case) -> float | str:
            compared = [seconds[other] for other in others if other in seconds]
            return min(compared) / seconds[case] if compared else ""

        stock = [Case(case.shape, "save", name) for name in WRITERS if name.startswith("stock") and "thread" in name]
        if case.what == "load":
            stock = [Case(case.shape, "load", "stock", _STOCK)]
        row = {
            **case._asdict(),
            "items": rounds[0].items,
            "nbytes": rounds[0].nbytes,
            "to_probe": ratio(case, *(Case(case.shape, case.what, name) for name in _PROBES)),
            "to_stock": ratio(case, stock[0]),
            "to_stock_best": ratio(case, *stock),
            "gib_per_second": gib / seconds[case],
            "seconds": seconds[case],
            "cpu_seconds_per_gib": statistics.median(each.cpu_seconds for each in rounds) / gib,
            "peak_mib": max(each.peak_nbytes for each in rounds) >> 20,
            "rounds_seconds": [each.seconds for each in rounds],
        }
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the drive (default: %(default)s)")
    parser.add_argument("--name", help="what to call the drive in JSON (default: the path)")
    parser.add_argument("--gib", type=float, default=2.0, help="of each checkpoint (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, choices=SHAPES)
    parser.add_argument("--who", nargs="+", default=list(WRITERS), choices=list(WRITERS))
    parser.add_argument("--saves-only", action="store_true", help="no loads")
    parser.add_argument("--cached", action="store_true", help="load from the page cache")
    parser.add_argument("--json", help="write all figures there as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="storage-", dir=options.path) as directory:
        rows = rows_of(measure(directory, options))
    machine = {
        "drive": options.name or os.path.abspath(options.path),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gib": options.gib,
        "rounds": options.rounds,
        "cached": options.cached,
    }
    show(_COLUMNS, rows)
    write_json(options.json, {"machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
