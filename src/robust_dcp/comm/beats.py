"""Beats: what ranks tell each other while they work.

A beat says which rank has shown no progress for longest, and how far the slowest rank has come. It covers all ranks
that its receiver hears of only through its sender. It takes a few bytes, however many ranks these are. The root logs
for which ranks all others wait.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from robust_dcp.comm import patience

__all__ = ["Beat", "Progress", "Stragglers"]

logger = logging.getLogger(__name__)

_LAYOUT = struct.Struct("<idIiQQd")
_NOBODY = -1


@dataclass(frozen=True)
class Beat:
    """What a rank says about itself and the ranks behind it.

    Attributes:
        silent_rank: the rank that has shown no progress for longest; -1 if all are done.
        silent_seconds: for how long, at the time of sending.
        n_at_work: how many ranks are not done, as far as the sender knows.
        slow_rank: the rank that has done the smallest part of its work, among ranks that said how much they have to
            do; -1 if none said so.
        slow_done_nbytes, slow_total_nbytes: how much that rank has done, and how much it has to do.
        slow_seconds: how long that rank has been working.
        arrived_seconds: when this beat was received (``time.monotonic()``).
    """

    silent_rank: int = _NOBODY
    silent_seconds: float = 0.0
    n_at_work: int = 0
    slow_rank: int = _NOBODY
    slow_done_nbytes: int = 0
    slow_total_nbytes: int = 0
    slow_seconds: float = 0.0
    arrived_seconds: float = 0.0

    @classmethod
    def of_silent(cls, rank: int, seconds: float, said: Beat | None, n_ranks: int) -> Beat:
        """A beat about a neighbour that has not come: the rank silent behind it, and the beat that it last ``said``."""
        return replace(said or cls(n_at_work=n_ranks), silent_rank=rank, silent_seconds=seconds)

    @classmethod
    def slowest(cls, beats: Sequence[Beat]) -> Beat:
        """Combine several beats into one."""
        silent = max(beats, key=lambda beat: beat.silent_seconds, default=cls())
        slow = min((beat for beat in beats if beat.slow_rank >= 0), key=lambda beat: beat.part_done, default=silent)
        return cls(
            silent_rank=silent.silent_rank,
            silent_seconds=silent.silent_seconds,
            n_at_work=sum(beat.n_at_work for beat in beats),
            slow_rank=slow.slow_rank,
            slow_done_nbytes=slow.slow_done_nbytes,
            slow_total_nbytes=slow.slow_total_nbytes,
            slow_seconds=slow.slow_seconds,
        )

    @property
    def part_done(self) -> float:
        """The part of its work that the slowest rank has done, from 0 to 1."""
        return self.slow_done_nbytes / self.slow_total_nbytes if self.slow_total_nbytes else 0.0

    def encode(self) -> bytes:
        """Encode for the body of a frame."""
        return _LAYOUT.pack(
            self.silent_rank,
            self.silent_seconds,
            self.n_at_work,
            self.slow_rank,
            self.slow_done_nbytes,
            self.slow_total_nbytes,
            self.slow_seconds,
        )

    @classmethod
    def decode(cls, body: bytes) -> Beat:
        """Decode what :meth:`encode` made. The time of arrival is now."""
        silent_rank, silent_seconds, n_at_work, slow_rank, done, total, seconds = _LAYOUT.unpack_from(body)
        now = time.monotonic()
        return cls(silent_rank, silent_seconds, n_at_work, slow_rank, done, total, seconds, now)

    def __str__(self) -> str:
        """For people: which rank the others wait for, how far it has come, and how fast it is."""
        if self.slow_rank < 0:
            return f"{self.n_at_work} ranks are at work; rank {self.silent_rank} for {self.silent_seconds:.0f} seconds"
        rate = self.slow_done_nbytes / max(self.slow_seconds, 1e-3)
        return (
            f"{self.n_at_work} ranks are at work; the slowest is rank {self.slow_rank}: "
            f"{100 * self.part_done:.0f} % of {self.slow_total_nbytes / 2**30:.2f} GiB, {rate / 2**20:.1f} MiB/s"
        )


@dataclass(frozen=True)
class Progress:
    """How far this rank's own work has come.

    began_seconds, moved_seconds: when the work began, and when it last advanced (``time.monotonic()``).
    done_nbytes, total_nbytes: how much is done, and how much there is to do; 0 while that is not known.
    """

    began_seconds: float
    moved_seconds: float
    done_nbytes: int = 0
    total_nbytes: int = 0

    @classmethod
    def now(cls) -> Progress:
        """The progress of work that begins now."""
        now = time.monotonic()
        return cls(now, now)

    def moved(self, done_nbytes: int | None, total_nbytes: int | None) -> Progress:
        """The progress after the work has advanced. ``None`` keeps a value as it is."""
        return Progress(
            self.began_seconds,
            time.monotonic(),
            self.done_nbytes if done_nbytes is None else done_nbytes,
            self.total_nbytes if total_nbytes is None else total_nbytes,
        )

    def beat(self, rank: int, now: float) -> Beat:
        """The beat about this progress, which is that of ``rank``."""
        knows = self.total_nbytes > 0
        return Beat(
            silent_rank=rank,
            silent_seconds=now - self.moved_seconds,
            n_at_work=1,
            slow_rank=rank if knows else _NOBODY,
            slow_done_nbytes=self.done_nbytes,
            slow_total_nbytes=self.total_nbytes,
            slow_seconds=now - self.began_seconds,
        )


class Stragglers:
    """What the root of one operation logs of ranks that the others wait for.

    Attributes:
        lines: all lines so far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._next_seconds = patience.LOG_SECONDS

    def begin_exchange(self) -> None:
        """Nobody has waited yet."""
        self._next_seconds = patience.LOG_SECONDS

    def note_wait(self, what: str, seconds: float, slowest: Callable[[], Beat]) -> None:
        """Log that all have waited for ``seconds``, if a line is due. Each takes twice as long as the one before.

        Args:
            what: the exchange.
            slowest: says which rank they wait for.
        """
        if seconds >= self._next_seconds:
            self._next_seconds *= 2
            self.lines.append(f"{what}: after {seconds:.0f} seconds, {slowest()}")
            logger.warning("%s", self.lines[-1])
