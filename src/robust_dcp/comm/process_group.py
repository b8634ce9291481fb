"""What depends on the version of torch: who is in a group, which store the group uses, and how to make a gloo group.

It looks for each new or private function of torch before it uses it. No other module changes between torch 2.7 and
2.15. The link calls this module when it connects. It keeps no state.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

__all__ = [
    "Address",
    "address_of_other",
    "connect_pair",
    "is_initialised",
    "members",
    "name_of",
    "parent_of",
    "store_host",
    "store_opener",
    "tcp_sockets",
]

Address = tuple[str, int]
"""Where a process listens: a numeric host address and a port."""

_HAS_NO_CLONE = "pure virtual function"
"""What pybind11 says if a store is written in Python and has no ``clone``, such as torchelastic's ``EtcdStore``."""

STORE_TIMEOUT_SECONDS = 30.0
"""How long one question to the store may take. It answers in microseconds unless its host is gone."""


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


def name_of(parent: Any) -> str:
    """The name of ``parent``, the same on all its members."""
    return str(parent.group_name)


def store_host(parent: Any) -> int | None:
    """The rank of ``parent`` that hosts the store in its process; ``None`` if a launcher or a rank outside does.

    In torch rank 0 makes the store, unless a launcher says that it has made it (``torch/distributed/rendezvous.py``).
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    ranks = dist.get_process_group_ranks(parent)
    return ranks.index(0) if 0 in ranks else None


def store_opener(parent: Any) -> Callable[[], Any]:
    """Return a function that opens the store of ``parent``, over a connection of our own if possible.

    A client of a ``TCPStore`` serves one call at a time, so another thread that waits for a key would block us. Call
    the function in a thread that can be left behind: connecting to a host that is gone can take minutes.
    """
    store = _store_of(parent)

    def open_store() -> Any:
        clone = getattr(store, "clone", None)
        if clone is None:
            return store
        try:
            own = clone()
            own.set_timeout(datetime.timedelta(seconds=STORE_TIMEOUT_SECONDS))
        except NotImplementedError:
            return store
        except RuntimeError as error:
            if _HAS_NO_CLONE not in str(error):
                raise
            return store
        return own

    return open_store


def _store_of(parent: Any) -> Any:
    get_group_store = getattr(parent, "get_group_store", None)
    if get_group_store is not None:
        with contextlib.suppress(RuntimeError):  # a group made by hand may have none
            store = get_group_store()
            if store is not None:
                return store
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def connect_pair(store: Any, rank: int, timeout: datetime.timedelta) -> Any:
    """Make a gloo backend between two processes. They call this with the same ``store``, as ``rank`` 0 and 1.

    ``GLOO_SOCKET_IFNAME`` chooses the interface, as for every gloo group. The backend is not registered with
    ``torch.distributed``: no other code can find it, and it ends with its last reference.

    Raises:
        RuntimeError: the other process did not come within ``timeout``, or cannot be reached.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [_device_of(os.getpid())]
    options._timeout = timeout
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, 2, options)


@functools.cache
def _device_of(process: int) -> Any:
    """gloo's listening socket and its thread. All connections of a process share them. A forked child makes its own,
    because it does not have the threads of its parent."""
    return dist.ProcessGroupGloo.create_default_device()


def address_of_other(own: bytes, other: bytes) -> Address | None:
    """Find where another process listens. That process put ``other`` into the store; this process put ``own`` there.

    The format of these bytes is gloo's own, but they end alike on all ranks. So we find our own address in ``own``, and
    read the other address at the same place in ``other``. ``None`` if our own address is not found.
    """
    for address in _listening_addresses(os.getpid()):
        place = own.rfind(address)
        if place >= 0:
            return _decode_address(other[place - len(own) :])
    return None


@functools.cache
def _listening_addresses(process: int) -> list[bytes]:
    """The addresses at which this process listens, as the first bytes of ``struct sockaddr_in`` or ``sockaddr_in6``."""
    found = []
    for each in tcp_sockets():
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            host, port, *_ = each.getsockname()
            start = struct.pack("=H", each.family) + struct.pack("!H", port)
            found.append(start + bytes(_IP[each.family]) + socket.inet_pton(each.family, host))
    return found


def tcp_sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process (on Linux; none elsewhere). Each is a duplicate that is closed before the
    next."""
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as found:
                    if found.type == socket.SOCK_STREAM and found.family in _IP:
                        yield found


def _decode_address(data: bytes) -> Address | None:
    if len(data) < _MAX_ADDRESS_NBYTES:
        return None
    (family,), (port,) = struct.unpack_from("=H", data), struct.unpack_from("!H", data, 2)
    if family not in _IP:
        return None
    start = 4 + _IP[family]
    return socket.inet_ntop(family, data[start : start + (4 if family == socket.AF_INET else 16)]), port


_IP = {socket.AF_INET: 0, socket.AF_INET6: 4}
"""For each address family, how many bytes stand between port and address. In IPv6 that is the flow label."""

_MAX_ADDRESS_NBYTES = 4 + _IP[socket.AF_INET6] + 16
"""Where the address in a ``sockaddr_in6`` ends. A ``sockaddr_in`` takes as much room."""
