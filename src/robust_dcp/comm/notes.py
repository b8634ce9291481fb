"""What ranks tell each other through the store of their process group: where to meet, and how an operation ended.

This module owns the keys and the deadlines. A store answers in microseconds, or never again if its host is gone or
frozen. So a thread asks each question, and we leave that thread behind if no answer comes. Once ranks are connected,
the store is asked nothing until something fails.

A store can outlive a process group, and a new group may get the same name. So the ranks of a group meet under its
*life*, a random word. The first rank that comes draws it, and the first one that leaves the group takes it away.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from robust_dcp.comm import patience
from robust_dcp.comm.connections import short

__all__ = ["STORE_IS_LOST", "Notes", "StoreLost"]

T = TypeVar("T")

STORE_IS_LOST = "the store of the process group does not answer"


class StoreLost(Exception):
    """The store does not answer: its host is gone or frozen. This is internal to :mod:`robust_dcp.comm`."""


class Notes:
    """The notes of one group.

    Args:
        open_store: opens the store that the ranks share. It may take long.
        name: the name of the group, the same on all ranks. No other group that uses the store has it.

    Attributes:
        life: the random word, once it is known.
        has_begun_anew: the ranks of a later group of this name meet under another life.
    """

    def __init__(self, open_store: Callable[[], Any], name: str) -> None:
        self._open_store = open_store
        self._name = name
        self._lock = threading.Lock()
        self._store: Any = None
        self._lost_until = 0.0
        self._lost_detail = ""
        self.life = ""
        self.has_begun_anew = False

    def under(self, place: str) -> Any:
        """A store for the keys of ``place`` in this life of the group. It waits for the store as long as that takes.

        Raises:
            StoreLost: the store is gone.
        """
        with self._noting_loss():
            return dist.PrefixStore(f"{self._name}/{self._current()}/{place}", self._store)

    def is_pointless(self, generation: int) -> bool:
        """Whether the other ranks do not meet for this generation of connections any more. It waits for the store.

        Raises:
            StoreLost: the store is gone.
        """
        with self._noting_loss():
            key, life = f"{self._name}/life", self.life
            if life and not (self._store.check([key]) and bytes(self._store.get(key)) == life.encode()):
                self.life, self.has_begun_anew = "", True
                return True
            return bool(self.under(f"{generation}").check(["end"]))

    def leave(self) -> None:
        """Take the life away, so that a later group of the same name begins anew.

        Raises:
            StoreLost: the store is gone.
        """
        if self.life:
            self.ask(lambda: _compare_set(self._store, f"{self._name}/life", self.life, ""))

    def _current(self) -> str:
        with self._lock:
            if self._store is None:
                self._store = self._open_store()
            if not self.life:
                drawn = secrets.token_hex(8)
                self.life = _compare_set(self._store, f"{self._name}/life", "", drawn).decode()
                self.has_begun_anew = False
            return self.life

    def call_roll(self, generation: int, answer: bytes) -> bool:
        """Answer the roll call of a generation of connections. Return whether this rank is the first one.

        Raises:
            StoreLost: the store does not answer.
        """

        def call() -> bool:
            notes = self.under(f"{generation}")
            number = notes.add("answers", 1)
            notes.set(f"answer {number}", answer)
            return int(number) == 1

        return self.ask(call)

    def answers(self, generation: int) -> list[bytes]:
        """What ranks have answered so far.

        Raises:
            StoreLost: the store does not answer.
        """

        def read() -> list[bytes]:
            notes = self.under(f"{generation}")
            keys = [f"answer {number + 1}" for number in range(notes.add("answers", 0))]
            return [bytes(notes.get(key)) for key in keys if notes.check([key])]

        return self.ask(read)

    def end_of(self, generation: int) -> bytes:
        """The end message of a generation; no bytes if there is none.

        Raises:
            StoreLost: the store does not answer.
        """

        def read() -> bytes:
            notes = self.under(f"{generation}")
            return bytes(notes.get("end")) if notes.check(["end"]) else b""

        return self.ask(read)

    def settle(self, generation: int, end_message: bytes, *, patient: bool = False) -> bytes:
        """Record ``end_message`` as the end of a generation, unless it has one. Return the one that counts.

        Args:
            patient: wait for the store as long as that takes.

        Raises:
            StoreLost: the store does not answer.
        """

        def write() -> bytes:
            return _compare_set(self.under(f"{generation}"), "end", "", end_message)

        return write() if patient else self.ask(write)

    def note_heard(self, generation: int, n: int = 1) -> int:
        """Count that ``n`` ranks have read the end message, and return how many have.

        Raises:
            StoreLost: the store does not answer.
        """
        return self.ask(lambda: int(self.under(f"{generation}").add("heard", n)))

    def waits(self, rank: int, where: bytes) -> None:
        """Say that ``rank`` waits for others, and where; no bytes if it waits no longer.

        Raises:
            StoreLost: the store does not answer.
        """
        self.ask(lambda: self.under("waits").set(f"{rank}", where))

    def where_waits(self, rank: int) -> bytes:
        """What ``rank`` has said by :meth:`waits`; no bytes if it does not wait.

        Raises:
            StoreLost: the store does not answer.
        """

        def read() -> bytes:
            notes = self.under("waits")
            return bytes(notes.get(f"{rank}")) if notes.check([f"{rank}"]) else b""

        return self.ask(read)

    def ask(self, question: Callable[[], T]) -> T:
        """What ``question``, which asks the store, returns.

        Raises:
            StoreLost: the store does not answer in time, or has not done so shortly before.
        """
        if time.monotonic() < self._lost_until:
            raise StoreLost(self._lost_detail)
        answers: list[T] = []
        problems: list[str] = []

        def ask() -> None:
            try:
                answers.append(question())
            except (RuntimeError, StoreLost) as error:
                problems.append(short(str(error) or type(error).__name__))

        thread = threading.Thread(target=ask, name="robust_dcp: question to the store", daemon=True)
        thread.start()
        thread.join(patience.STORE_ANSWER_SECONDS)
        if answers:
            return answers[0]
        self._lost_detail = problems[0] if problems else f"no answer within {patience.STORE_ANSWER_SECONDS:g} seconds"
        self._lost_until = time.monotonic() + patience.STORE_LOST_SECONDS
        raise StoreLost(self._lost_detail)

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise StoreLost(short(str(error) or type(error).__name__)) from None


def _compare_set(store: Any, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
    """Set ``key`` to ``desired`` if it is ``expected`` or, where nothing is expected, not there. Return its value."""
    try:
        return bytes(store.compare_set(key, expected, desired))
    except (NotImplementedError, RuntimeError) as error:
        if not re_not_implemented(error):
            raise
    # A store written in Python, such as torchelastic's EtcdStore, cannot do that in one step.
    value = bytes(store.get(key)) if store.check([key]) else b""
    if value != (expected.encode() if isinstance(expected, str) else expected):
        return value
    store.set(key, desired)
    return desired.encode() if isinstance(desired, str) else desired


def re_not_implemented(error: BaseException) -> bool:
    """Whether a store lacks a method."""
    return isinstance(error, NotImplementedError) or "pure virtual" in str(error) or "mplemented" in str(error)
