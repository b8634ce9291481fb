"""Measures what it costs to verify slices: the reads of a reshard with checksums, without them, and by stock.

Run it for a table: ``python -m benchmarks.bench_slices --gib 2 --json slices.json``. One process saves tensors of 64
MiB. Then it reads the part of each tensor that one of ``n`` ranks would read: rows (``Shard(0)``) or columns
(``Shard(1)``). All contenders read the same in turn. They read from the page cache, so the time for checksums is not
hidden by a slow disk. The table compares the bytes that the reader asked the system for with the bytes that were
wanted.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import robust_dcp
from benchmarks.ranks import show
from robust_dcp import RobustReader
from robust_dcp.storage.files.disk import OpenFile
from robust_dcp.storage.files.posix_disk import PosixDisk

__all__ = ["main"]

Row = dict[str, Any]

_ROWS, _WIDTH = 16384, 1024
_CASES = (("Shard(0)", 2, 1), ("Shard(0)", 3, 1), ("Shard(0)", 8, 3), ("Shard(1)", 4, 1))
_RATIOS = {
    "case": "case",
    "speed": "speed, of that without checksums",
    "bytes": "bytes read, of those wanted",
    "stock_cpu": "CPU time of stock, of ours",
}
_COSTS = {
    "case": "case",
    "verified_s": "verified, s",
    "without_s": "without, s",
    "verified_cpu_s": "verified, CPU s",
    "without_cpu_s": "without, CPU s",
    "stock_cpu_s": "stock, CPU s",
    "unverified": "bytes not verified",
}


class _Counting(PosixDisk):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        self.read_nbytes = 0

    def pread_into(self, file: OpenFile, buffer: Any, offset: int) -> int:
        found = super().pread_into(file, buffer, offset)
        self.read_nbytes += found
        return found


class _Planner(DefaultLoadPlanner):
    """Gives the slices' targets to the reader."""

    def __init__(self, targets: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._targets[read_item.storage_index.fqn]


class _Slices:
    """The parts of all tensors that rank ``rank`` of ``ranks`` reads."""

    def __init__(self, names: list[str], dimension: int, ranks: int, rank: int) -> None:
        size = (_ROWS, _WIDTH)[dimension]
        begin, end = rank * size // ranks, (rank + 1) * size // ranks
        self._offsets = torch.Size([begin, 0] if dimension == 0 else [0, begin])
        self._lengths = torch.Size([end - begin, _WIDTH] if dimension == 0 else [_ROWS, end - begin])
        self.targets = {name: torch.zeros(self._lengths) for name in names}

    @property
    def nbytes(self) -> int:
        return sum(target.nbytes for target in self.targets.values())

    def read(self, reader: Any) -> tuple[float, float]:
        """Read the slices. Returns the wall time and the CPU time in seconds."""
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, True)
        stored = {index.fqn: index for index in metadata.storage_data}
        items = [
            ReadItem(LoadItemType.TENSOR, stored[name], torch.Size([0, 0]), stored[name], self._offsets, self._lengths)
            for name in self.targets
        ]
        seconds, cpu = time.perf_counter(), _cpu_seconds()
        reader.read_data(LoadPlan(items), _Planner(self.targets)).wait()
        return time.perf_counter() - seconds, _cpu_seconds() - cpu


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _measured(directory: str, names: list[str], case: tuple[str, int, int], repeats: int) -> Row:
    kind, ranks, rank = case
    slices = _Slices(names, int(kind[-2]), ranks, rank)
    found: dict[str, list[tuple[float, float]]] = {"verified": [], "without": [], "stock": []}
    for number in range(repeats + 1):
        disk = _Counting()
        readers = {
            "verified": RobustReader(directory, disk=disk, direct=False),
            "without": RobustReader(directory, direct=False, verify_checksums=False),
            "stock": FileSystemReader(directory),
        }
        for name, reader in readers.items():
            cost = slices.read(reader)
            if number:  # the first turn does not count, because it allocates the targets' memory
                found[name].append(cost)
    seconds = {name: statistics.median(each[0] for each in costs) for name, costs in found.items()}
    cpu = {name: statistics.median(each[1] for each in costs) for name, costs in found.items()}
    return {
        "case": f"{kind}, one of {ranks} ranks",
        "speed": round(seconds["without"] / seconds["verified"], 2),
        "bytes": round(disk.read_nbytes / slices.nbytes, 4),
        "stock_cpu": round(cpu["stock"] / cpu["verified"], 1),
        **{f"{name}_s": round(seconds[name], 3) for name in ("verified", "without")},
        **{f"{name}_cpu_s": round(cpu[name], 3) for name in cpu},
        "unverified": readers["verified"].unverified_nbytes,  # type: ignore[attr-defined]
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark with these command line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="of the checkpoint")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", help="where the checkpoint is made")
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "torch.distributed is")
    with tempfile.TemporaryDirectory(dir=options.directory) as base:
        directory = os.path.join(base, "checkpoint")
        tensors = {f"w{n}": torch.rand(_ROWS, _WIDTH) for n in range(max(1, round(options.gib * 16)))}
        robust_dcp.save(tensors, checkpoint_id=directory, no_dist=True)
        rows = [_measured(directory, list(tensors), case, options.repeats) for case in _CASES]
    show(_RATIOS, rows, None)
    show(_COSTS, rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
