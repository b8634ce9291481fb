"""Who is where: a few keys in the store of the group, written by each rank, read on connecting and after a failure.

It owns the keys and their values, and draws no conclusions (:mod:`robust_dcp.comm.post_mortem` does). While exchanges
go well nothing is read, and nothing waits for the store.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import msgspec

__all__ = ["LocalStore", "Presence", "RollCall", "State", "StoreLost"]


class State(IntEnum):
    """How far a rank has come in the exchange ``sequence`` of its ``generation``."""

    PREPARING = 1  # doing its own work before it
    JOINED = 2  # waiting for the others
    FINISHED = 3
    GAVE_UP = 4  # and has closed its connections, or is about to


class Presence(msgspec.Struct, array_like=True, frozen=True):
    """What a rank last said of itself. ``lost_rank``: whose connection it saw break; -1 for none."""

    state: State
    generation: int
    sequence: int
    operation: str
    host: str
    pid: int
    unix_seconds: float
    lost_rank: int = -1


class StoreLost(Exception):
    """The store does not answer: the process that hosts it is gone. Internal to :mod:`robust_dcp.comm`."""


class _Store(Protocol):
    def set(self, key: str, value: str | bytes) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str | bytes) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def multi_get(self, keys: list[str]) -> Sequence[bytes]: ...


class LocalStore:
    """The store of a group of one."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str | bytes) -> bytes:
        if self._values.get(key, b"") == expected.encode():
            self.set(key, desired)
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        count = int(self._values.get(key, b"0")) + amount
        self.set(key, str(count))
        return count

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._values[key] for key in keys]


