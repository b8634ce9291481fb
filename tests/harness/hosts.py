"""Ranks on pretended machines: with directories of their own under the same path, and with networks of their own.

A rank that calls :func:`become_node` gets a mount namespace of its own, in which another directory lies over a path,
and a host name. That takes root, or a kernel that allows user namespaces.

Hosts of a :class:`Cluster` are network namespaces, which takes root. Each has ``lo``, ``eth0`` in a network that joins
all hosts, and ``eth1`` in a network of its own. Its name stands for 127.0.1.1, as Debian's installer writes it.

    with Cluster(2) as cluster:
        run_program(script, directory, size=4, become_host=cluster.host_of(2), env=cluster.env())
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

__all__ = ["Cluster", "become_node", "can_become_node", "why_no_cluster"]

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x10000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 1 << 18
_REPOSITORY = Path(__file__).parents[2]


def become_node(host: str, path: str | os.PathLike[str], own: str | os.PathLike[str]) -> None:
    """Make this thread, and those that it starts from now on, see ``own`` under ``path``.

    Args:
        host: the name of the pretended machine. Ranks with the same name are on one node.
        path: an existing directory.
        own: the node's directory that lies over it. It is made if it does not exist.

    Raises:
        OSError: this process may not make namespaces; or it already has threads, and is not root.
    """
    os.makedirs(own, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS) != 0:
        _check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWUSER))
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    _mount(b"none", b"/", flags=_MS_REC | _MS_PRIVATE)
    _mount(os.fsencode(own), os.fsencode(path))
    socket.sethostname(host)


@functools.cache
def can_become_node() -> bool:
    """Whether processes may become nodes here."""
    if sys.platform != "linux":
        return False
    code = (
        "import tempfile; from tests.harness.hosts import become_node; "
        "become_node('n', tempfile.mkdtemp(), tempfile.mkdtemp())"
    )
    return (
        subprocess.run([sys.executable, "-c", code], cwd=_REPOSITORY, capture_output=True, check=False).returncode == 0
    )


def why_no_cluster() -> str:
    """Why this machine cannot have a :class:`Cluster`; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "network namespaces take the commands ip and tc"
    name = f"probe{uuid.uuid4().hex[:6]}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "this kernel or container makes no network namespaces"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


class Cluster:
    """Hosts 0 to ``n_hosts - 1``. In their network they have the addresses 10.77.0.1 and up.

    Args:
        ipv6: they have fd77::1 and up instead, and no address of IPv4.
    """

    def __init__(self, n_hosts: int, *, ipv6: bool = False) -> None:
        self.n_hosts = n_hosts
        self._ipv6 = ipv6
        self._id = uuid.uuid4().hex[:5]
        self._hosts_file = Path(tempfile.mkdtemp(prefix="cluster")) / "hosts"

    def __enter__(self) -> Cluster:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, host: int) -> str:
        """The address of a host in the network that joins all."""
        return f"fd77::{host + 1}" if self._ipv6 else f"10.77.0.{host + 1}"

    def _name(self, host: int | str) -> str:
        return f"c{self._id}{host}"

    def _make(self) -> None:
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"127.0.1.1 host{host}" for host in range(self.n_hosts)]
        self._hosts_file.write_text("\n".join(lines) + "\n")
        switch = self._name("s")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host in range(self.n_hosts):
            name = self._name(host)
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            ends = ("eth0", "netns", name, "type", "veth", "peer", "name", f"port{host}", "netns", switch)
            _ip("link", "add", *ends)
            _ip("-n", switch, "link", "set", f"port{host}", "master", "br0", "up")
            _ip("-n", name, "link", "add", "eth1", "type", "bridge")
            if self._ipv6:
                _ip("-n", name, "address", "add", f"{self.address(host)}/64", "dev", "eth0", "nodad")
            else:
                _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
                _ip("-n", name, "address", "add", f"192.168.{host}.1/24", "dev", "eth1")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "eth1", "up")

    def _remove(self) -> None:
        for host in (*range(self.n_hosts), "s"):
            subprocess.run(["ip", "netns", "delete", self._name(host)], capture_output=True, check=False)
        shutil.rmtree(self._hosts_file.parent, ignore_errors=True)

    def host_of(self, ranks_per_host: int, *, drives: Path | None = None) -> Callable[[int], None]:
        """What makes a process run on the host of its rank.

        Args:
            drives: a directory where each host finds a drive of its own.
        """
        for host in range(self.n_hosts):
            (self._hosts_file.parent / f"drive{host}").mkdir(exist_ok=True)
        return functools.partial(_become_host, self._name(""), ranks_per_host, str(self._hosts_file), drives)

    def env(self, **more: str | None) -> dict[str, str | None]:
        """What the ranks find in their environment."""
        return {"MASTER_ADDR": self.address(0), "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": None, **more}

    def plug(self, host: int, *, into_network: bool) -> None:
        """Plug the cable of a host in, or pull it out."""
        _ip("-n", self._name("s"), "link", "set", f"port{host}", "up" if into_network else "down")

    def filter(self, *hosts: int, drops: bool = True) -> None:
        """What these hosts send to each other is dropped without a word, as by a firewall, or is so no more."""
        for host in hosts:
            port = ("link", "set", f"port{host}", "type", "bridge_slave", "isolated", "on" if drops else "off")
            _ip("-n", self._name("s"), *port)

    def slow_down(self, host: int, rate: str) -> None:
        """What a host sends leaves it at this rate, for example ``4mbit``."""
        limit = ("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "32kbit")
        _ip("netns", "exec", self._name(host), *limit, "latency", "400ms")


def _become_host(names: str, ranks_per_host: int, hosts_file: str, drives: Path | None, rank: int) -> None:
    host = rank // ranks_per_host
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{names}{host}") as namespace:
        _check(libc.setns(namespace.fileno(), _CLONE_NEWNET))
    _check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS))
    _mount(b"none", b"/", flags=_MS_REC | _MS_PRIVATE)
    _mount(b"sysfs", b"/sys", b"sysfs", flags=0)  # where gloo looks for interfaces
    _mount(os.fsencode(hosts_file), b"/etc/hosts")
    if drives is not None:
        _mount(os.fsencode(os.path.join(os.path.dirname(hosts_file), f"drive{host}")), os.fsencode(drives))
    socket.sethostname(f"host{host}")


def _mount(source: bytes, target: bytes, kind: bytes | None = None, *, flags: int = _MS_BIND) -> None:
    _check(ctypes.CDLL(None, use_errno=True).mount(source, target, kind, flags, None))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
