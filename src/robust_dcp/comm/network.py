"""What depends on the version of torch and on the network: groups, their stores, and the address to listen at.

It looks for each new or private function of torch before it uses it. It keeps no state.

The address is chosen like this. ``GLOO_SOCKET_IFNAME`` names the interface, as for every gloo group. Without it we take
the address by which this host reaches the store of the process group, because the other hosts reach that store too. On
the host of the store this may be a loopback address. Then we take the address of the default route, unless all ranks
are on this host.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import resource
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from robust_dcp.comm import patience
from robust_dcp.comm.nodes import BOOT_ID
from robust_dcp.errors import RobustCheckpointError

__all__ = [
    "INTERFACE",
    "is_initialised",
    "is_loopback",
    "listening_address",
    "make_device",
    "members",
    "network_id",
    "parent_of",
]

INTERFACE = "GLOO_SOCKET_IFNAME"

STORE_TIMEOUT_SECONDS = 30.0
"""How long one question to the store may take. It answers in microseconds unless its host is gone."""

_SPARE_FILES = 64
"""Room for files that others open meanwhile: data files, libraries."""

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_SOMEWHERE = "192.0.2.1"  # an address for documentation; nothing is sent there
_ADDRESSES_OF_IPV6 = Path("/proc/net/if_inet6")


def is_initialised() -> bool:
    """Whether ``torch.distributed`` is initialised, so that there may be other ranks."""
    return dist.is_available() and dist.is_initialized()


def parent_of(process_group: dist.ProcessGroup | None) -> Any:
    """The process group itself; ``None`` means the default group."""
    return dist.group.WORLD if process_group is None else process_group


def members(parent: Any) -> tuple[int, tuple[int, ...]]:
    """This process's rank within ``parent`` and the global ranks of its members, in group order.

    Raises:
        ValueError: this process is not a member.
    """
    rank = dist.get_rank(parent)
    if rank < 0:
        raise ValueError("this rank is not a member of the process group that it was given")
    return rank, tuple(dist.get_process_group_ranks(parent))


def store_host(parent: Any) -> int | None:
    """The rank of ``parent`` that hosts the store in its process; ``None`` if a launcher or a rank outside does.

    In torch rank 0 makes the store, unless a launcher says that it has made it (``torch/distributed/rendezvous.py``).
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    ranks = dist.get_process_group_ranks(parent)
    return ranks.index(0) if 0 in ranks else None


def store_of(parent: Any) -> Any:
    """The store of ``parent``."""
    get_group_store = getattr(parent, "get_group_store", None)
    if get_group_store is not None:
        with contextlib.suppress(RuntimeError):  # a group made by hand may have none
            store = get_group_store()
            if store is not None:
                return store
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def store_opener(store: Any) -> Callable[[], Any]:
    """Return a function that opens ``store`` over a connection of our own if possible.

    A client of a ``TCPStore`` serves one call at a time, so another thread that waits for a key would block us. torch
    goes on for minutes to connect to a process that has ended, and a thread that does so crashes the process when
    Python ends. So we connect by ourselves first, and give up at once. Still call the function in a thread that can be
    left behind, since the host may be frozen.
    """

    def open_store() -> Any:
        clone = getattr(store, "clone", None)
        if clone is None:
            return store
        host, port = _host_of(store)
        if host:
            try:
                socket.create_connection((host, port), timeout=patience.STORE_ANSWER_SECONDS).close()
            except OSError as error:
                raise RuntimeError(f"connecting to it fails: {error}") from None
        try:
            own = clone()
            own.set_timeout(datetime.timedelta(seconds=STORE_TIMEOUT_SECONDS))
        except NotImplementedError:
            return store
        except RuntimeError as error:
            if "pure virtual function" not in str(error):  # a store written in Python, such as torchelastic's EtcdStore
                raise
            return store
        return own

    return open_store


def make_device(address: str) -> tuple[Any, bool]:
    """What a gloo group listens with at ``address``, and whether its connections are made at first use."""
    create = dist.ProcessGroupGloo.create_device
    if "lazy_init" in str(create.__doc__):
        return create(hostname=address, lazy_init=True), True
    return create(hostname=address), False


def ensure_open_files(n_more: int) -> None:
    """Make sure that this process may open ``n_more`` files: gloo ends it otherwise. Raise its limit if necessary.

    Raises:
        RobustCheckpointError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    needed = n_open + n_more + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise RobustCheckpointError(
            f"connecting to other ranks needs {needed} open files, of which {n_open} are open already, and this "
            f"process may open {hard}; raise the hard limit (ulimit -Hn {2 * needed}) before the job starts"
        )
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(hard, 2 * needed), hard)
    )


def listening_address(store: Any) -> str:
    """The numeric address at which this process listens for other ranks of the group with ``store``.

    Raises:
        RobustCheckpointError: ``GLOO_SOCKET_IFNAME`` names an interface that is not there, or has no address.
    """
    names = [name.strip() for name in os.environ.get(INTERFACE, "").split(",") if name.strip()]
    if names:
        there = {name for _, name in socket.if_nameindex()}
        absent = [name for name in names if name not in there]
        if absent:
            raise RobustCheckpointError(
                f"{INTERFACE} is {','.join(names)!r}, but this host ({socket.gethostname()}) has no interface "
                f"{absent[0]!r}: it has {', '.join(sorted(there))}"
            )
        addresses = [address for name in names for address in _addresses_of(name)]
        if not addresses:
            raise RobustCheckpointError(
                f"{INTERFACE} is {','.join(names)!r}, but on this host ({socket.gethostname()}) no such interface has "
                "an address: give it one, or name another interface"
            )
        return addresses[0]
    return next(address for address in _candidates(store) if address)


def _candidates(store: Any) -> Iterator[str]:
    """Addresses, the best first."""
    towards_store = _source_towards(*_host_of(store))
    if towards_store and not is_loopback(towards_store):
        yield towards_store
    if not (towards_store and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", "")):
        yield _source_towards(_SOMEWHERE, 9)
        for _, name in socket.if_nameindex():
            yield from (address for address in _addresses_of(name) if not is_loopback(address))
    yield towards_store or "127.0.0.1"


def _host_of(store: Any) -> tuple[str, int]:
    """The host and the port of a store; an empty host if it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    return (host, port) if isinstance(host, str) and isinstance(port, int) and port else ("", 0)


def _source_towards(host: str, port: int) -> str:
    """The address from which this host would send to ``host``; empty if there is no way. Nothing is sent."""
    if host:
        with contextlib.suppress(OSError):
            for family, kind, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(target)
                    return str(probe.getsockname()[0]).partition("%")[0].removeprefix("::ffff:")
    return ""


def _addresses_of(interface: str) -> list[str]:
    """The addresses of an interface: the one of IPv4, then those of IPv6 that are valid on more than one link."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in _ADDRESSES_OF_IPV6.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope in ("00", "10"):  # global, or loopback
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def is_loopback(address: str) -> bool:
    """Whether only processes of the same host can reach ``address``."""
    return address.startswith("127.") or address == "::1"


def network_id() -> str:
    """Identifies the network that this process sees: the same for two processes if they share a loopback address."""
    with contextlib.suppress(OSError):  # elsewhere than on Linux
        return f"{BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()
