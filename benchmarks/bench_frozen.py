"""Measures what ``share_unchanged`` saves, and what it costs, on real file systems.

Run it for a table: ``python -m benchmarks.bench_frozen --directory /xfs --directory /btrfs --json frozen.json``.

A job saves twice, to two directories. Between the saves a share of the tensors stays as it is (frozen) and the others
change. Each case runs with the option off and on, in turn. The table says what the second save took: bytes that the
device wrote and read (from the kernel's counters of that device), CPU time of the process, and wall time. Other writers
to the same device count as well, so give each file system a device of its own.

The second table says what other proofs than reading and comparing would cost: hashes of all bytes in every save.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import robust_dcp
from benchmarks.ranks import show
from robust_dcp import RobustWriter
from robust_dcp.storage.records.checksum import crc32

__all__ = ["device_of", "main"]

Row = dict[str, Any]

_TENSORS = 100
_MIB = 1 << 20
_SECTOR_NBYTES = 512
_COLUMNS = {
    "file_system": "file system",
    "frozen": "frozen",
    "shares": "shares",
    "seconds": "s",
    "cpu_seconds": "CPU s",
    "written_mib": "written, MiB",
    "read_mib": "read, MiB",
    "unchanged_mib": "not written again, MiB",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Then write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", action="append", help="where to save; once for each file system")
    parser.add_argument("--gib", type=float, default=1.0, help="size of a checkpoint")
    parser.add_argument("--frozen", type=float, nargs="+", default=[0.0, 0.5, 0.9, 0.99], help="shares of frozen bytes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="where to write all figures")
    options = parser.parse_args(arguments)
    rows = []
    for directory in options.directory or [tempfile.gettempdir()]:
        for frozen in options.frozen:
            rows += _measured(directory, int(options.gib * (1 << 30)), frozen, options.repeats)
    show(_COLUMNS, rows, None)
    proofs = _proofs()
    show({"proof": "proof", "cpu_seconds_per_gib": "CPU-s/GiB"}, proofs, None)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"saves": rows, "proofs": proofs}, file, indent=1)
    return 0


def _measured(directory: str, nbytes: int, frozen: float, repeats: int) -> list[Row]:
    state_dict = {f"w{n}": torch.rand(nbytes // _TENSORS // 4) for n in range(_TENSORS)}
    changing = list(state_dict)[: round(_TENSORS * (1 - frozen))]
    device, kind = device_of(directory)
    found: dict[bool, list[Row]] = {False: [], True: []}
    for _ in range(repeats):
        for shares, rows in found.items():
            place = tempfile.mkdtemp(prefix="frozen-", dir=directory)
            try:
                robust_dcp.save(state_dict, storage_writer=RobustWriter(f"{place}/1"))
                for name in changing:
                    state_dict[name].add_(1)
                rows.append(_one_save(state_dict, place, shares, device))
            finally:
                shutil.rmtree(place)
    return [
        {
            "file_system": kind,
            "frozen": f"{frozen:.0%}",
            "shares": "on" if shares else "off",
            **{name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]},
        }
        for shares, rows in found.items()
    ]


def _one_save(state_dict: dict[str, Any], place: str, shares: bool, device: str | None) -> Row:
    os.sync()
    before, used, began = _counters(device), _cpu_seconds(), time.perf_counter()
    writer = RobustWriter(f"{place}/2", share_unchanged=shares, previous=f"{place}/1")
    report = robust_dcp.save(state_dict, storage_writer=writer)
    seconds, used = time.perf_counter() - began, _cpu_seconds() - used
    os.sync()
    read, written = (after - first for after, first in zip(_counters(device), before, strict=True))
    return {
        "seconds": seconds,
        "cpu_seconds": used,
        "written_mib": written / _MIB,
        "read_mib": read / _MIB,
        "unchanged_mib": report.unchanged_nbytes / _MIB,
    }


def device_of(directory: str) -> tuple[str | None, str]:
    """The counters of the device that a directory lies on (``None`` if it has none), and its kind of file system."""
    path = os.path.realpath(directory)
    best: tuple[int, str, str] = (-1, "", "?")
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            fields = line.split()
            mount, (kind, source) = fields[4], fields[fields.index("-") + 1 :][:2]
            if os.path.commonpath([mount, path]) == mount and len(mount) >= best[0]:
                best = len(mount), source, kind
    _, source, kind = best
    try:
        number = os.stat(source).st_rdev
    except OSError:
        return None, kind
    counters = f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat"
    return (counters if os.path.exists(counters) else None), kind


def _counters(device: str | None) -> tuple[float, float]:
    """Bytes read and written so far; not a number without a device."""
    if device is None:
        return float("nan"), float("nan")
    with open(device, encoding="ascii") as file:
        fields = file.read().split()
    return int(fields[2]) * _SECTOR_NBYTES, int(fields[6]) * _SECTOR_NBYTES


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _proofs() -> list[Row]:
    data = np.random.default_rng(0).integers(0, 255, 64 * _MIB, dtype=np.uint8)
    words, same = data.view(np.uint64), data.copy().view(np.uint64)
    proofs: dict[str, Callable[[], object]] = {
        "CRC-32 (computed anyway)": lambda: crc32(memoryview(data)),
        "compare with bytes that were read back": lambda: np.array_equal(words, same),
        "BLAKE2b-128": lambda: hashlib.blake2b(data, digest_size=16).digest(),
        "SHA-256": lambda: hashlib.sha256(data).digest(),
    }
    try:
        import xxhash
    except ImportError:
        pass
    else:
        proofs["XXH3-128"] = lambda: xxhash.xxh3_128_digest(memoryview(data))
    rows = []
    for name, prove in proofs.items():
        prove()
        used = _cpu_seconds()
        for _ in range(4):
            prove()
        rows.append({"proof": name, "cpu_seconds_per_gib": round((_cpu_seconds() - used) * 4, 3)})
    return rows


if __name__ == "__main__":
    sys.exit(main())
