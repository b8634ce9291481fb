"""The payloads of one gather as files: the message of each rank, and the merged messages on the way up the tree.

Owns the files. Each rank makes its payload by a real ``Channel.gather``, which reads the payloads of its children from
files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from robust_dcp.comm import Agreement, Channel, ExchangeStats, Offer
from robust_dcp.comm.messages import Payload
from robust_dcp.comm.operation import Operation, Work
from robust_dcp.comm.tree import Tree

__all__ = ["COORDINATOR", "Mailbox", "SimulatedLink", "SimulatedOperation"]

M = TypeVar("M", bound=msgspec.Struct)

COORDINATOR = 0


@dataclass(frozen=True)
class SimulatedLink:
    """The ``Link`` of a simulated ``Channel``. It says which ranks take part."""

    rank: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    def tree(self, root: int) -> Tree:
        return Tree(self.rank, self.size, root)


class SimulatedOperation:
    """The ``Operation`` of a simulated ``Channel`` on rank ``rank`` of ``n_ranks``."""

    def __init__(self, rank: int, n_ranks: int) -> None:
        self.link = SimulatedLink(rank, tuple(range(n_ranks)))
        self.tree = self.link.tree(COORDINATOR)
        self.name, self.timeout_seconds = "simulated", 300.0
        self.stragglers: list[str] = []
        self.recordings: list[ExchangeStats] = []

    def stopped(self) -> None:
        """Report nothing: no rank fails here."""

    def note_progress(self, done_nbytes: int | None = None, total_nbytes: int | None = None) -> None:
        """Do nothing: no rank waits here."""


class _OnTheWayUp(SimulatedOperation):
    """One gather on a rank below the coordinator. Afterwards ``payload`` is what the rank sends to its parent."""

    def __init__(self, rank: int, n_ranks: int, own: Payload, below: Sequence[Payload]) -> None:
        super().__init__(rank, n_ranks)
        self.payload = own
        self._below = list(below)

    def run(self, verb: str, phase: str, root: int, work: Work) -> tuple[Agreement, Payload]:
        self.payload = work.contribute()[1] or self.payload
        if self._below:
            self.payload = work.merge(self.payload, self._below)
        return Agreement.of(self.link.rank, Offer()), b""


class Mailbox:
    """The files of one gather of ``ranks`` ranks, in ``directory``."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self._directory = directory
        self._ranks = ranks
        directory.mkdir(parents=True, exist_ok=True)

    def post(self, rank: int, message: msgspec.Struct) -> None:
        """Encode ``message`` as the message of ``rank``."""
        self._said(rank).write_bytes(self._handed_up(rank, type(message), message))

    def merge(self, message_type: type[msgspec.Struct]) -> None:
        """After all ranks have posted, merge the messages up the tree, as far as the coordinator's children."""
        seconds: dict[int, float] = {}
        for rank in range(self._ranks - 1, COORDINATOR, -1):  # children have higher numbers than their parents
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
        """The bytes of the messages of all ranks except the coordinator, before any merge."""
        return sum(file.stat().st_size for file in self._directory.glob("said-*"))

    @property
    def merging_seconds(self) -> float:
        """The CPU time of merges below the coordinator that wait for each other, on the longest path up the tree."""
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
