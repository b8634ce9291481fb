"""Measures saves and loads of tensors on a CUDA device, compared with stock and with the limits of device and disk.

Run it for tables: ``make gpu``, or ``python -m benchmarks.gpu --gib 8 --json gpu.json``. There is one process and one
device. The limits are measured first: one large copy between the device and pinned memory in each direction, and direct
writes and reads of the file system. Ours and stock's follow in turn: in memory (/dev/shm), where no drive limits them,
and on the file system. Sizes shrink to what there is room for, and on the file system to what it writes in
``--seconds``. Each table is printed, and the JSON file written, as soon as its figures are there.

The training step is that of a transformer in bfloat16 with AdamW, whose state dict is saved: once so large that the
device is busy all the time, and once so small that the step takes as long as Python needs to start the kernels. Then
every moment in which a save holds the GIL is lost.

Without a CUDA device the CPU takes its place. This only shows that the program works, and the tables say so.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import StagingOptions

import robust_dcp
from benchmarks.async_save import Save, at_once, nothing, ours, stock
from benchmarks.measuring import Row, raw_seconds, show, write_json
from robust_dcp import RobustWriter
from robust_dcp.staging.blocks import Block, BlockLease
from robust_dcp.staging.staging_buffers import SHARED_STAGING, STAGING
from robust_dcp.storage.options import BLOCK_NBYTES

__all__ = ["main"]

_GIB = 1 << 30
_LIMIT_NBYTES = 256 << 20
_TENSORS = 64
_DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
_HAS_CUDA = _DEVICE.type == "cuda"

_LIMITS = {"what": "what", "gib_per_second": "GiB/s"}
_COPIES = {"what": "what", "gib_per_second": "GiB/s", "share": "share of one large copy"}
_FIRST = {"what": "what", "seconds": "the caller waits, s"}
_FILE_SYSTEMS = {"what": "where", "raw_save": "raw write", "raw_load": "raw read", "save": "save", "load": "load"}
_NO_DISKS = frozenset(
    ("proc", "sysfs", "devpts", "cgroup", "cgroup2", "mqueue", "devtmpfs", "debugfs", "tracefs", "securityfs", "bpf")
)
_SAVES = {
    "what": "what",
    "seconds": "s",
    "gib_per_second": "GiB/s",
    "first_blocked_seconds": "first: blocked s",
    "blocked_seconds": "blocked s",
    "cpu_seconds_per_gib": "CPU s/GiB",
    "ratio": "times less than stock",
}
_TRAINING = {
    "what": "what",
    "step_ms": "step, ms",
    "slower": "times slower",
    "longest_ms": "longest step, ms",
    "blocked_seconds": "blocked s",
    "save_seconds": "until committed, s",
    "lost_seconds": "lost s a save",
}


def _async_savers() -> dict[str, Save]:
    return {
        "async_save, ours": ours(),
        "async_save lazy, ours": ours(staging="lazy"),
        "async_save, stock": stock(),
        "async_save, stock, pinned DefaultStager": stock(staging=StagingOptions(_HAS_CUDA, False, True, _HAS_CUDA)),
    }


def _synchronize() -> None:
    if _HAS_CUDA:
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


def measure_file_systems() -> list[Row]:
    """Direct I/O, and a save and a load, on each file system of this machine that has room."""
    rows: list[Row] = []
    state_dict = _state_dict(_GIB if _HAS_CUDA else _GIB // 16)
    gib = _nbytes(state_dict) / _GIB
    kinds = {place: kind for _, place, kind, *_ in map(str.split, Path("/proc/mounts").read_text().splitlines())}
    seen = set()
    for place in sorted({tempfile.gettempdir(), os.getcwd(), *kinds}, key=len):
        mount = next(str(each) for each in (Path(place), *Path(place).parents) if str(each) in kinds)
        try:
            device, free_nbytes = os.stat(place).st_dev, shutil.disk_usage(place).free
            if (
                device in seen
                or place.startswith("/sys/")
                or not os.path.isdir(place)
                or kinds[mount] in _NO_DISKS
                or free_nbytes < 8 * gib * _GIB
            ):
                continue
            with tempfile.TemporaryDirectory(dir=place) as directory:
                seen.add(device)
                raw = raw_seconds(_LIMIT_NBYTES, 4, f"{directory}/raw")
                row: Row = {"what": f"{mount}, {kinds[mount]}, {free_nbytes // _GIB} GiB free"}
                row |= {f"raw_{what}": _LIMIT_NBYTES / _GIB / seconds for what, seconds in raw.items()}
                path = f"{directory}/saved"
                row["save"] = gib / _seconds(partial(robust_dcp.save, state_dict, checkpoint_id=path), 1)
                row["load"] = gib / _seconds(partial(robust_dcp.load, state_dict, checkpoint_id=path), 1)
                rows.append(row)
        except OSError:  # it cannot be written
            continue
    return rows


def measure_shapes_of_saves(directory: str, gib: float) -> list[Row]:
    """Saves to memory with more threads and files than the defaults: what a fast RAID 0 might make of them."""
    state_dict = _state_dict(int(gib * _GIB))
    rows: list[Row] = []
    for threads, files in ((None, None), (4, 2), (4, 4), (8, 2), (8, 8), (16, 16)):
        writer = RobustWriter(f"{directory}/files", threads=threads, files_per_rank=files)
        seconds = _seconds(partial(robust_dcp.save, state_dict, storage_writer=writer), 2)
        what = "defaults" if threads is None else f"{threads} threads, {files} files"
        rows.append({"what": what, "gib_per_second": _nbytes(state_dict) / _GIB / seconds})
        shutil.rmtree(f"{directory}/files")
    return rows


def measure_first_saves(directory: str, gib: float) -> list[Row]:
    """How long the caller of the first async saves waits, and how long shared memory takes to be there."""
    state_dict = _state_dict(int(gib * _GIB))
    rows: list[Row] = []
    for executor in ("thread", "process"):
        for turn in ("first", "second"):
            started = time.perf_counter()
            saving = robust_dcp.async_save(state_dict, checkpoint_id=f"{directory}/first", executor=executor)
            seconds = time.perf_counter() - started
            saving.result()
            shutil.rmtree(f"{directory}/first")
            rows.append({"what": f"async_save, {executor}, {turn}", "seconds": seconds})
    STAGING.release()
    SHARED_STAGING.release()
    nbytes = _nbytes(state_dict)
    libc, populate_write = ctypes.CDLL(None), 23
    for threads in (1, 4, 8):
        for how in ("fallocate", "MADV_POPULATE_WRITE"):
            fd = os.memfd_create("benchmark")
            if how != "fallocate":
                os.ftruncate(fd, nbytes)
            with contextlib.closing(os.fdopen(fd)), ThreadPoolExecutor(threads) as pool:
                mapped = mmap.mmap(fd, nbytes) if how != "fallocate" else None
                address = 0 if mapped is None else torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()

                def reserve(begin: int, fd: int = fd, address: int = address) -> None:
                    n = min(32 << 20, nbytes - begin)
                    if not address:
                        os.posix_fallocate(fd, begin, n)
                    elif libc.madvise(ctypes.c_void_p(address + begin), ctypes.c_size_t(n), populate_write):
                        raise OSError("MADV_POPULATE_WRITE was refused")

                started = time.perf_counter()
                list(pool.map(reserve, range(0, nbytes, 32 << 20)))
                rows.append({"what": f"{how}, {threads} threads", "seconds": time.perf_counter() - started})
    return rows


def measure_limits(directory: str) -> list[Row]:
    """Copies between device and pinned memory, and direct I/O."""
    block = Block(_LIMIT_NBYTES)
    if _HAS_CUDA:
        block.pin(_DEVICE)
    on_device = torch.zeros(_LIMIT_NBYTES, dtype=torch.uint8, device=_DEVICE)
    gib = _LIMIT_NBYTES / _GIB
    rows = [
        {"what": "device to host, one copy", "gib_per_second": gib / _seconds(lambda: block.tensor.copy_(on_device))},
        {"what": "host to device, one copy", "gib_per_second": gib / _seconds(lambda: on_device.copy_(block.tensor))},
    ]
    block.unpin()
    path = f"{directory}/limit"
    for what, seconds in raw_seconds(4 * _LIMIT_NBYTES, 4, path).items():
        rows.append({"what": f"direct I/O of a {what}, 4 threads", "gib_per_second": 4 * gib / seconds})
    shutil.rmtree(path)
    return rows


def measure_copies(limits: list[Row]) -> list[Row]:
    """Measure the copies of an async save and those of a load, as shares of one large copy."""
    state_dict = _state_dict(4 * _GIB if _HAS_CUDA else _GIB // 8)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        reports = []
        for number in range(3):
            reports.append(robust_dcp.async_save(state_dict, checkpoint_id=f"{directory}/{number}").result())
            shutil.rmtree(f"{directory}/{number}")
    staging = _nbytes(state_dict) / next(phase.seconds for phase in reports[-1].phases if phase.name == "stage")
    targets = [tensor.view(-1).view(torch.uint8) for tensor in state_dict.values() if tensor.dtype == torch.bfloat16]
    found = {"stage of a repeated async save": (staging, 0)}
    for block_nbytes in (BLOCK_NBYTES // 2, BLOCK_NBYTES, 2 * BLOCK_NBYTES):
        lease = BlockLease(block_nbytes, 4, of_load=True)
        blocks = [lease.take() for _ in range(lease.n_blocks)]

        def fill(thread: int, lease: BlockLease = lease, blocks: list[Block] = blocks) -> None:
            for target in targets[thread :: len(blocks)]:
                for at in range(0, len(target), lease.block_nbytes):
                    lease.fill([target[at : at + lease.block_nbytes]], blocks[thread], [0])

        with ThreadPoolExecutor(len(blocks)) as pool:

            def fill_all(pool: ThreadPoolExecutor = pool, fill: Callable[[int], None] = fill) -> None:
                list(pool.map(fill, range(4)))

            seconds = _seconds(fill_all)
        lease.close()
        rate = sum(map(len, targets)) / seconds
        found[f"load, 4 threads, blocks of {block_nbytes >> 20} MiB"] = (rate, 1)
    return [
        {"what": what, "gib_per_second": rate / _GIB, "share": rate / _GIB / limits[limit]["gib_per_second"]}
        for what, (rate, limit) in found.items()
    ]


def _state_dict(nbytes: int) -> dict[str, Any]:
    """bfloat16 tensors of one size, and a thousand small ones."""
    numel = max(nbytes // _TENSORS // 2, 1)
    large = {f"layers.{n}.weight": torch.full((numel,), float(n), device=_DEVICE).bfloat16() for n in range(_TENSORS)}
    return large | {f"layers.{n}.bias": torch.full((64,), float(n), device=_DEVICE) for n in range(1000)}


def _nbytes(state_dict: dict[str, Any]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in state_dict.values())


def _save(call: Save, state_dict: dict[str, Any], directory: str, n: int) -> Row:
    """Measure a repeated save: the time until the call returns, and until the commit."""
    total, blocked, cpu = [], [], []
    for number in range(n + 1):
        path = f"{directory}/{number}"
        os.sync()
        _synchronize()
        started, cpu_started = time.perf_counter(), time.process_time()
        wait_staged, wait_saved = call(state_dict, path)
        blocked.append(time.perf_counter() - started)
        wait_staged()
        wait_saved()
        total.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_started)
        shutil.rmtree(path)
    return {
        "seconds": statistics.median(total[1:]),
        "first_blocked_seconds": blocked[0],
        "blocked_seconds": statistics.median(blocked[1:]),
        "cpu_seconds": statistics.median(cpu[1:]),
    }


def measure_saves(directory: str, gib: float, rounds: int, savers: dict[str, Save]) -> list[Row]:
    """Saves and loads, ours and stock's in turn. Each row is printed at once, too, in case that time runs out."""
    state_dict = _state_dict(int(gib * _GIB))
    nbytes = _nbytes(state_dict)
    rows: list[Row] = []
    for what, call in {"save, ours": at_once(robust_dcp.save), "save, stock": at_once(dcp.save), **savers}.items():
        rows.append({"what": what, **_save(call, state_dict, directory, rounds)})
        print(rows[-1], flush=True)
    robust_dcp.save(state_dict, checkpoint_id=f"{directory}/kept")
    for what, load in {"load, ours": robust_dcp.load, "load, stock": dcp.load}.items():
        cpu_started = time.process_time()
        seconds = _seconds(partial(load, state_dict, checkpoint_id=f"{directory}/kept"), rounds)
        cpu = (time.process_time() - cpu_started) / (rounds + 1)
        rows.append({"what": what, "seconds": seconds, "cpu_seconds": cpu})
        print(rows[-1], flush=True)
    shutil.rmtree(f"{directory}/kept")
    of = {row["what"]: row for row in rows}
    for row in rows:
        key = "blocked_seconds" if row["what"].startswith("async") else "seconds"
        row["ratio"] = of[row["what"].split(",")[0].removesuffix(" lazy") + ", stock"][key] / row[key]
        row["gib_per_second"] = nbytes / _GIB / row["seconds"]
        row["cpu_seconds_per_gib"] = row["cpu_seconds"] * _GIB / nbytes
    return rows


