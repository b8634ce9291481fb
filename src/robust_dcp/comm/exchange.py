"""One exchange on one rank: what this rank knows of its neighbours, and for how long it waits for them.

An :class:`Exchange` is told what has come and what time it is. It answers who is missing, until when this rank waits,
and what a beat says. It sends nothing: :mod:`~robust_dcp.comm.operation` does.

A rank is alive as long as beats or pieces of a payload come from it. Its beat says which rank has shown no progress for
longest, among all of which the receiver hears only through it, and how far the slowest one has come. It takes a few
bytes, however many ranks these are.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from robust_dcp.comm import patience
from robust_dcp.comm.connections import CONNECTING_FAILED, INTERFACE, has_timed_out
from robust_dcp.comm.endings import STORE_IS_LOST, Problem
from robust_dcp.comm.frames import Frame, Kind, phase_id
from robust_dcp.comm.messages import Payload
from robust_dcp.comm.tree import Tree

_MAX_RECONNECTS = 8
"""In one exchange. So many other operations do not fail while one exchange runs."""

_BEAT = struct.Struct("<idIiQQd")
_NOBODY = -1


class Beat(NamedTuple):
    """What a rank says about itself and the ranks behind it.

    Attributes:
        silent_rank: the rank that has shown no progress for longest; -1 if all are done.
        silent_seconds: for how long, at the time of sending.
        n_at_work: how many ranks are not done, as far as the sender knows.
        slow_rank: the rank that has done the smallest part of its work, among ranks that said how much they have to
            do; -1 if none said so.
        slow_done_nbytes, slow_total_nbytes: how much that rank has done, and how much it has to do.
        slow_seconds: how long that rank has been working.
        arrived_seconds: when this beat was received, by the clock of the receiver.
    """

    silent_rank: int = _NOBODY
    silent_seconds: float = 0.0
    n_at_work: int = 0
    slow_rank: int = _NOBODY
    slow_done_nbytes: int = 0
    slow_total_nbytes: int = 0
    slow_seconds: float = 0.0
    arrived_seconds: float = 0.0

    @property
    def part_done(self) -> float:
        """The part of its work that the slowest rank has done, from 0 to 1."""
        return self.slow_done_nbytes / self.slow_total_nbytes if self.slow_total_nbytes else 0.0

    def encode(self) -> bytes:
        """Encode for the body of a frame."""
        return _BEAT.pack(*self[:-1])

    @classmethod
    def decode(cls, body: bytes, now: float) -> Beat:
        """Decode what :meth:`encode` made, and what arrived at ``now``."""
        return cls._make((*_BEAT.unpack_from(body), now))

    def __str__(self) -> str:
        """For people: which rank the others wait for, how far it has come, and how fast it is."""
        if self.slow_rank < 0:
            return f"{self.n_at_work} ranks not done; rank {self.silent_rank} silent for {self.silent_seconds:.0f} s"
        rate = self.slow_done_nbytes / max(self.slow_seconds, 1e-3)
        return (
            f"{self.n_at_work} ranks not done; the slowest is rank {self.slow_rank}: "
            f"{100 * self.part_done:.0f} % of {self.slow_total_nbytes / 2**30:.2f} GiB, {rate / 2**20:.1f} MiB/s"
        )


class Message(NamedTuple):
    """What a neighbour sent."""

    frame: Frame
    payload: Payload = b""


@dataclass(eq=False)
class Neighbour:
    """All that a rank knows of one neighbour in an exchange.

    Attributes:
        connections: the connections over which it is reached; ``None`` while it is not.
        is_announced: it finds in the store where this rank listens.
        arrived: the messages from it that count, by kind.
        sent: what it has to get, so that it can be sent again.
        is_done: nothing more comes from it.
        is_closed: nothing more may be sent to it.
        is_damaged: something damaged has come from it.
        heard_seconds: when something has come from it last; ``None`` before the first time.
        beat: the latest one that counts.
        gone_seconds: since when it seems to have ended; ``None`` if it does not.
        unanswered_seconds: how long it had been silent when this rank stopped waiting for its answer in the exchange
            before.
    """

    connections: Any = None
    is_announced: bool = False
    arrived: dict[Kind, Message] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    is_done: bool = False
    is_closed: bool = False
    is_damaged: bool = False
    heard_seconds: float | None = None
    beat: Beat | None = None
    gone_seconds: float | None = None
    unanswered_seconds: float = 0.0


class Exchange:
    """One exchange: its messages, its neighbours, and this rank's own work.

    Args:
        number: how many exchanges of the operation there were before.
        what: its full description.
        tree: the place of this rank.
        timeout_seconds: how long a rank may show no sign of progress.
        gone: ranks that seem to have ended, each with the reason, as the link knows them.
        process_of: the host and process id of a rank, as far as they are known.
        now: the time.

    Attributes:
        neighbours: all that is known of each rank that this one talks to: the neighbours in the tree, and children of
            the exchange before that may still ask for its result.
        absent: the neighbours that this rank waits for.
        waiting_since: silence before this time does not count.
        may_be_unread: some neighbour may never read what was sent to it, because it has that already or is silent.
        failure: why the exchange is going to fail; ``None`` as long as nobody said so.
        problem: why this rank cannot go on. It was seen while the rank worked.
        interrupt: ends a wait in this rank's own work.
        is_working: this rank's own work is not done.
        is_waiting: this rank waits for others in its own work.
        began_seconds, moved_seconds: when this rank's own work began, and when it last advanced.
        done_nbytes, total_nbytes: how much of it is done, and how much there is to do; 0 while that is not known.
        stood_still_seconds: for how long this process stood still in this exchange.
    """

    def __init__(
        self,
        number: int,
        what: str,
        tree: Tree,
        timeout_seconds: float,
        gone: Mapping[int, str],
        process_of: Callable[[int], str],
        now: float,
    ) -> None:
        self.number = number
        self.what = what
        self.phase_id = phase_id(what)
        self.tree = tree
        self.neighbours = defaultdict(Neighbour, {peer: Neighbour() for peer in tree.neighbours})
        self.absent: tuple[int, ...] = ()
        self.may_be_unread = False
        self.failure: str | None = None
        self.problem: Problem | None = None
        self.interrupt: Callable[[], Any] | None = None
        self.is_working, self.is_waiting = True, False
        self.done_nbytes = self.total_nbytes = 0
        self.stood_still_seconds = 0.0
        self.began_seconds = self.moved_seconds = self.waiting_since = now
        self._looked_seconds, self._catches_up_until = now, 0.0
        self._timeout_seconds = timeout_seconds
        self._gone = gone
        self._process_of = process_of
        self._n_reconnects = 0

    def lacking(self, peers: Sequence[int], kind: Kind) -> tuple[int, ...]:
        """Those of ``peers`` whose message has not come."""
        return tuple([peer for peer in peers if kind not in self.neighbours[peer].arrived])

    def note_heard(self, peer: int, now: float, frame: Frame | None = None) -> None:
        """``peer`` is alive. It has sent ``frame``, or a piece of a payload."""
        neighbour = self.neighbours[peer]
        neighbour.heard_seconds = now
        if frame is not None and frame.kind == Kind.BEAT:
            neighbour.beat = Beat.decode(frame.body, now)
        elif frame is not None and frame.kind in (Kind.UP, Kind.DOWN):
            neighbour.beat = None  # it waits for nobody any more, and its beats are behind a payload now

    def count_from(self, now: float) -> None:
        """Ignore silence, standstills and beats before ``now``, because this rank was connecting.

        A rank that refused to connect has dropped its connections too, and has ``RECONNECT_SECONDS`` to come now. The
        silence of one that did not answer goes on.

        After some times silence counts after all, so that ranks which lose each other again and again come to an end.
        """
        self._n_reconnects += 1
        if self._n_reconnects <= _MAX_RECONNECTS:
            for peer, neighbour in self.neighbours.items():
                neighbour.beat = None
                silence = self.silence_of(peer, now)
                if not has_timed_out(self._gone.get(peer, "")):  # else it did not answer this rank while it connected
                    neighbour.gone_seconds = None
                    silence = min(silence, max(0.0, self._timeout_seconds - patience.RECONNECT_SECONDS))
                neighbour.unanswered_seconds = silence
            self.waiting_since = self._looked_seconds = now

    def catching_up_seconds(self, now: float) -> float:
        """How long this process should only read messages, because it stood still itself (``SIGSTOP``, say).

        Others may have given up on it meanwhile, so it reads what they sent before it decides anything. Call this
        often, because a long time between two calls counts as standing still."""
        seconds = now - self._looked_seconds
        if seconds > self._timeout_seconds / 2:
            self.stood_still_seconds = max(self.stood_still_seconds, seconds)
            self.moved_seconds = min(now, self.moved_seconds + seconds)  # its work could not advance meanwhile
            for neighbour in self.neighbours.values():
                neighbour.unanswered_seconds = 0.0
            self.waiting_since, self._catches_up_until = now, now + 2 * patience.BEAT_SECONDS
        self._looked_seconds = now
        return max(0.0, self._catches_up_until - now)

    # How long neighbours, and the ranks behind them, have been silent.

    def silence_of(self, peer: int, now: float) -> float:
        """For how many seconds nothing has come from ``peer`` itself."""
        neighbour = self.neighbours[peer]
        if neighbour.heard_seconds is not None:
            return now - max(self.waiting_since, neighbour.heard_seconds)
        return now - self.waiting_since + neighbour.unanswered_seconds

    def silence_behind(self, peer: int, now: float) -> tuple[float, int]:
        """Among ``peer`` and the ranks behind it, find the longest time without a sign of progress, and which rank."""
        silence = self.silence_of(peer, now)
        beat = self.neighbours[peer].beat
        if beat is None or beat.silent_rank < 0:
            return silence, peer
        # An old beat tells nothing of the ranks behind: then it is the sender that is silent.
        behind = beat.silent_seconds + min(now - beat.arrived_seconds, 2 * patience.BEAT_SECONDS)
        return (behind, beat.silent_rank) if behind > silence else (silence, peer)

    def beat_for(self, receiver: int | None, now: float) -> Beat:
        """The beat for ``receiver``, a neighbour: about this rank, and about all others of which it hears only through
        this rank. ``None`` is this rank itself."""
        beats = []
        absent = self.lacking(self.tree.children, Kind.UP) if self.is_working else self.absent
        if self.is_working or not absent:
            beats.append(
                Beat(
                    silent_rank=self.tree.rank,
                    silent_seconds=0.0 if self.is_waiting else now - self.moved_seconds,
                    n_at_work=1,
                    slow_rank=self.tree.rank if self.total_nbytes > 0 else _NOBODY,
                    slow_done_nbytes=self.done_nbytes,
                    slow_total_nbytes=self.total_nbytes,
                    slow_seconds=now - self.began_seconds,
                )
            )
        for peer in absent:
            if peer != receiver:
                silence, rank = self.silence_behind(peer, now)
                beat = self.neighbours[peer].beat or Beat(n_at_work=len(self.tree.ranks_below(peer)))
                beats.append(beat._replace(silent_rank=rank, silent_seconds=silence))
        silent = max(beats, key=attrgetter("silent_seconds"), default=Beat())
        slow = min((beat for beat in beats if beat.slow_rank >= 0), key=attrgetter("part_done"), default=silent)
        n_at_work = sum(beat.n_at_work for beat in beats)
        return slow._replace(silent_rank=silent.silent_rank, silent_seconds=silent.silent_seconds, n_at_work=n_at_work)

    def seconds_to_wait(self, now: float) -> float:
        """How long to wait before looking at the absent neighbours again.

        Raises:
            Problem: one of them will not come.
        """
        left = patience.BEAT_SECONDS
        for peer in self.absent:
            silence = self.silence_of(peer, now)
            left = min(left, self._timeout_seconds - silence)
            self.refuse(peer, peer, silence, now)
            silence, rank = self.silence_behind(peer, now)
            # The neighbours of a silent rank report it first. Other ranks wait a little longer for that report.
            self.refuse(peer, rank, silence - (0 if rank == peer else 2 * patience.BEAT_SECONDS), now)
        return max(left, 0.001)

    def refuse(self, peer: int, rank: int, silence: float, now: float) -> None:
        """Raise :class:`Problem` if ``rank``, which is ``peer`` or behind it, has been silent for too long, or ``peer``
        is gone."""
        detail, neighbour = self._gone.get(peer), self.neighbours[peer]
        if detail is None or neighbour.heard_seconds is not None:
            neighbour.gone_seconds = None
        else:
            if neighbour.gone_seconds is None:
                neighbour.gone_seconds = now
            limit = patience.STALLED_SECONDS if has_timed_out(detail) else patience.RECONNECT_SECONDS
            if now - neighbour.gone_seconds > min(limit, self._timeout_seconds):
                raise Problem("broke off: connection lost", missing={peer: self.words_for_lost(peer, detail)})
        if silence >= self._timeout_seconds:
            raise Problem.of_silent(rank, self._timeout_seconds, self.words_for_silent(rank, silence))

    def late(self) -> dict[int, str]:
        """The ranks that this rank waits for, and what it knows of each.

        A neighbour that is done itself, and waits for others, says in its beats for whom."""
        late = {}
        for peer in self.absent:
            beat = self.neighbours[peer].beat
            if beat is None or beat.silent_rank < 0:
                late[peer] = f"rank {peer}, or a rank behind it, is not done"
                continue
            rank = beat.slow_rank if beat.slow_rank >= 0 else beat.silent_rank
            others = f", nor are {beat.n_at_work - 1} other ranks" if beat.n_at_work > 1 else ""
            late[rank] = f"{self._called(rank)} is not done{others}"
        return late

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
        neighbour = self.neighbours.get(rank, Neighbour())
        if neighbour.beat is not None:
            work = f"its own work for {self.what}"
            return f"{self._called(rank)} is still at {work}, which has not got on for {seconds:.1f} seconds"
        if neighbour.heard_seconds is not None:
            return f"{self._called(rank)} has given no sign of life for {seconds:.1f} seconds"
        if rank in self.tree.neighbours:
            return f"{self._called(rank)} has not come"
        return f"rank {rank} has shown no progress for {seconds:.1f} seconds"

    def _called(self, rank: int) -> str:
        process = self._process_of(rank) if rank in self.tree.neighbours else ""
        return f"rank {rank} ({process})" if process else f"rank {rank}"
