"""Measures a load by several nodes that need the same bytes, from a store behind a limited link.

Run it for a table: ``python -m benchmarks.sharing --nodes 8 --mib 64 --mib-per-second 32 --json sharing.json``. One
rank on each pretended node loads the whole model, as replicas do. All nodes share the link to the store, and none has
read a file before. A small library in C stands for the link: it delays and counts each read of a file of the
checkpoint, whoever reads it, so the page cache makes nothing faster. What nodes send each other goes over the loopback
device.
"""

from __future__ import annotations

import argparse
import mmap
import os
import struct
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from benchmarks.measuring import Row, run, show, write_json

__all__ = ["main"]

_COLUMNS: Final = {"who": "who", "seconds": "s", "read_mib": "MiB from the store", "times": "times the checkpoint"}

# The link is free from a moment on, in nanoseconds, which all processes share. Each read moves it on.
_LINK: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static struct { _Atomic int64_t free_at, nbytes; } *link_;
static const char *store;
static double ns_per_byte;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

__attribute__((constructor)) static void begin(void) {
    int fd = open(getenv("LINK_STATE"), O_RDWR);
    link_ = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    store = getenv("LINK_STORE");
    ns_per_byte = atof(getenv("LINK_NS_PER_BYTE"));
}

static ssize_t passed(int fd, ssize_t n) {
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = n > 0 ? readlink(name, path, sizeof path - 1) : -1;
    if (length <= 0 || strncmp(path, store, strlen(store))) return n;
    int64_t takes = n * ns_per_byte, before = link_->free_at, until;
    do until = (before > now() ? before : now()) + takes;
    while (!__atomic_compare_exchange_n((int64_t *)&link_->free_at, &before, until, 0, 5, 5));
    link_->nbytes += n;
    struct timespec t = {until / 1000000000LL, until % 1000000000LL};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, 0));
    return n;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)
ssize_t read(int fd, void *p, size_t n) { REAL(read); return passed(fd, real(fd, p, n)); }
ssize_t readv(int fd, const struct iovec *v, int n) { REAL(readv); return passed(fd, real(fd, v, n)); }
ssize_t pread64(int fd, void *p, size_t n, off64_t at) { REAL(pread64); return passed(fd, real(fd, p, n, at)); }
ssize_t preadv64(int fd, const struct iovec *v, int n, off64_t at) {
    REAL(preadv64); return passed(fd, real(fd, v, n, at));
}
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off64_t at, int flags) {
    REAL(preadv64v2); return passed(fd, real(fd, v, n, at, flags));
}
"""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--mib", type=int, default=64, help="size of the checkpoint (default: %(default)s)")
    parser.add_argument("--mib-per-second", type=float, default=32, help="of the link (default: %(default)s)")
    parser.add_argument("--json", help="write all figures there as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sharing-") as directory:
        path = os.path.realpath(f"{directory}/checkpoint")
        robust_dcp.save(_model(arguments.mib, 1), checkpoint_id=path, no_dist=True)
        Path(directory, "link.c").write_text(_LINK)
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", f"{directory}/link.so", f"{directory}/link.c", "-ldl"]
        subprocess.run(command, check=True)
        Path(directory, "state").write_bytes(bytes(4096))
        ns_per_byte = 1e9 / (arguments.mib_per_second * (1 << 20))
        os.environ |= {
            "LINK_STATE": f"{directory}/state",
            "LINK_STORE": path,
            "LINK_NS_PER_BYTE": str(ns_per_byte),
            "LD_PRELOAD": f"{directory}/link.so",
            "ROBUST_DCP_RANKS_PER_NODE": "1",
        }
        rows = run(arguments.nodes, _measure, path, arguments.mib, f"{directory}/state")[0]
    for row in rows:
        row["times"] = row["read_mib"] / arguments.mib
    show(_COLUMNS, rows)
    write_json(arguments.json, rows)


def _model(mib: int, value: int) -> dict[str, torch.Tensor]:
    return {f"layers.{n}.weight": torch.full((mib << 14,), value / 2 + n, dtype=torch.bfloat16) for n in range(32)}


def _measure(path: str, mib: int, state: str) -> list[Row]:
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    with open(state, "r+b") as file:
        link = mmap.mmap(file.fileno(), 4096)

    def read_nbytes() -> int:
        nbytes: int = struct.unpack_from("<q", link, 8)[0]
        return nbytes

    def ours(target: dict[str, torch.Tensor], share_reads: bool | None) -> None:
        robust_dcp.load(target, storage_reader=robust_dcp.RobustReader(path, share_reads=share_reads))

    loads: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
        "robust_dcp": lambda target: ours(target, None),
        "robust_dcp, share_reads=False": lambda target: ours(target, False),
        "stock": lambda target: dcp.load(target, checkpoint_id=path),
    }
    for who, load in loads.items():
        target = _model(mib, 0)
        dist.barrier()
        before, started = read_nbytes(), time.perf_counter()
        load(target)
        dist.barrier()
        rows.append(
            {"who": who, "seconds": time.perf_counter() - started, "read_mib": (read_nbytes() - before) / 2**20}
        )
        if not all(torch.equal(target[name], tensor) for name, tensor in _model(mib, 1).items()):
            raise RuntimeError(f"{who} has loaded something else")
    return rows


if __name__ == "__main__":
    main()
