"""What a rank knows of its neighbours in the tree: which are lost, and how long each has been silent.

It records when each neighbour was heard and what it said about the ranks behind it. It decides when to stop waiting for
a rank, and words the reason. It never sends anything. It belongs to one operation, which calls it under its lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from robust_dcp.comm import patience
from robust_dcp.comm.beats import Beat, Progress
from robust_dcp.comm.failures import Problem
from robust_dcp.comm.link import Link
from robust_dcp.comm.meeting import STORE_IS_LOST
from robust_dcp.comm.tree import Tree

__all__ = ["Neighbours"]

_MISSED_AFTER = 0.7
"""A rank that was silent for this part of the timeout is reported as missing when others ask."""


class Neighbours:
    """What one operation knows of the neighbours of its rank.

    Args:
        link: the link of the group.

    Attributes:
        tree: the tree of the current or latest exchange.
        absent: the neighbours that this rank waits for.
        waiting_since: silence before this time does not count (``time.monotonic()``).
        lost: for each neighbour that is gone the reason, and whether the reason is that its messages arrive damaged.
    """

    def __init__(self, link: Link) -> None:
        self.tree = link.tree(0)
        self.absent: tuple[int, ...] = ()
        self.waiting_since = time.monotonic()
        self.lost: dict[int, tuple[str, bool]] = {}
        self._link = link
        self._what = ""
        self._began = self._last_look = time.monotonic()
        self._catches_up_until = 0.0
        self._heard: dict[int, float] = {}
        self._beats: dict[int, Beat] = {}

    def begin(self, what: str, tree: Tree) -> None:
        """Begin the next exchange. Neighbours that were lost stay lost."""
        self.tree, self._what = tree, what
        self.absent = ()
        self._beats.clear()
        self.count_from_now()

    def count_from_now(self) -> None:
        """Ignore silence and standstills before this moment, because this rank was connecting."""
        self.waiting_since = self._began = self._last_look = time.monotonic()

    def note_heard(self, peer: int, beat: Beat | None = None) -> None:
        """``peer`` is alive; ``beat`` is what it said in this exchange about itself and the ranks behind it."""
        self._heard[peer] = time.monotonic()
        if beat is not None:
            self._beats[peer] = beat

    def silence_of(self, peer: int, now: float) -> float:
        """For how many seconds nothing has come from ``peer`` itself."""
        return now - max(self.waiting_since, self._heard.get(peer, 0.0))

    def silence_behind(self, peer: int, now: float) -> tuple[float, int]:
        """Among ``peer`` and the ranks behind it, find the longest time without a sign of progress, and which rank."""
        silence = self.silence_of(peer, now)
        beat = self._beats.get(peer)
        if beat is None or beat.silent_rank < 0:
            return silence, peer
        behind = beat.silent_seconds + now - beat.arrived_seconds
        return (behind, beat.silent_rank) if behind > silence else (silence, peer)

    def beat_for(self, receiver: int | None, at_work: Sequence[int], progress: Progress | None, now: float) -> Beat:
        """The beat for ``receiver``: about this rank, and about all others of which it hears only through this rank.

        Args:
            receiver: a neighbour, or ``None`` for this rank itself.
            at_work: the neighbours that have not come.
            progress: the progress of this rank's own work; ``None`` if it is done.
        """
        beats = [] if progress is None else [progress.beat(self.tree.rank, now)]
        for peer in at_work:
            if peer != receiver:
                silence, rank = self.silence_behind(peer, now)
                beats.append(Beat.of_silent(rank, silence, self._beats.get(peer), len(self.tree.places_below(peer))))
        return Beat.slowest(beats)

    def refuse_lost(self) -> None:
        """Raise if a rank is lost, even one that is no neighbour in this exchange.

        Such a rank was a neighbour before, and may not have heard how that exchange ended.

        Raises:
            Problem: a rank is lost.
        """
        for peer, (detail, damaged) in self.lost.items():
            if damaged:
                raise Problem.of_damage(self.tree.rank, peer, detail)
            raise Problem.of_lost(peer, self.words_for_lost(peer, detail))

    def refuse_silent(self, now: float, timeout_seconds: float) -> None:
        """Raise if a neighbour is silent. This is for a rank that works, since it waits for nobody and would not
        notice.

        Raises:
            Problem: nothing at all has come from a neighbour for ``timeout_seconds``.
        """
        for peer in self.tree.neighbours:
            silence = self.silence_of(peer, now)
            if silence >= timeout_seconds:
                raise Problem.of_silent(peer, timeout_seconds, self.words_for_silent(peer, silence))

    def seconds_to_wait(self, timeout_seconds: float) -> float:
        """How long to wait before looking at the absent neighbours again.

        Raises:
            Problem: one of them will not come.
        """
        self.refuse_lost()
        now, left = time.monotonic(), patience.BEAT_SECONDS
        for peer in self.absent:
            connection = self._link.connection(peer)
            if connection.previous_loss is not None and not connection.is_open:
                left = min(left, self._began + patience.RECONNECT_SECONDS - now)
                if left <= 0:
                    raise Problem.of_lost(peer, self.words_for_lost(peer, connection.previous_loss))
            silence, rank = self.silence_behind(peer, now)
            left = min(left, timeout_seconds - silence if rank == peer else left)
            # The neighbours of a silent rank report it first. Other ranks wait a little longer for that report.
            if silence >= timeout_seconds + (0 if rank == peer else 2 * patience.BEAT_SECONDS):
                raise Problem.of_silent(rank, timeout_seconds, self.words_for_silent(rank, silence))
            if peer not in self._heard and self._link.is_elsewhere(peer, timeout_seconds / 2):
                raise Problem("in different operations", is_elsewhere=True)
        return max(left, 0.001)

    def seconds_to_catch_up(self, now: float, timeout_seconds: float) -> float:
        """How long this process should only read messages, because it stood still itself (``SIGSTOP``, say).

        Others may have given up on it meanwhile, so it reads what they sent before it decides anything. Call this
        often, because a long time between two calls counts as standing still."""
        if now - self._last_look > timeout_seconds / 2:
            self.waiting_since, self._catches_up_until = now, now + 2 * patience.BEAT_SECONDS
        self._last_look = now
        return max(0.0, self._catches_up_until - now)

    def missing(self, timeout_seconds: float) -> dict[int, str]:
        """Neighbours that are lost, or silent for most of the timeout, and what this rank knows of each."""
        now, found = time.monotonic(), {}
        for peer in self.tree.neighbours:
            if peer in self.lost and not self.lost[peer][1]:
                found[peer] = self.words_for_lost(peer, self.lost[peer][0])
        for peer in self.absent:
            silence, rank = self.silence_behind(peer, now)
            if peer not in found and rank == peer and silence > _MISSED_AFTER * timeout_seconds:
                found[peer] = self.words_for_silent(peer, silence)
        return found

    def late(self) -> dict[int, str]:
        """The ranks that this rank waits for, and what it knows of each.

        A neighbour that is done itself, and waits for others, says in its beats for whom."""
        found = {}
        for peer in self.absent:
            beat = self._beats.get(peer)
            if beat is None or beat.silent_rank < 0:
                found[peer] = f"rank {peer}, or a rank behind it, is not done"
                continue
            rank = beat.slow_rank if beat.slow_rank >= 0 else beat.silent_rank
            others = f", nor are {beat.n_at_work - 1} other ranks" if beat.n_at_work > 1 else ""
            found[rank] = f"{self._called(rank)} is not done{others}"
        return found

    def words_for_lost(self, peer: int, detail: str) -> str:
        """Describe a lost neighbour, for people."""
        if detail.startswith(STORE_IS_LOST):
            return f"{self._called(peer)} cannot be connected to"
        return f"{self._called(peer)} closed its connection: its process has ended, or was cut off ({detail})"

    def words_for_silent(self, rank: int, seconds: float) -> str:
        """Describe a silent rank, for people."""
        if rank in self._beats:
            work = f"its own work for {self._what}"
            return f"{self._called(rank)} is still at {work}, which has not got on for {seconds:.1f} seconds"
        if rank in self._heard:
            return f"{self._called(rank)} has given no sign of life for {seconds:.1f} seconds"
        if rank in self.tree.neighbours:
            return f"{self._called(rank)} has not come"
        return f"rank {rank} has shown no progress for {seconds:.1f} seconds"

    def _called(self, rank: int) -> str:
        process = self._link.connection(rank).process if rank in self.tree.neighbours else ""
        return f"rank {rank} ({process})" if process else f"rank {rank}"
