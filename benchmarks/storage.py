"""Measures how fast ours and torch write and read checkpoints, compared with the drive itself.

``python -m benchmarks.storage --path /data --gib 2 --rounds 3 --json storage.json``

All contenders take part in one run, one after the other in each round. Each save and load has its own process, or one
for each rank of the shape:

* A save ends when the files and their directory are durable. If a writer does not sync them, they are synced within its
  time. Before a load the files are not in the page cache, and the target memory is in use already. The loaded values
  are compared with the saved ones.
* Both start when the file system has finished earlier writes and removals. Imports and other work of the first call in
  a process do not count.
* CPU seconds are those of the process, its threads and its children. The kernel's own threads do not count for any
  contender. Memory is the peak of the resident memory above that before the call.
* With several ranks, seconds are those of the last rank to end, and all other figures are sums.
* The raw probe writes and reads with direct I/O, each thread a file, without formats, checksums or plans.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import sys
import tempfile
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from benchmarks.measuring import Row, Stopwatch, evict, in_new_process, make_durable, raw_seconds, run, show, write_json
from benchmarks.shapes import SHAPES, StateDict, leaves, nbytes_of, ranks_of, state_dict_of

__all__ = ["main"]

_GIB = 1 << 30
_PROBES = {f"raw probe, {threads} threads": threads for threads in (1, 2, 4)}
_STOCK = "stock, 1 thread"

_COLUMNS = {
    "shape": "shape",
    "what": "what",
    "who": "who",
    "checkpoint": "checkpoint by",
    "to_probe": "x raw probe",
    "to_stock_best": "x stock's best",
    "gib_per_second": "GiB/s",
    "cpu_seconds_per_gib": "CPU-s/GiB",
    "peak_mib": "extra MiB",
    "seconds": "s",
}


class Figures(NamedTuple):
    """The figures of one save or load by one process, or by all ranks together."""

    nbytes: int
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


def _ours(layout: str) -> Callable[[StateDict, str], None]:
    def save(state_dict: StateDict, path: str) -> None:
        writer = robust_dcp.RobustWriter(path, layout=layout)
        robust_dcp.save(state_dict, storage_writer=writer, no_dist=_is_alone())

    return save


def _stock(threads: int) -> Callable[[StateDict, str], None]:
    def save(state_dict: StateDict, path: str) -> None:
        writer = dcp.FileSystemWriter(path, thread_count=threads)
        dcp.save(state_dict, storage_writer=writer, no_dist=_is_alone())

    return save


WRITERS: dict[str, Callable[[StateDict, str], None]] = {
    "ours": _ours("torch"),
    "ours, repeated save": _ours("torch"),
    "ours, safetensors": _ours("safetensors"),
    _STOCK: _stock(1),  # its own default
    "stock, 4 threads": _stock(4),
}
"""Each saves a state dict into a directory that does not exist yet. A repeated save follows one of equal structure."""

READERS: dict[str, Callable[[StateDict, str], object]] = {
    "ours": lambda state_dict, path: robust_dcp.load(
        state_dict, storage_reader=robust_dcp.RobustReader(path), no_dist=_is_alone()
    ),
    "stock": lambda state_dict, path: dcp.load(
        state_dict, storage_reader=dcp.FileSystemReader(path), no_dist=_is_alone()
    ),
}
"""Each loads a directory into the tensors of a state dict, in place."""

_LOADED = ("ours", _STOCK)
"""The writers whose checkpoints are loaded, by both readers."""


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
            make_durable(path)
    return figures[0]


def load(reader: str, shape: str, nbytes: int, path: str) -> Figures:
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
        make_durable(path)
        evict(path)
    with _measured(state_dict) as figures:
        READERS[reader](state_dict, path)
    loaded = _checksums(state_dict)
    if loaded != expected:
        wrong = [".".join(name) for name, value in expected.items() if loaded.get(name) != value]
        raise ValueError(f"{reader} loaded {len(wrong)} of {len(expected)} tensors wrongly, {wrong[0]} for one")
    return figures[0]


@contextmanager
def _measured(state_dict: StateDict) -> Iterator[list[Figures]]:
    """Measure the block. Afterwards the list has the figures."""
    measured: list[Figures] = []
    if _is_first():
        os.sync()
    if not _is_alone():
        dist.barrier()
    watch, before = Stopwatch(), os.times()
    watch.start()
    yield measured
    watch.stop()
    after = os.times()
    children = after.children_user + after.children_system - before.children_user - before.children_system
    nbytes = sum(tensor.nbytes for tensor in leaves(state_dict).values())
    measured.append(Figures(nbytes, watch.wall_seconds, watch.cpu_seconds + children, watch.peak_nbytes))


def _is_first() -> bool:
    return _is_alone() or dist.get_rank() == 0


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
                try:
                    if who in _PROBES:
                        size = nbytes_of(shape, nbytes)
                        for what, seconds in in_new_process(raw_seconds, size, _PROBES[who], path).items():
                            measured[Case(shape, what, who)].append(Figures(size, seconds, 0.0, 0))
                        continue
                    saved = run(ranks, save, who, shape, nbytes, path, has_group=ranks > 1)
                    measured[Case(shape, "save", who)].append(_together(saved))
                    for reader in READERS if who in _LOADED else ():
                        loaded = run(ranks, load, reader, shape, nbytes, path, has_group=ranks > 1)
                        measured[Case(shape, "load", reader, who)].append(_together(loaded))
                finally:
                    shutil.rmtree(path, ignore_errors=True)
    return measured


def rows_of(measured: dict[Case, list[Figures]]) -> list[Row]:
    """A row for each case: medians over the rounds, the peak of memory, and ratios within this run.

    ``to_probe`` is the speed relative to the fastest raw probe, and ``to_stock_best`` to stock's best thread count, of
    loads to stock's reader on stock's checkpoint.
    """
    seconds = {case: statistics.median(each.seconds for each in rounds) for case, rounds in measured.items()}
    rows = []
    for case in sorted(measured, key=lambda case: (SHAPES.index(case.shape), case.what == "load")):
        rounds, gib = measured[case], measured[case][0].nbytes / _GIB

        def ratio(case: Case, *others: Case) -> float | str:
            compared = [seconds[other] for other in others if other in seconds]
            return min(compared) / seconds[case] if compared else ""

        stock = [Case(case.shape, "save", name) for name in WRITERS if name.startswith("stock")]
        if case.what == "load":
            stock = [Case(case.shape, "load", "stock", _STOCK)]
        row = {
            **case._asdict(),
            "to_probe": ratio(case, *(Case(case.shape, case.what, name) for name in _PROBES)),
            "to_stock_best": ratio(case, *stock),
            "gib_per_second": gib / seconds[case],
            "seconds": seconds[case],
            "cpu_seconds_per_gib": statistics.median(each.cpu_seconds for each in rounds) / gib,
            "peak_mib": max(each.peak_nbytes for each in rounds) >> 20,
        }
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the drive (default: %(default)s)")
    parser.add_argument("--gib", type=float, default=2.0, help="of each checkpoint (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, choices=SHAPES)
    parser.add_argument("--who", nargs="+", default=list(WRITERS), choices=list(WRITERS))
    parser.add_argument("--json", help="write all figures there as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="storage-", dir=options.path) as directory:
        rows = rows_of(measure(directory, options))
    show(_COLUMNS, rows)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