class _Training:
    """A transformer that is trained, with its AdamW.

    Args:
        tokens: the number of tokens of a step.
    """

    def __init__(self, tokens: int) -> None:
        width, layers = (2048, 8) if _HAS_CUDA else (64, 2)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        self._model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(_DEVICE)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=_HAS_CUDA)
        self._batch = torch.randn(1, tokens, width, device=_DEVICE).view(-1, min(tokens, 512), width)
        self.step(nothing)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def step(self, wait_staged: Callable[[], object]) -> None:
        with torch.autocast(_DEVICE.type, torch.bfloat16):
            loss = self._model(self._batch).square().mean()
        loss.backward()
        wait_staged()  # the optimizer overwrites what is saved
        self._optimizer.step()
        self._optimizer.zero_grad()
        loss.item()

    def steps(self, goes_on: Callable[[int], bool], wait_staged: Callable[[], object] = nothing) -> list[float]:
        """The seconds of each step, until one of its arguments says so."""
        found: list[float] = []
        while goes_on(len(found)):
            started = time.perf_counter()
            self.step(wait_staged)
            found.append(time.perf_counter() - started)
        return found


def measure_training(directory: str, tokens: int) -> list[Row]:
    """Measure the steps of training beside saves, ours and stock's."""
    training = _Training(tokens)
    training.steps(lambda done: done < 10)
    calm = statistics.median(training.steps(lambda done: done < 60))
    rows: list[Row] = [{"what": f"no save, {tokens} tokens a step", "step_ms": 1000 * calm, "slower": 1.0}]
    processes = {
        "async_save process, ours": ours(executor="process"),
        "async_save process lazy, ours": ours(executor="process", staging="lazy"),
    }
    for what, call in {**_async_savers(), **processes}.items():
        for turn in ("first", "repeated"):
            path = f"{directory}/training"
            started = time.perf_counter()
            wait_staged, wait_saved = call(training.state_dict(), path)
            blocked = time.perf_counter() - started
            waiter = threading.Thread(target=wait_saved)
            waiter.start()

            def goes_on(done: int, waiter: threading.Thread = waiter) -> bool:
                return not done or waiter.is_alive()

            during = training.steps(goes_on, wait_staged)
            waiter.join()
            saving = time.perf_counter() - started
            training.steps(lambda done: done < 10)
            shutil.rmtree(path)
            rows.append(
                {
                    "what": f"{what}, {turn}",
                    "step_ms": 1000 * statistics.mean(during),
                    "slower": statistics.mean(during) / calm,
                    "longest_ms": 1000 * max(during),
                    "blocked_seconds": blocked,
                    "save_seconds": saving,
                    "lost_seconds": blocked + sum(during) - calm * len(during),
                }
            )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=8.0 if _HAS_CUDA else 0.125)
    parser.add_argument("--rounds", type=int, default=1, help="measured saves and loads after a first one")
    parser.add_argument("--seconds", type=float, default=2.0, help="limit for one save to the file system")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    name = torch.cuda.get_device_name() if _HAS_CUDA else "NO GPU: the CPU stands in, figures mean nothing"
    facts = {"device": name, "torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    print(", ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    found: dict[str, Any] = {"facts": facts}

    def tell(title: str, columns: dict[str, str], rows: list[Row]) -> list[Row]:
        print(f"\n{title}", flush=True)
        show(columns, rows)
        found[title] = rows
        write_json(arguments.json, found)
        return rows

    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        limits = tell("limits", _LIMITS, measure_limits(disk))
        tell("copies", _COPIES, measure_copies(limits))
        gib = min(arguments.gib, _room_gib(memory))
        first_gib = min(gib, 4.5 if _HAS_CUDA else 0.125)
        tell(f"the first async saves, {first_gib:.2f} GiB", _FIRST, measure_first_saves(memory, first_gib))
        in_memory = measure_saves(memory, gib, arguments.rounds, _async_savers())
        tell(f"saves in memory, {gib:.2f} GiB", _SAVES, in_memory)
        written = next(row["gib_per_second"] for row in limits if "save" in row["what"])
        gib = max(min(arguments.gib, _room_gib(disk), written * arguments.seconds), 0.05)
        tell(f"saves on the file system, {gib:.2f} GiB", _SAVES, measure_saves(disk, gib, arguments.rounds, {}))
        for tokens in (8192, 64) if _HAS_CUDA else (64,):
            tell(f"training, {tokens} tokens a step", _TRAINING, measure_training(memory, tokens))
        tell(f"threads and files in memory, {first_gib:.2f} GiB", _LIMITS, measure_shapes_of_saves(memory, first_gib))
        tell("file systems, GiB/s", _FILE_SYSTEMS, measure_file_systems())


def _room_gib(directory: str) -> float:
    """The size of a checkpoint that fits well into the device and into this directory."""
    room = shutil.disk_usage(directory).free / _GIB / 3
    return min(room, torch.cuda.mem_get_info()[0] / _GIB / 2) if _HAS_CUDA else room


if __name__ == "__main__":
    main()
