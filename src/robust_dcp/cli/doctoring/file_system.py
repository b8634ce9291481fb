"""The file system that checkpoints go to: found out by trying, with small files that are removed again."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Final

from robust_dcp.cli.doctoring.finding import Finding, ok, problem, warning
from robust_dcp.cli.output import size
from robust_dcp.storage.files.mounts import Mount, is_of_this_machine, mount_of
from robust_dcp.storage.files.posix_disk import PosixDisk

__all__ = ["file_system_findings"]

_BLOCK_NBYTES: Final = 1 << 20
_LEAST_FREE_NBYTES: Final = 10 << 30
_FEWEST_INODES: Final = 10_000
_MOST_SKEW_SECONDS: Final = 60.0
_MOST_CACHED_SECONDS: Final = 60
_IN_MEMORY: Final = frozenset(("tmpfs", "ramfs"))


def file_system_findings(path: str) -> Iterator[Finding]:
    """What the file system of ``path`` has, and how full it is."""
    mount = mount_of(path)
    yield _type(path, mount)
    if mount is not None and mount.type.startswith("nfs"):
        yield _nfs(mount)
    yield from _space(path)
    try:
        directory = tempfile.mkdtemp(prefix=".robust_dcp.doctor-", dir=path)
    except OSError as error:
        yield problem("writing", f"{error.strerror}", f"make {path} writable for the user of the job")
        return
    try:
        for name, check in _CHECKS.items():
            yield _tried(name, check, directory)
    finally:
        _remove(directory)


def _tried(name: str, check: Callable[[str, str], Finding], directory: str) -> Finding:
    try:
        return check(name, directory)
    except OSError as error:
        return problem(name, str(error.strerror or error), "look at the kernel's log, and at quotas")


def _type(path: str, mount: Mount | None) -> Finding:
    name = "file system"
    if mount is None:
        return warning(name, "unknown", "doctor reads /proc/self/mountinfo")
    found = f"{mount.type} on {mount.place}"
    if mount.type in _IN_MEMORY:
        return warning(name, found, "it is memory: a checkpoint there is gone after a reboot")
    if mount.type == "overlay":
        return warning(name, found, "it is the container's own layer, and goes with it: mount a volume")
    if is_of_this_machine(path):
        return warning(name, f"{found}, of this machine alone", "several nodes need a file system that they share")
    return ok(name, found)


def _nfs(mount: Mount) -> Finding:
    name = "NFS"
    options = dict(option.partition("=")[::2] for option in mount.options)
    if "nolock" in options or options.get("local_lock", "none") in ("all", "flock"):
        advice = "mount without nolock and local_lock: two saves into one directory do not see each other's lock"
        return warning(name, "locks are of this machine only", advice)
    cached = options.get("acdirmax", "60")
    if "noac" not in options and cached.isdigit() and int(cached) > _MOST_CACHED_SECONDS:
        return warning(name, f"names are cached for up to {cached} s", "mount with acdirmax=60 or less")
    return ok(name, f"locks of the server; names are cached for up to {0 if 'noac' in options else cached} s")


def _space(path: str) -> Iterator[Finding]:
    status = os.statvfs(path)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    found = f"{size(free)} of {size(total)} are free"
    if free < _LEAST_FREE_NBYTES:
        yield warning("space", found, "a save needs room for the new checkpoint beside the old one")
    else:
        yield ok("space", found)
    if status.f_files and status.f_favail < _FEWEST_INODES:
        yield warning("inodes", f"{status.f_favail:,} are free", "each rank of a save makes some files: remove others")
    elif status.f_files:
        yield ok("inodes", f"{status.f_favail:,} are free")


def _direct(name: str, directory: str) -> Finding:
    disk = PosixDisk()
    file = disk.open_new(os.path.join(directory, "direct"), direct=True)
    try:
        if file.alignment is None:
            why = file.why_buffered or "it is refused"
            return warning(name, why, "saves go through the page cache, which costs memory and processor time")
        return ok(name, f"yes, aligned to {file.alignment.offset} bytes")
    finally:
        disk.close(file)


def _preallocation(name: str, directory: str) -> Finding:
    disk = PosixDisk()
    file = disk.open_new(os.path.join(directory, "preallocated"))
    try:
        if disk.preallocate(file, _BLOCK_NBYTES):
            return ok(name, "yes")
        return warning(name, "no fallocate", "a save notices that the disk is full only when it writes")
    finally:
        disk.close(file)


def _locks(name: str, directory: str) -> Finding:
    disk = PosixDisk()
    path = os.path.join(directory, "lock")
    first, second = disk.open_lock(path), disk.open_lock(path)
    try:
        taken, again = disk.lock(first), disk.lock(second)
        if taken is True and again is False:
            return ok(name, "yes")
        advice = (
            "mount with flock: otherwise two saves find each other only before the commit, and a load holds no lock"
        )
        return warning(name, "no flock" if taken is None else "a lock does not keep others out", advice)
    finally:
        disk.close(first)
        disk.close(second)


def _commit(name: str, directory: str) -> Finding:
    """The calls of a commit, in its order, and how long they take."""
    disk = PosixDisk()
    source, target = os.path.join(directory, "new"), os.path.join(directory, "committed")
    started = time.perf_counter()
    file = disk.open_new(source)
    try:
        disk.pwrite(file, b"x" * 4096, 0)
        disk.fsync(file)
    finally:
        disk.close(file)
    disk.fsync_directory(directory)
    disk.rename(source, target)
    disk.fsync_directory(directory)
    seconds = time.perf_counter() - started
    if disk.exists(source) or disk.size(target) != 4096:
        return problem(name, "a renamed file is not what it was", "do not keep checkpoints on this file system")
    return ok(name, f"yes, fsync and rename took {seconds * 1000:.0f} ms")


def _clock(name: str, directory: str) -> Finding:
    path = os.path.join(directory, "clock")
    before = time.time()
    _write(path)
    after, found = time.time(), os.stat(path).st_mtime
    # Kernels round the time of a file down to their last tick.
    skew = found - before if found < before - 1 else max(0.0, found - after)
    if abs(skew) > _MOST_SKEW_SECONDS:
        advice = "set the clocks of nodes and file server by NTP: the ages of saves are told by it"
        return warning(name, f"it is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}", advice)
    return ok(name, f"within {max(1.0, abs(skew)):.0f} s of this machine's")


_CHECKS: Final[dict[str, Callable[[str, str], Finding]]] = {
    "direct I/O": _direct,
    "preallocation": _preallocation,
    "locks": _locks,
    "commit": _commit,
    "clock": _clock,
}


def _write(path: str) -> None:
    with open(path, "xb") as file:
        file.write(b"x" * 4096)


def _remove(directory: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
