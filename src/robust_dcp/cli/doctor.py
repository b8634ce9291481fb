"""Look at versions, network, limits and the file system, and say what to do about each finding.

With PATH it makes a few small files there, and removes them. Exit code 1 means that there is a problem.

Examples:
  robust-dcp doctor /mnt/checkpoints
  robust-dcp doctor /mnt/checkpoints --json | jq '.findings[] | select(.state == "problem")'
"""

from __future__ import annotations

import ipaddress
import os
import platform
import resource
import shutil
import socket
import tempfile
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from typing import Final, NamedTuple

from robust_dcp import __version__, errors
from robust_dcp.cli.arguments import local_path
from robust_dcp.cli.checkpoint import check_directory
from robust_dcp.cli.output import FOUND, Output, number, size
from robust_dcp.storage.files.disk import Disk, free_nbytes
from robust_dcp.storage.files.kernel import is_of_this_machine, mount_of

_PACKAGES: Final = ("torch", "numpy", "msgspec", "isal")
_LEAST_TORCH: Final = (2, 7)
_CONNECT_SECONDS: Final = 5.0
_FEWEST_FILES: Final = 1024
_LEAST_FREE_NBYTES: Final = 10 << 30


class Finding(NamedTuple):
    """What was looked at.

    Attributes:
        state: ``ok``; ``warning``: it works, and may surprise; ``problem``: a save or a load will fail, or its promises
            do not hold.
        name: what was looked at.
        found: what it is like.
        advice: what to do; empty if nothing.
    """

    state: str
    name: str
    found: str
    advice: str = ""


def declare(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("path", nargs="?", type=local_path, help="The directory that checkpoints go to.")


def run(options: Namespace) -> int:
    """Print what may get in the way of checkpoints here."""
    path = options.path
    if path is not None:
        check_directory(path)
    Output.note(f"robust-dcp {__version__}: versions, network and limits" + (f", and {path}" if path else ""))
    findings = [*_versions(), _gloo(), _open_files()]
    if path is not None:
        with Output.cleaning_up():
            findings += _file_system(path)
    counts = Counter(each.state for each in findings)
    Output.put({"path": path, "findings": [each._asdict() for each in findings], "problems": counts["problem"]})
    Output.table(("state", "what", "found", "what to do"), findings)
    Output.note(f"{number(counts['problem'], 'problem')}, {number(counts['warning'], 'warning')}")
    return FOUND if counts["problem"] else 0


def _versions() -> Iterator[Finding]:
    """Looks at what pip has noted, and imports none of the packages."""
    yield Finding("ok", "python", platform.python_version())
    for name in _PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding("problem", name, "is not installed", "pip install robust-dcp brings it along")
            continue
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
        if name == "torch" and numbers < _LEAST_TORCH:
            yield Finding("problem", name, version, "robust_dcp needs PyTorch 2.7 or newer")
        else:
            yield Finding("ok", name, version)


def _gloo() -> Finding:
    """The address that torch's own gloo groups take, and whether a port of it can be reached."""
    name, interface = "gloo", os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        there = [each for _, each in socket.if_nameindex()]
        missing = [each for each in interface.split(",") if each not in there]
        if missing:
            advice = f"set GLOO_SOCKET_IFNAME to one of {', '.join(there)}"
            return Finding("problem", name, f"GLOO_SOCKET_IFNAME={interface}, and there is no {missing[0]}", advice)
        return Finding("ok", name, f"GLOO_SOCKET_IFNAME={interface}")
    host = socket.gethostname()
    advice = (
        "torch's own gloo groups take this address: for several nodes set GLOO_SOCKET_IFNAME to the interface that "
        "they share, or mend /etc/hosts"
    )
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return Finding("warning", name, f"{host} has no address", f"look at DNS; {advice}")
    address = str(infos[0][4][0]).partition("%")[0]
    if ipaddress.ip_address(address).is_loopback:
        return Finding("warning", name, f"{host} is {address}, which other nodes cannot reach", advice)
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as server:
            socket.create_connection(server.getsockname()[:2], timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        found = f"{host} is {address}, where no port can be opened: {error.strerror or error}"
        return Finding("problem", name, found, "mend /etc/hosts, and let the firewall allow the nodes' ports")
    return Finding("ok", name, f"{host} is {address}, and its ports can be reached")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FEWEST_FILES:
        return Finding("ok", "open files", "unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    return Finding("warning", "open files", str(soft), f"ulimit -n {_FEWEST_FILES} (the most here: {hard})")


def _file_system(path: str) -> Iterator[Finding]:
    """What the file system of ``path`` is and has, found out with small files that are removed again."""
    yield _mount(path)
    status = os.statvfs(path)
    free, total = free_nbytes(status), status.f_blocks * status.f_frsize
    few = free < _LEAST_FREE_NBYTES
    advice = "a save needs room for the new checkpoint beside the old one" if few else ""
    yield Finding(
        "problem" if not free else "warning" if few else "ok",
        "space",
        f"{size(free)} of {size(total)} are free",
        advice,
    )
    try:
        directory = tempfile.mkdtemp(prefix=".robust_dcp.doctor-", dir=path)
    except OSError as error:
        yield Finding("problem", "writing", f"{error.strerror}", f"make {path} writable for the user of the job")
        return
    try:
        for name, look in (("direct I/O", _direct), ("locks", _locks)):
            try:
                yield look(Disk(), name, directory)
            except errors.StorageError as error:  # noqa: PERF203 twice
                yield Finding("problem", name, error.message, "look at the kernel's log, and at quotas")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _mount(path: str) -> Finding:
    name, mount = "file system", mount_of(path)
    if mount is None:
        return Finding("warning", name, "unknown", "doctor reads /proc/self/mountinfo")
    found = f"{mount.type} on {mount.place}"
    if mount.type in ("tmpfs", "ramfs"):
        return Finding("warning", name, found, "it is memory: a checkpoint there is gone after a reboot")
    if mount.type == "overlay":
        return Finding("warning", name, found, "it is the container's own layer, and goes with it: mount a volume")
    if is_of_this_machine(path):
        advice = "several nodes need a file system that they share"
        return Finding("warning", name, f"{found}, of this machine alone", advice)
    if {"nolock", "local_lock=all", "local_lock=flock"} & set(mount.options):
        advice = "mount without nolock and local_lock: two saves into one directory do not see each other's lock"
        return Finding("warning", name, f"{found}; locks are of this machine only", advice)
    return Finding("ok", name, found)


def _direct(disk: Disk, name: str, directory: str) -> Finding:
    file = disk.open_new(os.path.join(directory, "direct"), direct=None)
    disk.close(file)
    if file.alignment is None:
        advice = "saves go through the page cache, which costs memory and processor time"
        return Finding("warning", name, file.why_buffered or "it is refused", advice)
    return Finding("ok", name, f"yes, aligned to {file.alignment.offset} bytes")


def _locks(disk: Disk, name: str, directory: str) -> Finding:
    path = os.path.join(directory, "lock")
    first, second = disk.open_new(path), disk.open_read(path)
    try:
        taken, again = disk.lock(first), disk.lock(second, shared=True)
    finally:
        disk.close(first)
        disk.close(second)
    if taken and again is False:
        return Finding("ok", name, "yes")
    advice = "mount with flock: otherwise two saves find each other only before the commit"
    return Finding("warning", name, "no flock" if taken is None else "a lock does not keep others out", advice)
