"""Measures saves and loads of tensors on a CUDA device, compared with stock and with the limits of device and disk.

Run it for tables: ``make gpu``, or ``python -m benchmarks.gpu --gib 16 --json gpu.json``. There is one process and one
device. The limits are measured first: one large copy between the device and pinned memory in each direction, and direct
writes and reads of the file system. Ours and stock's follow in turn. Sizes shrink if the disk would take longer than
``--seconds`` for one save.

Without a CUDA device the CPU takes its place. This only shows that the program works, and the tables say so.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from benchmarks.measuring import Row, raw_seconds, show, write_json
from robust_dcp.staging.blocks import _KEPT, Block
from robust_dcp.staging.staging_buffers import STAGING

__all__ = ["main"]

_GIB = 1 << 30
_LIMIT_NBYTES = 256 << 20
_TENSORS = 64
_DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

_LIMITS = {"what": "what", "gib_per_second": "GiB/s"}
_COPIES = {"what": "what", "gib_per_second": "GiB/s", "share": "share of one large copy"}
_SAVES = {
    "what": "what",
    "seconds": "s",
    "gib_per_second": "GiB/s",
    "blocked_seconds": "blocked s",
    "cpu_seconds_per_gib": "CPU s/GiB",
    "ratio": "times less than stock",
    "pinned_mib": "pinned MiB",
}
_TRAINING = {"what": "what", "step_ms": "step, ms", "slower": "times slower", "lost_seconds": "lost s a save"}


def _synchronize() -> None:
    if _DEVICE.type == "cuda":
        torch.cuda.synchronize()


def _seconds(call: Callable[[], object], rounds: int = 5) -> float:
    """The median time of some calls, with their work on the device. A first call does not count."""
    found = []
    for number in range(rounds + 1):
        _synchronize()
        started = time.perf_counter()
        call()
        _synchronize()
        if number:
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def measure_limits(directory: str) -> list[Row]:
    """Copies between device and pinned memory, and direct I/O."""
    block = Block(_LIMIT_NBYTES)
    if _DEVICE.type == "cuda":
        block.pin()
    on_device = torch.zeros(_LIMIT_NBYTES, dtype=torch.uint8, device=_DEVICE)
    gib = _LIMIT_NBYTES / _GIB
    rows = [
        {"what": "device to host, one copy", "gib_per_second": gib / _seconds(lambda: block.tensor.copy_(on_device))},
        {"what": "host to device, one copy", "gib_per_second": gib / _seconds(lambda: on_device.copy_(block.tensor))},
    ]
    block.unpin()
    path = f"{directory}/limit"
    for what, seconds in raw_seconds(_LIMIT_NBYTES, 4, path).items():
        rows.append({"what": f"direct I/O of a {what}, 4 threads", "gib_per_second": gib / seconds})
    shutil.rmtree(path)
    return rows


def measure_copies(limits: list[Row]) -> list[Row]:
    """Measure the copy of an async save, and a load's work besides its reads, as shares of one large copy."""
    state_dict = _state_dict(2 * _GIB if _DEVICE.type == "cuda" else _GIB // 8)
    nbytes = _nbytes(state_dict)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for number in range(3):
            report = robust_dcp.async_save(state_dict, checkpoint_id=f"{directory}/{number}").result()
            shutil.rmtree(f"{directory}/{number}")
        staging = next(phase.seconds for phase in report.phases if phase.name == "stage")
        robust_dcp.save(state_dict, checkpoint_id=f"{directory}/last")
        loading = _seconds(lambda: robust_dcp.load(state_dict, checkpoint_id=f"{directory}/last"), rounds=3)
        saving = _seconds(lambda: robust_dcp.save(state_dict, checkpoint_id=f"{directory}/last"), rounds=3)
    found = {
        "stage of a repeated async save": (staging, 0),
        "save to memory (/dev/shm)": (saving, 0),
        "load from memory (/dev/shm)": (loading, 1),
    }
    rows = []
    for what, (seconds, limit) in found.items():
        rate = nbytes / _GIB / seconds
        rows.append({"what": what, "gib_per_second": rate, "share": rate / limits[limit]["gib_per_second"]})
    return rows


def _state_dict(nbytes: int) -> dict[str, Any]:
    """bfloat16 tensors of one size, and a thousand small ones."""
    numel = max(nbytes // _TENSORS // 2, 1)
    large = {f"layers.{n}.weight": torch.full((numel,), float(n), device=_DEVICE).bfloat16() for n in range(_TENSORS)}
    return large | {f"layers.{n}.bias": torch.full((64,), float(n), device=_DEVICE) for n in range(1000)}


def _nbytes(state_dict: dict[str, Any]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in state_dict.values())


def _pinned_mib() -> float:
    """The MiB of memory that is locked for the device and kept for the next save."""
    staged = sum(buffer.nbytes for buffer in STAGING._free if buffer.is_pinned)
    return (staged + sum(len(block.data) for block in _KEPT if block.is_pinned)) / (1 << 20)


def _save(call: Callable[[str], object], directory: str, rounds: int) -> Row:
    """Measure a repeated save: the time until the call returns, and until the commit."""
    total, blocked, cpu = [], [], []
    for number in range(rounds + 1):
        path = f"{directory}/{number}"
        os.sync()
        _synchronize()
        started, cpu_started = time.perf_counter(), time.process_time()
        saving = call(path)
        blocked.append(time.perf_counter() - started)
        for future in _futures_of(saving):
            future.result()
        total.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_started)
        shutil.rmtree(path)
    return {
        "seconds": statistics.median(total[1:]),
        "blocked_seconds": statistics.median(blocked[1:]),
        "cpu_seconds": statistics.median(cpu[1:]),
    }


def _futures_of(saving: object) -> list[Future[Any]]:
    if isinstance(saving, Future):
        return [saving]
    upload = getattr(saving, "upload_completion", None)
    return [] if upload is None else [upload]


def measure_saves(directory: str, gib: float, rounds: int) -> list[Row]:
    """Saves and loads, ours and stock's in turn."""
    state_dict = _state_dict(int(gib * _GIB))
    nbytes = _nbytes(state_dict)
    calls: dict[str, tuple[str, Callable[[str], object]]] = {
        "save, ours": ("save", lambda path: robust_dcp.save(state_dict, checkpoint_id=path)),
        "save, stock": ("save", lambda path: dcp.save(state_dict, checkpoint_id=path)),
        "async_save, ours": ("async", lambda path: robust_dcp.async_save(state_dict, checkpoint_id=path)),
        "async_save lazy, ours (blocked: the call)": (
            "async",
            lambda path: robust_dcp.async_save(state_dict, checkpoint_id=path, staging="lazy"),
        ),
        "async_save, stock": ("async", lambda path: dcp.async_save(state_dict, checkpoint_id=path)),
    }
    rows: list[Row] = []
    for what, (kind, call) in calls.items():
        print(f"{what} ...", flush=True)
        rows.append({"what": what, "kind": kind, **_save(call, directory, rounds), "pinned_mib": _pinned_mib()})
    robust_dcp.save(state_dict, checkpoint_id=f"{directory}/kept")
    loads: dict[str, Callable[[], object]] = {
        "load, ours": lambda: robust_dcp.load(state_dict, checkpoint_id=f"{directory}/kept"),
        "load, stock": lambda: dcp.load(state_dict, checkpoint_id=f"{directory}/kept"),
    }
    for what, load in loads.items():
        print(f"{what} ...", flush=True)
        cpu_started = time.process_time()
        seconds = _seconds(load, rounds)
        cpu = (time.process_time() - cpu_started) / (rounds + 1)
        rows.append({"what": what, "kind": "load", "seconds": seconds, "blocked_seconds": seconds, "cpu_seconds": cpu})
    stock = {row["kind"]: row for row in rows if row["what"].endswith("stock")}
    for row in rows:
        key = "blocked_seconds" if row["kind"] == "async" else "seconds"
        row["ratio"] = stock[row["kind"]][key] / row[key]
        row["gib_per_second"] = nbytes / _GIB / row["seconds"]
        row["cpu_seconds_per_gib"] = row["cpu_seconds"] * _GIB / nbytes
        row.setdefault("pinned_mib", 0.0)
    shutil.rmtree(f"{directory}/kept")
    return rows


def measure_training(directory: str, gib: float) -> list[Row]:
    """Measure a training loop during saves that follow one another."""
    state_dict = _state_dict(int(gib * _GIB))
    size = 4096 if _DEVICE.type == "cuda" else 256
    left, right = torch.randn(size, size, device=_DEVICE), torch.randn(size, size, device=_DEVICE)

    def steps(goes_on: Callable[[], bool], least: int = 20) -> float:
        done, started = 0, time.perf_counter()
        while done < least or goes_on():
            torch.mm(left, right)
            _synchronize()
            done += 1
        return 1000 * (time.perf_counter() - started) / done

    steps(lambda: False)
    calm = steps(lambda: False, least=100)
    rows = [{"what": "no save", "step_ms": calm, "slower": 1.0, "lost_seconds": 0.0}]
    savers: dict[str, Callable[[str], object]] = {
        "async_save, ours": lambda path: robust_dcp.async_save(state_dict, checkpoint_id=path),
        "async_save, stock": lambda path: dcp.async_save(state_dict, checkpoint_id=path),
    }
    for what, call in savers.items():
        for number in range(2):
            path = f"{directory}/training{number}"
            started = time.perf_counter()
            saving = call(path)
            blocked = time.perf_counter() - started
            waiter = threading.Thread(target=lambda saving=saving: [each.result() for each in _futures_of(saving)])
            waiter.start()
            began = time.perf_counter()
            during = steps(waiter.is_alive)
            spent = time.perf_counter() - began
            waiter.join()
            shutil.rmtree(path)
        lost = blocked + spent * (1 - calm / during)
        rows.append({"what": what, "step_ms": during, "slower": during / calm, "lost_seconds": lost})
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=16.0 if _DEVICE.type == "cuda" else 0.125)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=12.0, help="limit for one save; sizes shrink to keep it")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if _DEVICE.type == "cuda" else "NO GPU: the CPU stands in, figures mean nothing"
    facts = {"device": name, "torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    found: dict[str, Any] = {"facts": facts}
    with tempfile.TemporaryDirectory() as directory:
        gib = _fitting_gib(directory, arguments.gib, arguments.seconds)
        found["gib"] = gib
        found["limits"] = measure_limits(directory)
        found["copies"] = measure_copies(found["limits"])
        found["saves"] = measure_saves(directory, gib, arguments.rounds)
        found["training"] = measure_training(directory, min(gib, 4.0))
    for title, columns in (("limits", _LIMITS), ("copies", _COPIES), ("saves", _SAVES), ("training", _TRAINING)):
        print(f"\n{title}" + (f" ({gib:.2f} GiB)" if title == "saves" else ""))
        show(columns, found[title])
    write_json(arguments.json, found)


def _fitting_gib(directory: str, gib: float, seconds: float) -> float:
    """The size that the disk writes in ``seconds``, and that fits into the device and the host."""
    probe = {"w": torch.zeros(_LIMIT_NBYTES, dtype=torch.uint8)}
    started = time.perf_counter()
    robust_dcp.save(probe, checkpoint_id=f"{directory}/probe")
    rate = _LIMIT_NBYTES / _GIB / (time.perf_counter() - started)
    shutil.rmtree(f"{directory}/probe")
    room = shutil.disk_usage(directory).free / _GIB / 4
    if _DEVICE.type == "cuda":
        room = min(room, torch.cuda.mem_get_info()[0] / _GIB / 2)
    return max(min(gib, rate * seconds, room), 0.05)


if __name__ == "__main__":
    main()
