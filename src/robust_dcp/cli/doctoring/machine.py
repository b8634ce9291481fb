"""The machine: the address that gloo uses, and limits on files and memory."""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Final

from robust_dcp.cli.doctoring.finding import Finding, ok, problem, warning
from robust_dcp.cli.output import size

__all__ = ["machine_findings"]

_LOOKUP_SECONDS: Final = 5.0
_FEWEST_FILES: Final = 1024
_LEAST_MEMORY_NBYTES: Final = 2 << 30
_LEAST_SHM_NBYTES: Final = 64 << 20
_MOST_DIRTY_PERCENT: Final = 40


def machine_findings() -> Iterator[Finding]:
    """Reads ``/proc`` and ``/sys``, and asks for the address of this host once."""
    yield _gloo()
    yield _open_files()
    yield from _memory()
    yield _dirty_pages()
    yield _shared_memory()


def _gloo() -> Finding:
    name = "gloo"
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        there = [each for _, each in socket.if_nameindex()]
        missing = [each for each in interface.split(",") if each not in there]
        if missing:
            advice = f"set GLOO_SOCKET_IFNAME to one of {', '.join(there)}"
            return problem(name, f"GLOO_SOCKET_IFNAME={interface}, and there is no {missing[0]}", advice)
        return ok(name, f"GLOO_SOCKET_IFNAME={interface}")
    host = socket.gethostname()
    addresses = _addresses(host)
    advice = "for several nodes set GLOO_SOCKET_IFNAME to the interface that they share, or mend /etc/hosts"
    if addresses is None:
        return warning(name, f"{host} was not looked up within {_LOOKUP_SECONDS:g} s", f"look at DNS; {advice}")
    if not addresses:
        return warning(name, f"{host} has no address", advice)
    if ipaddress.ip_address(addresses[0]).is_loopback:
        return warning(name, f"{host} is {addresses[0]}, which other nodes cannot reach", advice)
    return ok(name, f"{host} is {addresses[0]}")


def _addresses(host: str) -> list[str] | None:
    """The addresses of a host; ``None`` if nobody answers in time."""
    found: list[list[str]] = []

    def look_up() -> None:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.append([str(answer[4][0]).partition("%")[0] for answer in answers])
        except OSError:
            found.append([])

    thread = threading.Thread(target=look_up, daemon=True)  # a resolver may wait for minutes
    thread.start()
    thread.join(_LOOKUP_SECONDS)
    return found[0] if found else None


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < _FEWEST_FILES:
        return warning("open files", text, f"ulimit -n {_FEWEST_FILES} (the most that is allowed here: {hard})")
    return ok("open files", text)


def _memory() -> Iterator[Finding]:
    total = _in_meminfo("MemTotal")
    limit = _cgroup_limit()
    if limit is None or (total is not None and limit >= total):
        yield ok("memory", "no limit is known" if total is None else f"{size(total)}, no lower limit by a cgroup")
    elif limit < _LEAST_MEMORY_NBYTES:
        advice = (
            "importing torch takes 0.3 GiB for each rank; set buffer_bytes of writer and reader, or raise the limit"
        )
        yield warning("memory", f"the cgroup allows {size(limit)}", advice)
    else:
        # The page cache of buffered writes counts for a cgroup too.
        yield ok("memory", f"the cgroup allows {size(limit)}")


def _cgroup_limit() -> int | None:
    """The lowest limit of this process's cgroup and those above it."""
    limits = []
    lines = [line.strip().split(":", 2) for line in (_text("/proc/self/cgroup") or "").splitlines()]
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers == "":
            base, leaf = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, leaf = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts) + 1):
            text = _text(os.path.join(base, *parts[:depth], leaf))
            if text is not None and text.isdigit():
                limits.append(int(text))
    return min(limits, default=None)


def _dirty_pages() -> Finding:
    values = {name: _text(f"/proc/sys/vm/{name}") for name in ("dirty_ratio", "dirty_bytes", "dirty_background_ratio")}
    found = ", ".join(f"vm.{name}={value}" for name, value in values.items() if value is not None)
    ratio = values["dirty_ratio"]
    if ratio is not None and ratio.isdigit() and int(ratio) > _MOST_DIRTY_PERCENT:
        advice = "lower vm.dirty_ratio, or keep direct I/O: a buffered save may stop all other writers of the node"
        return warning("page cache", found, advice)
    return ok("page cache", found or "its limits are not known")


def _shared_memory() -> Finding:
    name = "/dev/shm"
    try:
        status = os.statvfs(name)
    except OSError as error:
        return warning(name, str(error.strerror), "mount a tmpfs there: async saves in a process share buffers by it")
    free = status.f_bavail * status.f_frsize
    if free < _LEAST_SHM_NBYTES:
        return warning(name, f"{size(free)} free", "give the container more, for example docker run --shm-size=8g")
    return ok(name, f"{size(free)} free")


def _in_meminfo(key: str) -> int | None:
    for line in (_text("/proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None