class RollCall:
    """This rank's page in the register of one link, and a view of all others.

    Args:
        store: anything with ``set``, ``get``, ``check``, ``compare_set``, ``add`` and ``multi_get`` as torch's stores
            have them.
        rank: of this process in the group.
    """

    def __init__(self, store: _Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._host = socket.gethostname()

    def arrive(self, generation: int) -> int:
        """Be counted, once, among those that want to connect; how many have been, this rank included.

        Raises:
            StoreLost: nobody will know.
        """
        try:
            return self._store.add(f"{generation}/arrived", 1)
        except RuntimeError as error:
            raise StoreLost(str(error)) from None

    def claim_node(self, generation: int, claim: bytes) -> None:
        """Say, before arriving, on which node this rank is.

        Raises:
            StoreLost: nobody will know.
        """
        try:
            self._store.set(f"{generation}/node/{self._rank}", claim)
        except RuntimeError as error:
            raise StoreLost(str(error)) from None

    def node_claims(self, generation: int, size: int) -> Sequence[bytes] | None:
        """What all ranks claimed, in rank order; ``None`` if some have not. Once all have arrived, it stays like that.

        Raises:
            StoreLost: see there.
        """
        keys = [f"{generation}/node/{rank}" for rank in range(size)]
        try:
            return self._store.multi_get(keys) if self._store.check(keys) else None
        except RuntimeError as error:
            raise StoreLost(str(error)) from None

    def publish_nodes(self, generation: int, nodes: bytes) -> None:
        """Make ``nodes`` the map of the ranks that are about to connect.

        Raises:
            StoreLost: nobody will know.
        """
        self._set_if_absent(f"{generation}/nodes", nodes)

    def nodes(self, generation: int) -> bytes | None:
        """What :meth:`publish_nodes` published; ``None`` if nothing.

        Raises:
            StoreLost: see there.
        """
        return self._read(f"{generation}/nodes")

    def decide_meeting(self, generation: int, connect: bool) -> bool:
        """Decide whether all ranks connect now or none ever does, unless it is decided; what is decided.

        Raises:
            StoreLost: nobody will know.
        """
        return self._set_if_absent(f"{generation}/connect", b"yes" if connect else b"no") == b"yes"

    def meeting(self, generation: int) -> bool | None:
        """What :meth:`decide_meeting` decided; ``None`` if nothing yet.

        Raises:
            StoreLost: see there.
        """
        decision = self._read(f"{generation}/connect")
        return None if decision is None else decision == b"yes"

    def note(self, state: State, generation: int, sequence: int, operation: str) -> None:
        """Say where this rank is. A lost store is no reason to fail while the ranks can still talk."""
        with contextlib.suppress(StoreLost):
            self._write_presence(state, generation, sequence, operation, -1)

    def give_up(self, generation: int, sequence: int, operation: str, lost_rank: int | None) -> bool:
        """Say, before closing any connection, that this rank ends ``generation``; whether it is the first to do so.

        Once this returns, every rank sees it: whoever finds this rank's connections closed knows why.

        Raises:
            StoreLost: nobody will know.
        """
        self._write_presence(State.GAVE_UP, generation, sequence, operation, -1 if lost_rank is None else lost_rank)
        # This waits for an answer, and the server handles one client's requests in order.
        own = str(self._rank).encode()
        return self._set_if_absent(f"{generation}/reporter", own) == own

    def seen(self, rank: int) -> Presence | None:
        """Where ``rank`` was last seen; ``None`` if it never came.

        Raises:
            StoreLost: see there.
        """
        data = self._read(f"rank/{rank}")
        return None if data is None else msgspec.msgpack.decode(data, type=Presence)

    def publish_verdict(self, generation: int, verdict: bytes) -> bytes:
        """Make ``verdict`` the account of how ``generation`` ended, unless there is one; return the one that counts.

        Raises:
            StoreLost: see there.
        """
        return self._set_if_absent(f"{generation}/verdict", verdict)

    def verdict(self, generation: int) -> bytes | None:
        """How ``generation`` ended; ``None`` if it has not.

        Raises:
            StoreLost: see there.
        """
        return self._read(f"{generation}/verdict")

    def ask_again(self, generation: int, tag: int) -> None:
        """Say, before confirming, that the round ``tag`` has to be repeated.

        Raises:
            StoreLost: see there.
        """
        self._set_if_absent(f"{generation}/again/{tag}", b"1")

    def was_asked_again(self, generation: int, tag: int) -> bool:
        """Whether some rank that has confirmed the round ``tag`` wants it repeated: for whoever cannot read that.

        Raises:
            StoreLost: see there.
        """
        return self._read(f"{generation}/again/{tag}") is not None

    def announce(self, generation: int, sequence: int, text: str) -> None:
        """Tell the ranks that still work towards exchange ``sequence`` that it will fail."""
        with contextlib.suppress(StoreLost):
            self._set_if_absent(f"{generation}/failed/{sequence}", text.encode())

    def announced(self, generation: int, sequence: int) -> str | None:
        """What :meth:`announce` told of exchange ``sequence``, if anything."""
        with contextlib.suppress(StoreLost):
            data = self._read(f"{generation}/failed/{sequence}")
            return None if data is None else data.decode()
        return None

    def _write_presence(self, state: State, generation: int, sequence: int, operation: str, lost_rank: int) -> None:
        presence = Presence(
            state=state,
            generation=generation,
            sequence=sequence,
            operation=operation,
            host=self._host,
            pid=os.getpid(),
            unix_seconds=time.time(),
            lost_rank=lost_rank,
        )
        try:
            self._store.set(f"rank/{self._rank}", msgspec.msgpack.encode(presence))
        except RuntimeError as error:
            raise StoreLost(str(error)) from None

    def _read(self, key: str) -> bytes | None:
        try:
            # `get` would wait for a key that is not there.
            return self._store.get(key) if self._store.check([key]) else None
        except RuntimeError as error:
            raise StoreLost(str(error)) from None

    def _set_if_absent(self, key: str, value: bytes) -> bytes:
        """What is at ``key`` after that: ``value`` or what somebody else had put there."""
        try:
            return self._store.compare_set(key, "", value)
        except RuntimeError as error:
            raise StoreLost(str(error)) from None
