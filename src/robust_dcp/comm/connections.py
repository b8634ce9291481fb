"""The connections of one rank: a gloo group that nothing else uses, and in which a pair of ranks connects at first use.

A gloo group can do little: a receive ends when its bytes have come, or when the group is dropped. So whoever waits has
a thread for it, and whoever gives up drops the whole group. That closes its connections, which the other ranks notice
at once. The ranks then make a new group.

Ranks meet in the store. Each sets a key for the other one, and both connect when both keys are there. So nobody waits
in gloo for a rank that does not come.

Each process listens at one address. ``GLOO_SOCKET_IFNAME`` names the interface, as for every gloo group. Without it we
take the address by which this host reaches the store of the process group, because the other hosts reach that store
too. On the host of the store this may be a loopback address. Then we take the address of the default route, unless all
ranks are on this host.

What depends on the version of torch is here, too: we look for each new or private function before we use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import fcntl
import itertools
import os
import resource
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from robust_dcp.comm import patience
from robust_dcp.comm.messages import Payload
from robust_dcp.comm.store import host_of, short
from robust_dcp.environment import boot_id
from robust_dcp.errors import RobustCheckpointError

INTERFACE = "GLOO_SOCKET_IFNAME"

PIECE_NBYTES = 1 << 20
"""Payloads are sent in pieces of at most this size. Each piece that arrives shows that the sender is alive."""

_PAYLOAD_TAGS = 1 << 30
"""Smaller tags are for frames: one for each exchange. Each payload has a tag of its own."""

_CLOSING_TAG = (1 << 31) - 1
GREETING_TAG = (1 << 31) - 2
CONNECTING_FAILED = "connecting failed"

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS, _POLL_GROWTH = 0.002, 0.25, 1.3
_CONNECT_TIMEOUT = datetime.timedelta(seconds=2)
"""gloo waits for this time to reach an address, and for five times as long to be reached."""

_FOR_EVER = datetime.timedelta(days=3650)
_AT_ONCE = datetime.timedelta(milliseconds=1)

_SPARE_FILES = 64
"""Room for files that others open meanwhile: data files, libraries."""

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_SOMEWHERE = "192.0.2.1"  # an address for documentation; nothing is sent there
_ADDRESSES_OF_IPV6 = Path("/proc/net/if_inet6")


Ask = Callable[[Callable[[Any], Any], Callable[[], None] | None], Any]
"""Asks the store; see :meth:`~robust_dcp.comm.store.Notes.ask`."""


class Whereabouts(NamedTuple):
    """Where a process can be reached, as it tells the other ranks in the store.

    Attributes:
        process: host and process id, for people.
        address: where it listens.
        network: identifies the network that it sees. Processes with the same one reach each other's loopback address.
    """

    process: str
    address: str
    network: str

    def refuse_loopback(self, others: Whereabouts) -> None:
        """Raise if this process listens at an address that another one does not reach.

        Raises:
            RobustCheckpointError: says what to set.
        """
        if is_loopback(self.address) and self.network != others.network:
            raise RobustCheckpointError(
                f"the process at {self.process} listens at {self.address}, which is its loopback address, and the one "
                f"at {others.process} is on another host: set {INTERFACE} on each host to the interface of the "
                "network that joins the hosts"
            )


class Broken(Exception):
    """The other rank is gone, or the connections were dropped. This is internal to :mod:`robust_dcp.comm`."""


class Moving(NamedTuple):
    """What gloo is sending or receiving. It must not be freed before that is done."""

    data: Any
    tensor: torch.Tensor
    works: list[Any]


class Connections:
    """The connections of this rank to others of its group.

    Args:
        ask: asks the store under the keys of the place where the ranks meet. No other group uses these.
        rank: this process's rank in the group.
        size: how many ranks the group has.
        here: what other ranks learn of this process.
        greeting: bytes that only ranks of the group know.

    Attributes:
        is_dropped: nothing comes any more.
        peers: for each connected rank what it said about its process.
        closed: the ranks that closed their connections before this one did, each with what is known of it; with no
            text if it had not come to an operation that goes on.
        tags: numbers for payloads; each is given out once.
        kept: what gloo may still send, by the exchange that it belongs to; ``None`` for what belongs to none. Keeping
            it keeps the group, so it is here, where it ends with the group.
    """

    def __init__(self, ask: Ask, rank: int, size: int, here: Whereabouts, greeting: bytes) -> None:
        self._ask = ask
        self._rank = rank
        self._size = size
        self._here = here
        self._greeting = greeting
        self._turns: dict[int, threading.Lock] = {}
        self._changed = threading.Condition()
        self._making = threading.Lock()
        self._group: Any = None
        self.tags = itertools.count(_PAYLOAD_TAGS)
        self.is_dropped = False
        self.peers: dict[int, str] = {}
        self.closed: dict[int, str] = {}
        self.kept: defaultdict[Any, list[Moving]] = defaultdict(list)
        self._connecting: set[int] = set()  # the peers that gloo is connecting to
        self._connected: set[int] = set()
        self._awaits_all = False

    def connect(self, peer: int, look: Callable[[], None], announced: Callable[[], None]) -> None:
        """Wait until ``peer`` has come, however long that takes, and make sure that it is a rank of the group.

        Args:
            look: is called again and again while this rank waits. It raises to end the wait.
            announced: is called once ``peer`` can find this rank.

        Raises:
            Broken: the connections were dropped, or cannot be made.
            RobustCheckpointError: one of the two listens where the other one cannot reach it.
            StoreLost: the store is gone.
        """
        with self._changed:
            turn = self._turns.setdefault(peer, threading.Lock())
        while not turn.acquire(timeout=_LAST_POLL_SECONDS):  # several operations may need this connection
            look()
        try:
            if peer in self.peers:
                return
            look()
            self._make_group(look)
            self._ask(lambda store: store.set(f"{self._rank} to {peer}", "\t".join(self._here)), look)
            announced()
            (there,) = self._await([f"{peer} to {self._rank}"], look)
            self._here.refuse_loopback(there)
            there.refuse_loopback(self._here)
            try:
                self._greet(peer)
                answer = self.receive(peer, GREETING_TAG, len(self._greeting), patience.GREETING_SECONDS)
            except Broken as error:
                if self.is_dropped:  # by this rank, and no fault of the other one
                    raise
                self.drop()  # at once: gloo ends the process if that rank connects after all
                raise Broken(f"{CONNECTING_FAILED}: {there.process}: {error}") from None
            if answer != self._greeting:
                raise Broken(f"{CONNECTING_FAILED}: whoever answered is not {there.process}")
            self.peers[peer] = there.process
        finally:
            turn.release()

    def _greet(self, peer: int) -> None:
        """Connect: gloo does that when it has something to send."""
        with self._changed:
            self._connecting.add(peer)
        try:
            self.kept[None].append(self.start("send", peer, GREETING_TAG, self._greeting))
        finally:
            with self._changed:
                self._connecting.discard(peer)
                self._changed.notify_all()

    def _make_group(self, look: Callable[[], None]) -> None:
        """Make the gloo group. Without ``lazy_init`` that connects each rank to each other one, so all must be here."""
        with self._making:  # and without the other lock, so that a drop ends the wait for the ranks
            if self._group is not None:
                return
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            device, is_lazy = _call(make_device, self._here.address)
            options._devices = [device]
            options._timeout = _CONNECT_TIMEOUT if is_lazy else 10 * _CONNECT_TIMEOUT
            options._threads = 1
            if not is_lazy:
                self._ask(lambda store: store.set(f"{self._rank} is here", "\t".join(self._here)), look)
                self._awaits_all = True
                everywhere = self._await([f"{rank} is here" for rank in range(self._size)], look)
                self._awaits_all = False
                for there in everywhere:
                    self._here.refuse_loopback(there)
            store = dist.PrefixStore("gloo", self._ask(lambda store: store, look))
            group = _call(dist.ProcessGroupGloo, store, self._rank, self._size, options)
            with self._changed:
                if self.is_dropped:
                    raise Broken("the connections were dropped")
                self._group = group

    def awaited(self) -> list[int]:
        """The ranks without which nobody can connect. It asks the store."""
        ranks = range(self._size) if self._awaits_all else ()
        missing: list[int] = self._ask(
            lambda store: [rank for rank in ranks if not store.check([f"{rank} is here"])], None
        )
        return missing

    def _await(self, keys: list[str], look: Callable[[], None]) -> list[Whereabouts]:
        """Wait for what other ranks say of themselves under ``keys`` of the store."""
        pause_seconds = _FIRST_POLL_SECONDS
        while not self._ask(lambda store: store.check(keys), look):
            look()
            if self.is_dropped:
                raise Broken("the connections were dropped")
            time.sleep(pause_seconds)
            pause_seconds = min(_LAST_POLL_SECONDS, pause_seconds * _POLL_GROWTH)
        told: list[bytes] = self._ask(lambda store: [store.get(key) for key in keys], look)
        return [Whereabouts(*each.decode(errors="replace").split("\t")) for each in told]

    def start(self, verb: Literal["send", "recv"], peer: int, tag: int, data: Payload | torch.Tensor) -> Moving:
        """Start to send ``data`` to ``peer``, or to fill it with what ``peer`` sends under ``tag``. Keep what is
        returned until all of it has arrived: gloo ends without it.

        Args:
            data: bytes, or a tensor of contiguous bytes on the CPU.

        Raises:
            Broken: ``peer`` is gone, or the connections were dropped.
        """
        group = self._group
        if group is None:
            raise Broken("the connections were dropped")
        tensor = data if isinstance(data, torch.Tensor) else _tensor_of(data)
        nbytes = tensor.numel()
        pieces = [tensor] if nbytes <= PIECE_NBYTES else list(tensor.split(PIECE_NBYTES))
        works = [_call(getattr(group, verb), [piece], peer, tag) for piece in pieces if nbytes]
        self._connected.add(peer)
        return Moving(data, tensor, works)

    def finish(
        self, moving: Moving, seconds: float | None = None, note_piece: Callable[[], object] | None = None
    ) -> None:
        """Wait until all that was started has been sent or received.

        Args:
            seconds: how long a piece may take; ``None`` for as long as it takes. When the time is over, gloo drops the
                connections.
            note_piece: is called after each piece.

        Raises:
            Broken: the other rank is gone, the time is over, or the connections were dropped.
        """
        # gloo counts milliseconds, and reads 0 as "for ever".
        limit = _FOR_EVER if seconds is None else datetime.timedelta(milliseconds=max(1, int(seconds * 1000)))
        for work in moving.works:
            _call(work.wait, limit)
            if note_piece is not None:
                note_piece()

    def receive(
        self,
        peer: int,
        tag: int,
        nbytes: int,
        seconds: float | None = None,
        note_piece: Callable[[], object] | None = None,
    ) -> bytearray:
        """Wait for the ``nbytes`` bytes that ``peer`` sends under ``tag``; see :meth:`finish`."""
        data = bytearray(nbytes)
        self.finish(self.start("recv", peer, tag, data), seconds, note_piece)
        return data

    def drop(self) -> None:
        """Close all connections. All waits end, here and on the other ranks."""
        with self._changed:
            self.is_dropped = True
            # If a connection comes about after gloo was told of its end, gloo ends the process.
            self._changed.wait_for(lambda: not self._connecting, patience.CONNECTING_SECONDS)
            group, self._group = self._group, None
        # When a wait times out, every version of gloo closes all connections and wakes all who wait on them. That takes
        # a connection which is not broken yet.
        for peer in list(self._connected) if group is not None else ():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, _CLOSING_TAG).wait(_AT_ONCE)
        self.kept.clear()


def has_timed_out(detail: str) -> bool:
    """Whether connecting failed because no answer came in time. A rank that has given up before refuses instead."""
    return detail.startswith(CONNECTING_FAILED) and ("Connect timeout" in detail or "Timed out waiting" in detail)


def _call(function: Any, *args: Any) -> Any:
    """Call ``function(*args)``, and turn gloo's exceptions into ours."""
    try:
        return function(*args)
    except RuntimeError as error:
        raise Broken(short(str(error))) from None


def _tensor_of(data: Payload) -> torch.Tensor:
    """``data`` as a tensor without a copy. This way torch does not warn of read-only memory; sending only reads."""
    if isinstance(data, bytes) and len(data) <= 4096:
        data = bytearray(data)  # a copy is cheaper here
    if isinstance(data, bytes):
        pointer = ctypes.cast(ctypes.c_char_p(data), ctypes.POINTER(ctypes.c_uint8))
        return torch.from_numpy(np.ctypeslib.as_array(pointer, shape=(len(data),)))
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


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
    towards_store = _source_towards(*host_of(store))
    if towards_store and not is_loopback(towards_store):
        yield towards_store
    if not (towards_store and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", "")):
        yield _source_towards(_SOMEWHERE, 9)
        for _, name in socket.if_nameindex():
            yield from (address for address in _addresses_of(name) if not is_loopback(address))
    yield towards_store or "127.0.0.1"


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
        return f"{boot_id()} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()
