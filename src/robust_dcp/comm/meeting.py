"""What ranks tell each other through the store of their process group: where they listen, and how an operation ended.

This module owns the keys and the deadlines. A store answers in microseconds, or never again if its host is gone or
frozen. So a thread asks each question, and we leave that thread behind if no answer comes. Once ranks are connected,
the store is asked nothing until something fails.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from robust_dcp.comm import patience, process_group
from robust_dcp.comm.pipe import GlooPipe, PipeBroken, short

__all__ = ["STORE_IS_LOST", "Meeting", "StoreLost"]

T = TypeVar("T")

_CONNECT_TIMEOUT = datetime.timedelta(seconds=5)
"""The timeout of each attempt of gloo to connect."""

_FIRST_POLL_SECONDS = 0.002
_LAST_POLL_SECONDS = 0.25
_POLL_GROWTH = 1.3


STORE_IS_LOST = "the store of the process group does not answer"


class StoreLost(Exception):
    """The store does not answer: its host is gone or frozen. This is internal to :mod:`robust_dcp.comm`."""


class Meeting:
    """Where the ranks of a group find each other.

    Args:
        open_store: opens the store that the ranks share. It is called once, in a thread that may wait for it.
        name: the name of the group, the same on all ranks. No other group that uses the store has it.
        rank: this process's rank in the group.
    """

    def __init__(self, open_store: Callable[[], Any], name: str, rank: int) -> None:
        self._open_store = open_store
        self._name = name
        self._rank = rank
        self._lock = threading.Lock()
        self._store: Any = None
        self._announced = threading.Condition()
        self._n_announced = 0
        self._lost_until = 0.0
        self._lost_detail = ""
        self.closed = False

    def connect(
        self,
        peer: int,
        generation: int,
        purpose: str = "exchanges",
        *,
        met: Callable[[process_group.Address], None] = lambda address: None,
        waiting: Callable[[], None] = lambda: None,
    ) -> GlooPipe:
        """Connect to ``peer`` for ``purpose``, for the ``generation``-th time. Wait until ``peer`` comes.

        Args:
            met: is called with the address where ``peer`` listens, once ``peer`` has put it into the store.
            waiting: is called about every second until then.

        Raises:
            PipeBroken: ``peer`` came and is gone, the store is gone, or this meeting was closed.
        """
        first, second = sorted((self._rank, peer))
        try:
            try:
                store = dist.PrefixStore(f"{purpose}/{first}-{second}/{generation}", self._shared())
            except RuntimeError as error:
                raise StoreLost(_first_line(error)) from None
            side = 0 if self._rank == first else 1
            pair = _PairStore(store, self, met, waiting)
            try:
                group = process_group.connect_pair(pair, side, _CONNECT_TIMEOUT)
            except RuntimeError:
                if pair.problem:
                    raise StoreLost(pair.problem) from None
                raise
        except StoreLost as lost:
            raise PipeBroken(f"{STORE_IS_LOST} ({lost})") from None
        except RuntimeError as error:
            raise PipeBroken(f"connecting failed: {_first_line(error)}") from None
        return GlooPipe(group, 1 - side)

    def await_announced(self, n_connections: int) -> None:
        """Wait briefly until the store holds the addresses of ``n_connections`` connections of this process.

        After that, other ranks notice if this process ends, because nobody listens at these addresses any more.
        """
        with self._announced:
            self._announced.wait_for(lambda: self._n_announced >= n_connections, patience.ANNOUNCE_SECONDS)

    def note_announced(self) -> None:
        """The address of one more connection is in the store."""
        with self._announced:
            self._n_announced += 1
            self._announced.notify_all()

    def settle(self, operations: Sequence[str], end_message: bytes) -> bytes:
        """Record ``end_message`` as the end of ``operations``, unless the first of them has one. Return the one that
        counts.

        Raises:
            StoreLost: the store does not answer.
        """

        def ask(store: Any) -> bytes:
            first, *others = (f"ended/{operation}" for operation in operations)
            counts = bytes(store.compare_set(first, "", end_message))
            if counts == end_message:  # another rank's end message may name other operations
                for key in others:
                    store.compare_set(key, "", end_message)
            return counts

        return self._ask(ask)

    def end_message_of(self, operation: str) -> bytes | None:
        """The end message that :meth:`settle` recorded; ``None`` if there is none yet.

        Raises:
            StoreLost: the store does not answer.
        """
        key = f"ended/{operation}"
        return self._ask(lambda store: bytes(store.get(key)) if store.check([key]) else None)

    def _shared(self) -> Any:
        """The store, with a prefix for this life of the group.

        A store can outlive a process group, and a new group may get the same name. Every member counts how often it has
        come, and all members count the same. So nobody reads what an earlier group left behind.
        """
        with self._lock:
            if self._store is None:
                store = self._open_store()
                life = store.add(f"{self._name}/lives/{self._rank}", 1)
                self._store = dist.PrefixStore(f"{self._name}/{life}", store)
            return self._store

    def _ask(self, question: Callable[[Any], T]) -> T:
        if time.monotonic() < self._lost_until:
            raise StoreLost(self._lost_detail)
        answers: list[T] = []
        problems: list[str] = []

        def ask() -> None:
            try:
                answers.append(question(self._shared()))
            except RuntimeError as error:
                problems.append(_first_line(error))

        thread = threading.Thread(target=ask, name="robust_dcp: question to the store", daemon=True)
        thread.start()
        thread.join(patience.STORE_ANSWER_SECONDS)
        if answers:
            return answers[0]
        self._lost_detail = problems[0] if problems else f"no answer within {patience.STORE_ANSWER_SECONDS:g} seconds"
        self._lost_until = time.monotonic() + patience.STORE_LOST_SECONDS
        raise StoreLost(self._lost_detail)


class _PairStore(dist.Store):
    """The store of one pair, as gloo uses it. It polls for keys, so that a wait does not block other questions."""

    def __init__(
        self,
        store: Any,
        meeting: Meeting,
        met: Callable[[process_group.Address], None],
        waiting: Callable[[], None],
    ) -> None:
        super().__init__()
        self._met = met
        self._waiting = waiting
        self._shared = store
        self._meeting = meeting
        self._own = b""
        self._known: dict[str, bytes] = {}
        self.problem = ""  # the latest error of the store

    def set(self, key: str, value: bytes | str) -> None:
        self._known[key] = self._own = value.encode() if isinstance(value, str) else bytes(value)
        with self._noting_problems():
            self._shared.set(key, value)
        self._meeting.note_announced()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: Iterable[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait for ``keys``. This ignores gloo's ``timeout``, because the operations decide which rank is too late."""
        for key in keys:
            pause_seconds, told_seconds = _FIRST_POLL_SECONDS, time.monotonic()
            while key not in self._known:
                with self._noting_problems():
                    if self._shared.check([key]):
                        self._known[key] = bytes(self._shared.get(key))
                        address = process_group.address_of_other(self._own, self._known[key])
                        if address is not None:
                            self._met(address)
                        break
                if self._meeting.closed:
                    raise RuntimeError("closed while connecting")
                if time.monotonic() - told_seconds > patience.MEETING_SECONDS:
                    self._waiting()
                    told_seconds = time.monotonic()
                # Poll more slowly the longer it takes, to spare the store.
                time.sleep(pause_seconds)
                pause_seconds = min(_LAST_POLL_SECONDS, pause_seconds * _POLL_GROWTH)

    @contextmanager
    def _noting_problems(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.problem = _first_line(error)
            raise

    def check(self, keys: Iterable[str]) -> bool:
        return all(key in self._known or self._shared.check([key]) for key in keys)


def _first_line(error: BaseException) -> str:
    return short(str(error) or type(error).__name__)
