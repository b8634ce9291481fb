"""The store of a process group, in which ranks meet, and tell each other what happened when an exchange fails.

Each question to it has a deadline. A frozen host accepts connections and never answers, and torch waits for ever then.
So a thread asks, over a client of our own, and whoever waits for the answer gives up in time. The next question gets
another thread and another client, as a firewall may have forgotten the connection.

A store can outlive a process group, and a new group may get the same name. So the ranks of a group meet under its
*life*, a random word. The first rank that comes draws it, and the first one that leaves the group takes it away. A life
that was drawn before this process started belongs to killed ones, such as those before a restart by torchrun. Within a
life each generation of connections has a place of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from robust_dcp.environment import boot_id
from robust_dcp.errors import ExchangeError
from robust_dcp.threads import start_thread

T = TypeVar("T")

_TIMEOUT = datetime.timedelta(seconds=10)
"""How long torch tries to connect to the store, which is there, and gloo waits for a key, which is there as well."""

CLOCKS_APART_SECONDS = 10.0
"""How much the clocks of two hosts may differ."""

_QUESTION = struct.pack("<BIBQQ", 0, 0x3C85F7CE, 5, 1, 5) + b"alive"
"""Asks a ``TCPStore`` whether it has the key ``alive``. Whatever it answers, and if it hangs up, it is alive."""


class StoreLost(Exception):
    """The store is gone. This is internal to :mod:`robust_dcp.comm`."""


class StoreSilent(StoreLost):
    """The store has not answered in time. Its host is frozen, or busy, and may answer later."""


class Notes:
    """What the ranks of one group tell each other through the store of their process group.

    Once ranks are connected, the store is asked nothing until something fails.

    Args:
        store: the store of the process group.
        name: the name of the group, the same on all ranks. No other group that uses the store has it.

    Attributes:
        life: the word, once it is known: when and on which machine it was drawn, and 64 random bits.
        life_over: the life that is over: the ranks of a later group of this name meet under another one.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._store_of_group = store
        self._name = name
        self._host, self._port = host_of(store)
        self._store: Any = None if self._host else store
        self._prefix = ""
        self._lock = threading.RLock()  # the garbage collector may end another group meanwhile
        self._questions: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self.life = ""
        self.life_over = ""

    def ask(self, place: str, question: Callable[[Any], T], seconds: float) -> T:
        """What ``question`` returns. It gets the store for the keys of ``place`` in this life of the group.

        Raises:
            StoreSilent: the store does not answer within ``seconds``.
            StoreLost: the store is gone.
        """
        answer: Future[T] = Future()

        def find() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question(self._under(place, seconds)))
                except BaseException as error:
                    if self._host:
                        self._store = None
                    answer.set_exception(error)

        with self._lock:
            if not self._host or threading.current_thread() is self._thread:
                find()
            else:
                self._questions.append(find)
                if self._thread is None:
                    try:
                        self._thread = start_thread(self._find_all, name="robust_dcp: store")
                    except ExchangeError:  # which the others hear of by the store
                        self._questions.pop()()
        try:
            return answer.result(seconds)
        except NoAnswer:
            raise StoreSilent(f"no answer within {seconds:g} seconds") from None
        except RuntimeError as error:
            text = short(str(error) or type(error).__name__)
            raise (StoreSilent if "timeout" in text.lower() or "timed out" in text else StoreLost)(text) from None
        finally:
            if not answer.done() and not answer.cancel():  # the thread hangs in it
                with self._lock:
                    self._thread = self._store = None

    def _find_all(self) -> None:
        """In the thread that asks: find answers until there are no questions, or another thread asks."""
        while True:
            with self._lock:
                if self._thread is not threading.current_thread():
                    return
                if not self._questions:
                    self._thread = None
                    return
                find = self._questions.popleft()
            find()

    def _under(self, place: str, seconds: float) -> Any:
        if self._store is None:
            self._store = self._client(seconds)
        if not self.life:
            machine = boot_id()
            drawn = f"{time.time()} {machine} {secrets.token_hex(8)}"
            self.life = compare_set(self._store, f"{self._name}/life", "", drawn).decode()
            at, drawn_on, _ = self.life.split(" ")
            if float(at) + (0 if drawn_on == machine else CLOCKS_APART_SECONDS) < _process_start_seconds():
                self.life = compare_set(self._store, f"{self._name}/life", self.life, drawn).decode()
        # Each question names its keys in full, so they are short: the random part of the life tells it from others.
        return dist.PrefixStore(f"{self._name}/{self.life[-16:]}/{place}", self._store)

    def _client(self, seconds: float) -> Any:
        """A client of our own. A client serves one call at a time, and that of the group may wait for a key.

        It lacks the prefixes of the group's store, which torch does not tell: torchelastic had a new one for each
        restart. So the ranks agree on one of ours, and that is all that we ask the client of the group.

        Raises:
            RuntimeError: the host of the store is gone, or does not answer within ``seconds``.
        """
        try:
            with socket.create_connection((self._host, self._port), timeout=seconds) as probe:
                probe.sendall(_QUESTION)
                probe.recv(1)  # torch would print pages while it tries again and again
        except OSError as error:
            raise RuntimeError(f"connecting to it fails: {error}") from None
        client = dist.TCPStore(self._host, self._port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
        if not self._prefix:
            drawn = secrets.token_hex(8)
            self._prefix = compare_set(self._store_of_group, f"{self._name}/place", "", drawn).decode()
        return dist.PrefixStore(self._prefix, client)

    # Questions to ask in a place.

    def is_pointless(self, store: Any) -> bool:
        """Whether the other ranks do not meet there any more."""
        life = self.life
        # A rank that only leaves takes the life away, and draws none: those that are left go on under theirs.
        if value_of(self._store, f"{self._name}/life") not in (b"", life.encode()):
            self.life_over = life
        return self.life_over == life or bool(store.check(["end"]))

    def leave(self, store: Any) -> None:
        """Take the life away, so that a later group of the same name begins anew."""
        compare_set(self._store, f"{self._name}/life", self.life, "")

    def forget(self) -> None:
        """Let go of the store, which this process may host."""
        self._store, self._store_of_group = None, dist.HashStore()


def _process_start_seconds() -> float:
    """When this process started, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the machine booted
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


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
    with contextlib.suppress(AttributeError, RuntimeError):  # torch 2.7 cannot tell, and a group made by hand has none
        store = parent.get_group_store()
        if store is not None:
            return store
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def host_of(store: Any) -> tuple[str, int]:
    """The host and the port of a store; an empty host if it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else ("", 0)


def value_of(store: Any, key: str) -> bytes:
    """What ``key`` holds; no bytes if nothing was written."""
    return bytes(store.get(key)) if store.check([key]) else b""


def values_of(store: Any, keys: Sequence[str]) -> list[bytes]:
    """What each of ``keys`` holds; all of them are there. It is one round trip if the store can do that."""
    try:
        return [bytes(value) for value in store.multi_get(list(keys))]
    except RuntimeError as error:
        if not _is_unable(error):
            raise
    return [bytes(store.get(key)) for key in keys]


def compare_set(store: Any, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
    """Set ``key`` to ``desired`` if it is ``expected`` or, where nothing is expected, not there. Return its value."""
    try:
        return bytes(store.compare_set(key, expected, desired))
    except RuntimeError as error:
        if not _is_unable(error):
            raise
    value = value_of(store, key)
    if value != (expected.encode() if isinstance(expected, str) else expected):
        return value
    store.set(key, desired)
    return desired.encode() if isinstance(desired, str) else desired


def _is_unable(error: RuntimeError) -> bool:
    """Whether a store has failed because it lacks a method: one written in Python, such as torchelastic's EtcdStore."""
    return isinstance(error, NotImplementedError) or bool(re.search("pure virtual|mplemented", str(error)))


def short(text: str) -> str:
    """The useful part of torch's message, without the place in its source code and without its advice."""
    line = text.partition("\n")[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". This is typically")[0][:300]
