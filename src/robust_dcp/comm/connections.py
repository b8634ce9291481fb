"""The connections of one rank: a gloo group that nothing else uses, and in which a pair of ranks connects at first use.

A gloo group can do little: a receive ends when its bytes have come, or when the group is dropped. So whoever waits has
a thread for it, and whoever gives up drops the whole group. That closes its connections, which the other ranks notice
at once. The ranks then make a new group.

Ranks meet in the store. Each sets a key for the other one, and both connect when both keys are there. So nobody waits
in gloo for a rank that does not come.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import itertools
import re
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from robust_dcp.comm import network, patience
from robust_dcp.errors import RobustCheckpointError

__all__ = ["CHUNK_NBYTES", "CONNECTING_FAILED", "Broken", "Connections", "Payload", "Whereabouts", "short"]

Payload = bytes | bytearray | memoryview

CHUNK_NBYTES = 64 << 20
"""Payloads are sent in pieces of at most this size."""

_PAYLOAD_TAGS = 1 << 30
"""Smaller tags are for frames: one for each operation. Each payload has a tag of its own."""

_CLOSING_TAG = (1 << 31) - 1
_GREETING_TAG = (1 << 31) - 2
CONNECTING_FAILED = "connecting failed"

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS, _POLL_GROWTH = 0.002, 0.25, 1.3
_CONNECT_TIMEOUT = datetime.timedelta(seconds=2)
"""gloo waits for this time to reach an address, and for five times as long to be reached."""

_FOR_EVER = datetime.timedelta(days=3650)
_AT_ONCE = datetime.timedelta(milliseconds=1)


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
        if network.is_loopback(self.address) and self.network != others.network:
            raise RobustCheckpointError(
                f"the process at {self.process} listens at {self.address}, which is its loopback address, and the one "
                f"at {others.process} is on another host: set {network.INTERFACE} on each host to the interface of the "
                "network that joins the hosts"
            )


class Broken(Exception):
    """The other rank is gone, or the connections were dropped. This is internal to :mod:`robust_dcp.comm`."""


class Connections:
    """The connections of this rank to others of its group.

    Args:
        store: where the ranks meet. No other group uses its keys.
        rank: this process's rank in the group.
        size: how many ranks the group has.
        make_device: makes what listens on the network, ``lazy_init`` or not.
        here: what other ranks learn of this process.
        greeting: bytes that only ranks of the group know.

    Attributes:
        is_dropped: nothing comes any more.
        peers: for each connected rank what it said about its process.
        closed: the ranks that closed their connections before this one did.
        lost: those of them that took part in an operation of this rank, each with what is known of it.
        kept: what may never be read, and must not be freed before the connections.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        make_device: Callable[[], tuple[Any, bool]],
        here: Whereabouts,
        greeting: bytes,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._make_device = make_device
        self._here = here
        self._greeting = greeting
        self._turns: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._group: Any = None
        self._tags = itertools.count(_PAYLOAD_TAGS)
        self.is_dropped = False
        self.peers: dict[int, str] = {}
        self.closed: set[int] = set()
        self.lost: dict[int, str] = {}
        self.kept: list[Any] = []
        self._connected: set[int] = set()
        self._awaits_all = False

    def connect(self, peer: int, look: Callable[[], None], announced: Callable[[], None] = lambda: None) -> None:
        """Wait until ``peer`` has come, however long that takes, and make sure that it is a rank of the group.

        Args:
            look: is called between two looks at the store. It raises to end the wait.
            announced: is called once ``peer`` can find this rank.

        Raises:
            Broken: the connections were dropped, or cannot be made.
            RobustCheckpointError: one of the two listens where the other one cannot reach it.
            RuntimeError: the store is lost.
        """
        with self._lock:
            turn = self._turns.setdefault(peer, threading.Lock())
        with turn:  # several operations may need this connection
            if peer in self.peers:
                return
            look()
            self._make_group(look)
            self._store.set(f"{self._rank} to {peer}", "\t".join(self._here))
            announced()
            self._await([f"{peer} to {self._rank}"], look)
            there = Whereabouts(*self._store.get(f"{peer} to {self._rank}").decode(errors="replace").split("\t"))
            self._here.refuse_loopback(there)
            there.refuse_loopback(self._here)
            try:
                self.kept.append(self.send(peer, _GREETING_TAG, self._greeting))
                answer = self.receive(peer, _GREETING_TAG, len(self._greeting), patience.GREETING_SECONDS)
            except Broken as error:
                raise Broken(f"{CONNECTING_FAILED}: {there.process}: {error}") from None
            if answer != self._greeting:
                raise Broken(f"{CONNECTING_FAILED}: whoever answered is not {there.process}")
            self.peers[peer] = there.process

    def _make_group(self, look: Callable[[], None]) -> None:
        """Make the gloo group. Without ``lazy_init`` that connects each rank to each other one, so all must be here."""
        with self._making:  # and without the other lock, so that a drop ends the wait for the ranks
            if self._group is not None:
                return
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            device, is_lazy = self._make_device()
            options._devices = [device]
            options._timeout = _CONNECT_TIMEOUT if is_lazy else 10 * _CONNECT_TIMEOUT
            options._threads = 1
            if not is_lazy:
                self._store.set(f"{self._rank} is here", "")
                self._awaits_all = True
                self._await([f"{rank} is here" for rank in range(self._size)], look)
                self._awaits_all = False
            store = dist.PrefixStore("gloo", self._store)
            group = _call(dist.ProcessGroupGloo, store, self._rank, self._size, options)
            with self._lock:
                if self.is_dropped:
                    raise Broken("the connections were dropped")
                self._group = group

    def awaited(self) -> list[int]:
        """The ranks without which nobody can connect. It asks the store."""
        ranks = range(self._size) if self._awaits_all else ()
        return [rank for rank in ranks if not self._store.check([f"{rank} is here"])]

    def _await(self, keys: list[str], look: Callable[[], None]) -> None:
        pause_seconds = _FIRST_POLL_SECONDS
        while not self._store.check(keys):
            look()
            if self.is_dropped:
                raise Broken("the connections were dropped")
            time.sleep(pause_seconds)
            pause_seconds = min(_LAST_POLL_SECONDS, pause_seconds * _POLL_GROWTH)

    def new_tag(self) -> int:
        """A tag for a payload, which no other payload of this rank has."""
        return next(self._tags)

    def send(self, peer: int, tag: int, data: Payload) -> Any:
        """Start to send. Keep what is returned until the other side has received the data: gloo ends without it.

        Raises:
            Broken: ``peer`` is gone, or the connections were dropped.
        """
        view = _bytes_of(data)
        chunks = [torch.from_numpy(view[start : start + CHUNK_NBYTES]) for start in range(0, len(view), CHUNK_NBYTES)]
        return data, view, [self.send_tensor(peer, tag, chunk) for chunk in chunks]

    def send_tensor(self, peer: int, tag: int, tensor: torch.Tensor) -> Any:
        """Start to send a contiguous CPU tensor; see :meth:`send`. What is returned can ``wait``."""
        work = _call(self._living_group().send, [tensor], peer, tag)
        self._connected.add(peer)
        return work

    def receive(self, peer: int, tag: int, nbytes: int, seconds: float | None = None) -> bytearray:
        """Wait for the ``nbytes`` bytes that ``peer`` sends under ``tag``.

        Args:
            seconds: how long; ``None`` for as long as it takes. When the time is over, gloo drops the connections.

        Raises:
            Broken: ``peer`` is gone, the time is over, or the connections were dropped.
        """
        data = bytearray(nbytes)
        for start in range(0, nbytes, CHUNK_NBYTES):
            count = min(CHUNK_NBYTES, nbytes - start)
            chunk = torch.frombuffer(data, dtype=torch.uint8, count=count, offset=start)
            self.await_work(self.receive_tensor(peer, tag, chunk), seconds)
        return data

    def receive_tensor(self, peer: int, tag: int, tensor: torch.Tensor) -> Any:
        """Start to fill a contiguous CPU tensor with what ``peer`` sends under ``tag``. The result can ``wait``.

        Raises:
            Broken: ``peer`` is gone, or the connections were dropped.
        """
        work = _call(self._living_group().recv, [tensor], peer, tag)
        self._connected.add(peer)
        return work

    def await_sent(self, sending: Any, seconds: float) -> None:
        """Wait until what :meth:`send` has returned has been sent.

        Raises:
            Broken: as for :meth:`receive`.
        """
        for work in sending[-1]:
            self.await_work(work, seconds)

    def await_work(self, work: Any, seconds: float | None) -> None:
        """Wait until a tensor has been sent or received.

        Raises:
            Broken: as for :meth:`receive`.
        """
        _call(work.wait, _FOR_EVER if seconds is None else datetime.timedelta(milliseconds=max(1, int(seconds * 1000))))

    def drop(self) -> None:
        """Close all connections. All waits end, here and on the other ranks."""
        with self._lock:
            self.is_dropped = True
            group, self._group = self._group, None
        # When a wait times out, every version of gloo closes all connections and wakes all who wait on them. That takes
        # a connection which is not broken yet.
        for peer in list(self._connected) if group is not None else ():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, _CLOSING_TAG).wait(_AT_ONCE)
        self.kept.clear()

    def abandon(self) -> None:
        """Leave everything as it is, for ever. A forked child calls this: it has no part in its parent's group."""
        self.is_dropped = True
        if self._group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def _living_group(self) -> Any:
        group = self._group
        if group is None:
            raise Broken("the connections were dropped")
        return group


def _call(function: Any, *args: Any) -> Any:
    """Call ``function(*args)``, and turn gloo's exceptions into ours."""
    try:
        return function(*args)
    except RuntimeError as error:
        raise Broken(short(str(error))) from None


def short(text: str) -> str:
    """The useful part of gloo's message, without the place in its source code and without its advice."""
    line = text.partition("\n")[0]
    line = re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". This is typically")[0]
    return line[:300]


def _bytes_of(data: Payload) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """``data`` as an array without a copy. This way torch does not warn of read-only memory; sending only reads."""
    if isinstance(data, bytes) and len(data) <= 4096:
        return np.frombuffer(bytearray(data), dtype=np.uint8)  # a copy is cheaper here
    if isinstance(data, bytes):
        pointer = ctypes.cast(ctypes.c_char_p(data), ctypes.POINTER(ctypes.c_uint8))
        return np.ctypeslib.as_array(pointer, shape=(len(data),))
    return np.frombuffer(data, dtype=np.uint8)
