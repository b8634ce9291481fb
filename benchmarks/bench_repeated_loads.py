"""Loads one checkpoint several times with our reader and with stock's, to see what the page cache does for each.

``python -m benchmarks.bench_repeated_loads --path /data --json loads.json``. Each of the two loads what it has saved
itself, in turns, on ranks of this machine. Before the ``first`` load the files are not in the page cache. ``second``
and ``third`` follow, and find there what the load before has left. Before ``warm`` all files are in the cache.

``x stock`` is stock's time for the same load in the same run. ``copy and checksum`` is a lower limit for a warm load:
one thread of each rank reads the same number of bytes, 1 MiB at a time, into memory that is in use, and checksums them.
Figures are medians. Seconds are those of the slowest rank. CPU seconds and bytes from the device are sums.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.drive.contenders import OURS, READERS, STOCK, STOCK_READER, WRITERS
from benchmarks.drive.measurement import evict
from benchmarks.drive.shapes import FSDP2, StateDict, leaves, state_dict_of
from benchmarks.ranks import run, show
from robust_dcp.storage.records.checksum import crc32

__all__ = ["CASES", "LOADS", "measure", "rows_of"]

_GIB = 1 << 30
_MIB = 1 << 20

BOUND = "copy and checksum"
LOADS = ("first", "second", "third", "warm")
CASES = ("tensors", "moe", FSDP2, "replicas")
"""``tensors``: each rank has 8 tensors of equal size. ``replicas``: all ranks read the same 8. The others are shapes of
``benchmarks.storage``, and each rank has its own part."""

_COLUMNS = {
    "case": "case",
    "ranks": "ranks",
    "who": "who",
    "load": "load",
    "seconds": "s",
    "to_stock": "x stock",
    "cpu_seconds_per_gib": "CPU-s/GiB",
    "device_gib": "GiB from device",
    "gib": "GiB",
}


class Sample(NamedTuple):
    """One load of one rank."""

    seconds: float
    cpu_seconds: float
    device_nbytes: int


Measured = dict[tuple[str, str], list[Sample]]
"""The samples of all rounds by (who, load)."""


def measure(directory: str, case: str, nbytes: int, rounds: int) -> tuple[int, Measured]:
    """Measure the loads of this rank. All ranks call it.

    Args:
        nbytes: the bytes of all ranks together.

    Returns:
        The bytes of this rank's tensors, and the samples.

    Raises:
        ValueError: the loaded values are not those that were saved.
    """
    rank = dist.get_rank()
    state_dict = _state_dict(case, nbytes)
    tensors = list(leaves(state_dict).values())
    expected = _checksums(tensors)
    held_nbytes = sum(tensor.nbytes for tensor in tensors)
    loads: dict[str, tuple[str, Callable[[], Any]]] = {}
    for who, writer, reader in ((OURS, OURS, OURS), ("stock", STOCK[2], STOCK_READER)):
        path = os.path.join(directory, who)
        WRITERS[writer].save(state_dict, path)
        loads[who] = path, lambda path=path, reader=reader: READERS[reader].load(state_dict, path)
    memory = np.ones(held_nbytes, dtype=np.uint8)
    loads[BOUND] = loads[OURS][0], lambda: _copy_and_checksum(loads[OURS][0], memory)
    found: Measured = defaultdict(list)
    for _ in range(rounds):
        for who, (path, load) in loads.items():
            for what in LOADS if who != BOUND else LOADS[-1:]:
                for tensor in tensors:
                    tensor.reshape(-1).view(torch.uint8).fill_(0)
                if rank == 0 and what == "first":
                    evict(path)
                elif rank == 0 and what == "warm":
                    _read_all(path)
                dist.barrier()
                found[who, what].append(_sample(load))
                dist.barrier()
                if who != BOUND and _checksums(tensors) != expected:
                    raise ValueError(
                        f"rank {rank}: the {what} load of {case} by {who} gave other bytes than were saved"
                    )
    return held_nbytes, dict(found)


def rows_of(case: str, ranks: list[tuple[int, Measured]]) -> list[dict[str, Any]]:
    """Make a row for each reader and load, from the results of :func:`measure` on each rank."""
    gib = sum(nbytes for nbytes, _ in ranks) / _GIB
    rows = []
    for who, load in ranks[0][1]:
        rounds = list(zip(*(samples[who, load] for _, samples in ranks), strict=True))
        rows.append(
            {
                "case": case,
                "ranks": len(ranks),
                "who": who,
                "load": load,
                "seconds": statistics.median(max(each.seconds for each in one) for one in rounds),
                "cpu_seconds_per_gib": statistics.median(sum(each.cpu_seconds for each in one) for one in rounds) / gib,
                "device_gib": statistics.median(sum(each.device_nbytes for each in one) for one in rounds) / _GIB,
                "gib": gib,
            }
        )
    of_stock = {row["load"]: row["seconds"] for row in rows if row["who"] == "stock"}
    return [{**row, "to_stock": of_stock[row["load"]] / row["seconds"]} for row in rows]


def _state_dict(case: str, nbytes: int) -> StateDict:
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    if case == FSDP2:
        return state_dict_of(case, nbytes)
    if case == "moe":
        return {f"rank.{rank}.{name}": tensor for name, tensor in state_dict_of(case, nbytes // n_ranks).items()}
    seed = 0 if case == "replicas" else rank
    data = np.random.default_rng(seed).integers(0, 1 << 62, nbytes // n_ranks // 64, dtype=np.int64)
    return {f"layer.{number}.{seed}": torch.from_numpy(data).clone() for number in range(8)}


def _sample(load: Callable[[], Any]) -> Sample:
    device_nbytes = _device_nbytes()
    started, cpu_started = time.perf_counter(), time.process_time()
    load()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return Sample(seconds, cpu_seconds, _device_nbytes() - device_nbytes)


def _device_nbytes() -> int:
    """The bytes that were read from devices for this process."""
    with open("/proc/self/io", encoding="ascii") as file:
        return int(dict(line.split(": ") for line in file.read().splitlines())["read_bytes"])


def _read_all(path: str) -> None:
    buffer = bytearray(_MIB)
    for name in os.listdir(path):
        with open(os.path.join(path, name), "rb") as file:
            while file.readinto(buffer):
                pass


def _copy_and_checksum(path: str, memory: np.ndarray[Any, Any]) -> None:
    """Fill ``memory`` with the bytes of all files in ``path``, one after the other, and again from the first."""
    view = memoryview(memory)
    done = 0
    for name in sorted(os.listdir(path)):
        fd = os.open(os.path.join(path, name), os.O_RDONLY)
        try:
            offset = 0
            while done < len(view):
                part = view[done : done + _MIB]
                found = os.preadv(fd, [part], offset)
                if not found:
                    break
                crc32(part[:found])
                offset, done = offset + found, done + found
        finally:
            os.close(fd)


def _checksums(tensors: list[torch.Tensor]) -> list[int]:
    return [crc32(memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)) for tensor in tensors]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the drive (default: %(default)s)")
    parser.add_argument("--gib", type=float, default=1.0, help="of all ranks together (default: %(default)s)")
    parser.add_argument("--ranks", default="1,2", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES), help="default: %(default)s")
    parser.add_argument("--json", help="write all rows there as well")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in options.cases.split(","):
        for n_ranks in map(int, options.ranks.split(",")):
            directory = tempfile.mkdtemp(prefix="repeated-loads-", dir=options.path)
            try:
                found = run(n_ranks, measure, directory, case, int(options.gib * _GIB), options.rounds)
                rows += rows_of(case, found)
            finally:
                shutil.rmtree(directory)
    show(_COLUMNS, rows, options.json)


if __name__ == "__main__":
    main()
