"""Compares io_uring with threads: one thread with a ring, or several threads with pwrite, make the same direct writes.

robust_dcp uses threads and no ring because of this experiment (docs/performance.md). It makes raw system calls, since
liburing may not be installed::

    python -m benchmarks.io_uring DIRECTORY [GIB]
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from statistics import median

_SETUP, _ENTER = 425, 426  # the same numbers on all architectures
_GET_EVENTS = 1
_OP_WRITE = 23
_SQ_RING, _SQES = 0, 0x10000000
_SQE_NBYTES, _CQE_NBYTES = 64, 16
_MIB = 1 << 20
ROUNDS = 7

_libc = ctypes.CDLL(None, use_errno=True)


class Ring:
    """One io_uring, used by one thread."""

    def __init__(self, depth: int) -> None:
        parameters = bytearray(120)
        self._fd = _libc.syscall(_SETUP, depth, (ctypes.c_char * 120).from_buffer(parameters))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        sq_entries, cq_entries = struct.unpack_from("=II", parameters, 0)
        self._sq = dict(
            zip(("head", "tail", "mask", "n", "flags", "dropped", "array"), _offsets(parameters, 40), strict=False)
        )
        self._cq = dict(zip(("head", "tail", "mask", "n", "overflow", "cqes"), _offsets(parameters, 80), strict=False))
        nbytes = max(self._sq["array"] + sq_entries * 4, self._cq["cqes"] + cq_entries * _CQE_NBYTES)
        self._ring = mmap.mmap(self._fd, nbytes, flags=mmap.MAP_SHARED, offset=_SQ_RING)  # one mapping for both rings
        self._sqes = mmap.mmap(self._fd, sq_entries * _SQE_NBYTES, flags=mmap.MAP_SHARED, offset=_SQES)

    def write(self, fd: int, address: int, nbytes: int, offset: int) -> None:
        """Begin a write."""
        (tail,) = struct.unpack_from("=I", self._ring, self._sq["tail"])
        (mask,) = struct.unpack_from("=I", self._ring, self._sq["mask"])
        slot = tail & mask
        entry = struct.pack("=BBHiQQII", _OP_WRITE, 0, 0, fd, offset, address, nbytes, 0)
        self._sqes[slot * _SQE_NBYTES : (slot + 1) * _SQE_NBYTES] = entry.ljust(_SQE_NBYTES, b"\0")
        struct.pack_into("=I", self._ring, self._sq["array"] + 4 * slot, slot)
        struct.pack_into("=I", self._ring, self._sq["tail"], tail + 1)
        self._enter(1, 0)

    def wait(self) -> None:
        """Wait for one write that was begun."""
        (head,) = struct.unpack_from("=I", self._ring, self._cq["head"])
        while struct.unpack_from("=I", self._ring, self._cq["tail"])[0] == head:
            self._enter(0, 1)
        (mask,) = struct.unpack_from("=I", self._ring, self._cq["mask"])
        _, result, _ = struct.unpack_from("=QiI", self._ring, self._cq["cqes"] + (head & mask) * _CQE_NBYTES)
        struct.pack_into("=I", self._ring, self._cq["head"], head + 1)
        if result < 0:
            raise OSError(-result, os.strerror(-result))

    def _enter(self, submit: int, complete: int) -> None:
        if _libc.syscall(_ENTER, self._fd, submit, complete, _GET_EVENTS if complete else 0, None, 0) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        self._ring.close()
        self._sqes.close()
        os.close(self._fd)


def _offsets(parameters: bytearray, at: int) -> tuple[int, ...]:
    return struct.unpack_from("=7I", parameters, at)


def by_ring(fd: int, memory: memoryview, address: int, block_nbytes: int, depth: int, checksums: bool) -> None:
    """One thread computes checksums and starts writes. ``depth`` writes are in flight."""
    ring, in_flight = Ring(depth), 0
    for offset in range(0, len(memory), block_nbytes):
        if checksums:
            _crc32(memory[offset : offset + block_nbytes])
        if in_flight == depth:
            ring.wait()
            in_flight -= 1
        ring.write(fd, address + offset, block_nbytes, offset)
        in_flight += 1
    for _ in range(in_flight):
        ring.wait()
    ring.close()


def by_threads(fd: int, memory: memoryview, _: int, block_nbytes: int, threads: int, checksums: bool) -> None:
    """Each thread takes the next block, computes its checksum and writes it."""
    offsets: Iterator[int] = iter(range(0, len(memory), block_nbytes))
    taking = threading.Lock()

    def run() -> None:
        while True:
            with taking:
                offset = next(offsets, None)
            if offset is None:
                return
            block = memory[offset : offset + block_nbytes]
            if checksums:
                _crc32(block)
            os.pwrite(fd, block, offset)

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _crc32(data: memoryview) -> int:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32(data)
    return int(isal_zlib.crc32(data))


def measure(directory: str, nbytes: int) -> None:
    """Print GiB/s and CPU-s/GiB of both, for several depths and block sizes. Rounds are interleaved."""
    mapped = mmap.mmap(-1, nbytes)
    for start in range(0, nbytes, _MIB):
        mapped[start : start + _MIB] = os.urandom(4096) * 256
    memory, address = memoryview(mapped), ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    ways: dict[str, Callable[..., None]] = {"threads": by_threads, "io_uring": by_ring}
    cases = [(way, depth, mib, crc) for crc in (False, True) for mib in (1, 8) for depth in (2, 4, 8) for way in ways]
    found: dict[tuple[str, int, int, bool], list[tuple[float, float]]] = {case: [] for case in cases}
    path = os.path.join(directory, "io_uring.probe")
    for _ in range(ROUNDS):
        for way, depth, mib, checksums in cases:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            os.posix_fallocate(fd, 0, nbytes)
            began, cpu = time.perf_counter(), time.process_time()
            ways[way](fd, memory, address, mib * _MIB, depth, checksums)
            os.fsync(fd)
            taken = time.perf_counter() - began, time.process_time() - cpu
            found[way, depth, mib, checksums].append(taken)
            os.close(fd)
            os.unlink(path)
    gib = nbytes / (1 << 30)
    print(f"{'way':<10}{'depth':>6}{'MiB':>5}{'crc':>5}{'GiB/s':>8}{'CPU-s/GiB':>11}")
    for (way, depth, mib, checksums), taken_by in found.items():
        seconds, cpu = median(one[0] for one in taken_by), median(one[1] for one in taken_by)
        print(f"{way:<10}{depth:>6}{mib:>5}{'yes' if checksums else 'no':>5}{gib / seconds:>8.2f}{cpu / gib:>11.3f}")


if __name__ == "__main__":
    measure(sys.argv[1], int(float(sys.argv[2] if len(sys.argv) > 2 else "0.5") * (1 << 30)))
