"""The payloads of one gather as files: what each rank has to say, and what is made of that on the way up the tree.

Owns the files. What a rank hands up the tree is made by its own ``Channel.gather``, with the payloads of its children
out of files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from robust_dcp.comm import Agreement, Channel, Offer
from robust_dcp.comm.operation import Operation, Work
from robust_dcp.comm.pipe import Payload
from robust_dcp.comm.tree import Tree

__all__ = ["COORDINATOR", "Mailbox", "SimulatedLink", "SimulatedOperation"]

M = TypeVar("M", bound=msgspec.Struct)

COORDINATOR = 0


@dataclass(frozen=True)
class SimulatedLink:
    """Who takes part: what a ``Channel`` asks its ``Link``."""

    rank: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    def tree(self, root: int) -> Tree:
        return Tree(self.rank, self.size, root)


class SimulatedOperation:
    """What a ``Channel`` asks its ``Operation``, on ``rank`` of ``n_ranks``."""

    def __init__(self, rank: int, n_ranks: int) -> None:
        self.link = SimulatedLink(rank, tuple(range(n_ranks)))
        self.tree = self.link.tree(COORDINATOR)
        self.timeout_seconds = 300.0

    def stopped(self) -> None:
        """Nobody fails here."""

    def note_progress(self, done_nbytes: int | None = None, total_nbytes: int | None = None) -> None:
        """Nobody waits here."""


class _OnTheWayUp(SimulatedOperation):
    """One gather on a rank below the coordinator, up to what it hands to its parent: ``payload``."""

    def __init__(self, rank: int, n_ranks: int, own: Payload, below: Sequence[Payload]) -> None:
        super().__init__(rank, n_ranks)
        self.payload = own
        self._below = list(below)

    def run(self, verb: str, phase: str, root: int, work: Work) -> tuple[Agreement, Payload]:
        self.payload = work.contribute().payload or self.payload
        if self._below:
            self.payload = work.merge(self.payload, self._below)
        return Agreement.of(self.link.rank, Offer()), b""


class Mailbox:
    """One gather of ``ranks`` ranks in ``directory``."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self._directory = directory
        self._ranks = ranks
        directory.mkdir(parents=True, exist_ok=True)

    def post(self, rank: int, message: msgspec.Struct) -> None:
        """``rank`` has ``message`` to say: make of it what travels."""
        self._said(rank).write_bytes(self._handed_up(rank, type(message), message))

    def merge(self, message_type: type[msgspec.Struct]) -> None:
        """All ranks have posted what they have to say: hand it up the tree, as far as to the coordinator's children."""
        seconds: dict[int, float] = {}
        for rank in range(self._ranks - 1, COORDINATOR, -1):  # children come behind their parents
            children = Tree(rank, self._ranks, COORDINATOR).children
            own, below = _read(self._said(rank)), [_read(self._passed(child)) for child in children]
            sent = [payload for payload in below if payload]
            started = time.process_time()
            payload = self._handed_up(rank, message_type, None, own, sent)
            merging = time.process_time() - started
            seconds[rank] = merging + max((seconds[child] for child in children), default=0.0)
            self._passed(rank).write_bytes(payload)
        self._seconds.write_text(str(max(seconds.values(), default=0.0)))

    def _handed_up(
        self,
        rank: int,
        message_type: type[M],
        message: M | None,
        own: Payload = b"",
        below: Sequence[Payload] = (),
    ) -> Payload:
        operation = _OnTheWayUp(rank, self._ranks, own, below)
        Channel(cast(Operation, operation), COORDINATOR).gather("simulated", lambda: message, message_type)
        return operation.payload

    @property
    def said_nbytes(self) -> int:
        """What all ranks but the coordinator have to say, before any of it is merged."""
        return sum(file.stat().st_size for file in self._directory.glob("said-*"))

    @property
    def merging_seconds(self) -> float:
        """CPU time of the merges that wait for each other, below the coordinator: of the longest way up the tree."""
        return float(self._seconds.read_text())

    def arriving(self) -> dict[int, bytes]:
        """The payload of each of the coordinator's children."""
        return {child: _read(self._passed(child)) for child in Tree(COORDINATOR, self._ranks, COORDINATOR).children}

    def _said(self, rank: int) -> Path:
        return self._directory / f"said-{rank}"

    def _passed(self, rank: int) -> Path:
        return self._directory / f"passed-{rank}"

    @property
    def _seconds(self) -> Path:
        return self._directory / "seconds"


def _read(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""
