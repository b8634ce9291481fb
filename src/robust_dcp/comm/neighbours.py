"""What a rank knows of its neighbours in the tree: how long each has been silent, and whom it waits for.

It records when each neighbour was heard and what it said about the ranks behind it. It decides when to stop waiting for
a rank, and words the reason. It never sends anything. It belongs to one operation, which calls it under its lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from robust_dcp.comm import patience
from robust_dcp.comm.beats import Beat, Progress
from robust_dcp.comm.connections import CONNECTING_FAILED
from robust_dcp.comm.failures import LOST, Problem
from robust_dcp.comm.network import INTERFACE
from robust_dcp.comm.notes import STORE_IS_LOST
from robust_dcp.comm.tree import Tree

__all__ = ["Neighbours"]

_MISSED_AFTER = 0.7
"""A rank that was silent for this part of the timeout is reported as missing when others ask."""

_MAX_RECONNECTS = 8
"""In one exchange. So many other operations do not fail while one exchange runs."""


class Neighbours:
    """What one operation knows of the neighbours of its rank in one exchange.

    Args:
        what: the exchange.
        tree: its tree.
        process_of: returns host and process id of a rank, as far as they are known.
        gone: ranks that seem to have ended, each with the reason.

    Attributes:
        absent: the neighbours that this rank waits for.
        waiting_since: silence before this time does not count (``time.monotonic()``).
        heard: the neighbours that have sent something, each with the time of the latest.
        stood_still_seconds: for how long this process stood still in this exchange.
    """

    def __init__(self, what: str, tree: Tree, process_of: Callable[[int], str], gone: Mapping[int, str]) -> None:
        self.tree = tree
        self.absent: tuple[int, ...] = ()
        self.heard: dict[int, float] = {}
        self.stood_still_seconds = 0.0
        self._what = what
        self._process_of = process_of
        self._gone = gone
        self._beats: dict[int, Beat] = {}
        self._catches_up_until = 0.0
        self._n_reconnects = 0
        self.waiting_since = self._began = self._last_look = time.monotonic()

    def count_from_now(self) -> None:
        """Ignore silence, standstills and beats before this moment, because this rank was connecting.

        After some times silence counts after all, so that ranks which lose each other again and again come to an end.
        """
        self._n_reconnects += 1
        if self._n_reconnects > _MAX_RECONNECTS:
            return
        self._beats.clear()
        self.waiting_since = self._began = self._last_look = time.monotonic()

    def note_heard(self, peer: int, beat: Beat | None = None) -> None:
        """``peer`` is alive; ``beat`` is what it said in this exchange about itself and the ranks behind it."""
        self.heard[peer] = time.monotonic()
        if beat is not None:
            self._beats[peer] = beat

    @property
    def unheard(self) -> tuple[int, ...]:
        """The neighbours that have not come to this exchange."""
        return tuple(peer for peer in self.tree.neighbours if peer not in self.heard)

    def silence_of(self, peer: int, now: float) -> float:
        """For how many seconds nothing has come from ``peer`` itself."""
        return now - max(self.waiting_since, self.heard.get(peer, 0.0))

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

    def refuse_silent(self, now: float, timeout_seconds: float) -> None:
        """Raise if a neighbour is silent. This is for a rank that works, since it waits for nobody and would not
        notice.

        Raises:
            Problem: nothing at all has come from a neighbour for ``timeout_seconds``.
        """
        for peer in self.tree.neighbours:
            self._refuse_gone(peer, now)
            silence = self.silence_of(peer, now)
            if silence >= timeout_seconds:
                raise Problem.of_silent(peer, timeout_seconds, self.words_for_silent(peer, silence))

    def _refuse_gone(self, peer: int, now: float) -> None:
        detail = self._gone.get(peer)
        if detail is not None and peer not in self.heard and now > self._began + patience.RECONNECT_SECONDS:
            raise Problem(LOST, missing={peer: self.words_for_lost(peer, detail)})

    def seconds_to_wait(self, timeout_seconds: float) -> float:
        """How long to wait before looking at the absent neighbours again.

        Raises:
            Problem: one of them will not come.
        """
        now, left = time.monotonic(), patience.BEAT_SECONDS
        for peer in self.absent:
            self._refuse_gone(peer, now)
            silence = self.silence_of(peer, now)
            left = min(left, timeout_seconds - silence)
            if silence >= timeout_seconds:
                raise Problem.of_silent(peer, timeout_seconds, self.words_for_silent(peer, silence))
            silence, rank = self.silence_behind(peer, now)
            # The neighbours of a silent rank report it first. Other ranks wait a little longer for that report.
            if silence >= timeout_seconds + (0 if rank == peer else 2 * patience.BEAT_SECONDS):
                raise Problem.of_silent(rank, timeout_seconds, self.words_for_silent(rank, silence))
        return max(left, 0.001)

    def seconds_to_catch_up(self, now: float, timeout_seconds: float) -> float:
        """How long this process should only read messages, because it stood still itself (``SIGSTOP``, say).

        Others may have given up on it meanwhile, so it reads what they sent before it decides anything. Call this
        often, because a long time between two calls counts as standing still."""
        if now - self._last_look > timeout_seconds / 2:
            self.stood_still_seconds = max(self.stood_still_seconds, now - self._last_look)
            self.waiting_since, self._catches_up_until = now, now + 2 * patience.BEAT_SECONDS
        self._last_look = now
        return max(0.0, self._catches_up_until - now)

    def missing(self, timeout_seconds: float) -> dict[int, str]:
        """Neighbours that are silent for most of the timeout, and what this rank knows of each."""
        now, found = time.monotonic(), {}
        for peer in self.absent:
            silence, rank = self.silence_behind(peer, now)
            if rank == peer and silence > _MISSED_AFTER * timeout_seconds:
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
        if detail.startswith(CONNECTING_FAILED):
            return (
                f"rank {peer} cannot be reached, or its process has ended ({detail}): does {INTERFACE} name the "
                "interface of the network that joins the hosts?"
            )
        return f"{self._called(peer)} closed its connection: its process has ended, or was cut off ({detail})"

    def words_for_silent(self, rank: int, seconds: float) -> str:
        """Describe a silent rank, for people."""
        if rank in self._beats:
            work = f"its own work for {self._what}"
            return f"{self._called(rank)} is still at {work}, which has not got on for {seconds:.1f} seconds"
        if rank in self.heard:
            return f"{self._called(rank)} has given no sign of life for {seconds:.1f} seconds"
        if rank in self.tree.neighbours:
            return f"{self._called(rank)} has not come"
        return f"rank {rank} has shown no progress for {seconds:.1f} seconds"

    def _called(self, rank: int) -> str:
        process = self._process_of(rank) if rank in self.tree.neighbours else ""
        return f"rank {rank} ({process})" if process else f"rank {rank}"
