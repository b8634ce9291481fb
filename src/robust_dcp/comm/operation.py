"""One operation on one rank, such as a save or a load: a series of exchanges over the tree of ranks.

An exchange is the rank's own work, then a message up the tree, then one down, and an answer that it was heard:

    rank 1 (a child)                         rank 0 (its parent)
        beats, once a second      <------>       beats, once a second
        UP: what it contributes    ------>
                                  <------        DOWN: the result of all ranks
        HEARD                      ------>       returns
        returns

For each neighbour in the tree a thread reads what comes while an exchange runs. Each exchange has a gloo tag of its
own, so nobody reads what belongs to the next one. A rank returns when its children have heard the result, so it may end
at once.

There are two ways to fail. If a rank's own work fails, the ranks stay in step: all raise the same exception and can go
on. If a rank is gone, silent, or in another operation, the operation ends on all of them, with the verdict on which the
ranks agree (:mod:`~robust_dcp.comm.endings`). If only the connections were dropped, because of another operation or
because something arrived damaged, the ranks connect again. Then each sends again what it has sent in this exchange and
in the one before, and whoever lacks some of it reads it.

A rank is alive as long as beats or pieces of a payload come from it. Its beat says which rank has shown no progress for
longest, among all of which the receiver hears only through it, and how far the slowest one has come. It takes a few
bytes, however many ranks these are. What a payload means is known to the channel only.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from isal import isal_zlib

from robust_dcp.comm import patience
from robust_dcp.comm.combine import Agreement, Offer
from robust_dcp.comm.connections import CONNECTING_FAILED, INTERFACE, Broken, Connections, Moving, has_timed_out
from robust_dcp.comm.endings import (
    STORE_IS_LOST,
    EndMessage,
    ErrorMessage,
    FailuresBelow,
    OperationKey,
    Problem,
    Stopped,
    as_told_to,
    missing_ranks_error,
)
from robust_dcp.comm.frames import BODY_NBYTES, FRAME_NBYTES, Frame, FrameError, Kind, phase_id
from robust_dcp.comm.link import ExchangeStats, Link
from robust_dcp.comm.messages import Payload, decode, encode
from robust_dcp.comm.tree import Tree
from robust_dcp.errors import ExchangeError, RobustCheckpointError
from robust_dcp.threads import start_thread

logger = logging.getLogger(__name__)

_MISSED_AFTER = 0.7
"""A rank that was silent for this part of the timeout is reported as missing when others ask."""

_MAX_RECONNECTS = 8
"""In one exchange. So many other operations do not fail while one exchange runs."""

_BEAT = struct.Struct("<idIiQQd")
_NOBODY = -1


class Work(msgspec.Struct, frozen=True):
    """What one exchange does on a rank.

    Attributes:
        produce: does this rank's own work. If it returns an offer, that is the rank's.
        merge: makes the payload that goes up, of what ``produce`` has returned and of the payloads of the children.
            With ``None`` no payload goes up.
        reply: makes the payload that goes down. It is called on the root, with the same as ``merge``. If it is
            ``None``, or returns that, no payload goes down.
        offer: makes the rank's offer of what ``produce`` has returned, if that is not the offer.
        share: returns the part of the payload that ``child`` gets, on the way down. With ``None`` each gets all of it.
        interrupt: ends a wait in ``produce``. It is called when the exchange is going to fail, if ``produce`` does not
            ask by itself whether to stop.
    """

    produce: Callable[[], Any]
    merge: Callable[[Any, list[Payload]], Payload] | None = None
    reply: Callable[[Any, list[Payload]], Payload | None] | None = None
    offer: Callable[[Any], Offer] | None = None
    share: Callable[[Payload, int], Payload] | None = None
    interrupt: Callable[[], None] | None = None


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

    @property
    def part_done(self) -> float:
        """The part of its work that the slowest rank has done, from 0 to 1."""
        return self.slow_done_nbytes / self.slow_total_nbytes if self.slow_total_nbytes else 0.0

    def encode(self) -> bytes:
        """Encode for the body of a frame."""
        return _BEAT.pack(*self[:-1])

    @classmethod
    def decode(cls, body: bytes) -> Beat:
        """Decode what :meth:`encode` made. The time of arrival is now."""
        return cls._make((*_BEAT.unpack_from(body), time.monotonic()))

    def __str__(self) -> str:
        """For people: which rank the others wait for, how far it has come, and how fast it is."""
        if self.slow_rank < 0:
            return f"{self.n_at_work} ranks not done; rank {self.silent_rank} silent for {self.silent_seconds:.0f} s"
        rate = self.slow_done_nbytes / max(self.slow_seconds, 1e-3)
        return (
            f"{self.n_at_work} ranks not done; the slowest is rank {self.slow_rank}: "
            f"{100 * self.part_done:.0f} % of {self.slow_total_nbytes / 2**30:.2f} GiB, {rate / 2**20:.1f} MiB/s"
        )


_HAS_COME = Frame(Kind.BEAT, body=Beat().encode())
"""The first beat in an operation. It says that the rank has come, and the next one says more."""


class Message(NamedTuple):
    """What a neighbour sent."""

    frame: Frame
    payload: Payload = b""


class _Ended(Exception):
    """The operation has ended on all ranks, as its argument says: an :class:`EndMessage`."""


class _Exchange:
    """One exchange: its messages, and what this rank knows of its neighbours. Guarded by its operation's lock.

    Attributes:
        number: how many exchanges of the operation there were before.
        what: its full description.
        arrived: the messages that count, by the rank that sent them.
        done: the neighbours from which nothing more comes.
        open: the connections to the neighbours that are connected.
        closed: the neighbours to which nothing more may be sent.
        sent: for each neighbour what it has to get, so that it can be sent again.
        announced: the neighbours that find in the store where this rank listens.
        damaged: the neighbours from which something damaged has come.
        is_waiting: this rank waits for others in its own work.
        may_be_unread: some neighbour may never read what was sent to it, because it has that already or is silent.
        heard: the neighbours from which something has come, each with the time of the latest (``time.monotonic()``).
        absent: the neighbours that this rank waits for.
        waiting_since: silence before this time does not count.
        unanswered: the children that had not answered in the exchange before, each with how long it was silent then.
        stood_still_seconds: for how long this process stood still in this exchange.
        began_seconds, moved_seconds: when this rank's own work began, and when it last advanced.
        done_nbytes, total_nbytes: how much of it is done, and how much there is to do; 0 while that is not known.
    """

    def __init__(
        self, number: int, what: str, tree: Tree, link: Link, timeout_seconds: float, unanswered: dict[int, float]
    ) -> None:
        self.number = number
        self.unanswered = unanswered
        self.what = what
        self.phase_id = phase_id(what)
        self.tree = tree
        self.arrived: dict[tuple[int, Kind], Message] = {}
        self.done: set[int] = set()
        self.open: dict[int, Connections] = {}
        self.closed: set[int] = set()
        self.sent: dict[int, list[tuple[Frame, Payload]]] = defaultdict(list)
        self.announced: set[int] = set()
        self.damaged: set[int] = set()
        self.may_be_unread = False
        self.failure: str | None = None
        self.interrupt: Callable[[], None] | None = None
        self.problem: Problem | None = None
        self.is_working, self.is_waiting = True, False
        self.heard: dict[int, float] = {}
        self.absent: tuple[int, ...] = ()
        self.stood_still_seconds = 0.0
        self.done_nbytes = self.total_nbytes = 0
        self._link = link
        self._timeout_seconds = timeout_seconds
        self._beats: dict[int, Beat] = {}
        self._gone_since: dict[int, float] = {}
        self._catches_up_until = 0.0
        self._n_reconnects = 0
        self.began_seconds = self.moved_seconds = time.monotonic()
        self.waiting_since = self._last_look = self.began_seconds

    def lacking(self, peers: Sequence[int], kind: Kind) -> tuple[int, ...]:
        """Those of ``peers`` whose message has not come."""
        return tuple(peer for peer in peers if (peer, kind) not in self.arrived)

    def note_heard(self, peer: int, frame: Frame | None = None) -> None:
        """``peer`` is alive. It has sent ``frame``, or a piece of a payload."""
        self.heard[peer] = time.monotonic()
        if frame is not None and frame.kind == Kind.BEAT:
            self._beats[peer] = Beat.decode(frame.body)
        elif frame is not None and frame.kind in (Kind.UP, Kind.DOWN):
            self._beats.pop(peer, None)  # it waits for nobody any more, and its beats are behind a payload now

    def count_from_now(self) -> None:
        """Ignore silence, standstills and beats before this moment, because this rank was connecting.

        A rank that refused to connect has dropped its connections too, and may come now.

        After some times silence counts after all, so that ranks which lose each other again and again come to an end.
        """
        self._n_reconnects += 1
        if self._n_reconnects <= _MAX_RECONNECTS:
            self._beats.clear()
            gone = self._link.gone
            self._gone_since = {peer: at for peer, at in self._gone_since.items() if has_timed_out(gone.get(peer, ""))}
            self.unanswered = {}
            self.waiting_since = self._last_look = time.monotonic()

    def catching_up_seconds(self) -> float:
        """How long this process should only read messages, because it stood still itself (``SIGSTOP``, say).

        Others may have given up on it meanwhile, so it reads what they sent before it decides anything. Call this
        often, because a long time between two calls counts as standing still."""
        now = time.monotonic()
        if now - self._last_look > self._timeout_seconds / 2:
            self.stood_still_seconds = max(self.stood_still_seconds, now - self._last_look)
            self.unanswered = {}
            self.waiting_since, self._catches_up_until = now, now + 2 * patience.BEAT_SECONDS
        self._last_look = now
        return max(0.0, self._catches_up_until - now)

    # How long neighbours, and the ranks behind them, have been silent.

    def silence_of(self, peer: int, now: float) -> float:
        """For how many seconds nothing has come from ``peer`` itself."""
        if peer in self.heard:
            return now - max(self.waiting_since, self.heard[peer])
        return now - self.waiting_since + self.unanswered.get(peer, 0.0)

    def silence_behind(self, peer: int, now: float) -> tuple[float, int]:
        """Among ``peer`` and the ranks behind it, find the longest time without a sign of progress, and which rank."""
        silence = self.silence_of(peer, now)
        beat = self._beats.get(peer)
        if beat is None or beat.silent_rank < 0:
            return silence, peer
        behind = beat.silent_seconds + now - beat.arrived_seconds
        return (behind, beat.silent_rank) if behind > silence else (silence, peer)

    def beat_for(self, receiver: int | None) -> Beat:
        """The beat for ``receiver``, a neighbour: about this rank, and about all others of which it hears only through
        this rank. ``None`` is this rank itself."""
        now, beats = time.monotonic(), []
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
                beat = self._beats.get(peer) or Beat(n_at_work=len(self.tree.ranks_below(peer)))
                beats.append(beat._replace(silent_rank=rank, silent_seconds=silence))
        silent = max(beats, key=attrgetter("silent_seconds"), default=Beat())
        slow = min((beat for beat in beats if beat.slow_rank >= 0), key=attrgetter("part_done"), default=silent)
        n_at_work = sum(beat.n_at_work for beat in beats)
        return slow._replace(silent_rank=silent.silent_rank, silent_seconds=silent.silent_seconds, n_at_work=n_at_work)

    def seconds_to_wait(self) -> float:
        """How long to wait before looking at the absent neighbours again.

        Raises:
            Problem: one of them will not come.
        """
        now, left = time.monotonic(), patience.BEAT_SECONDS
        for peer in self.absent:
            silence = self.silence_of(peer, now)
            left = min(left, self._timeout_seconds - silence)
            self.refuse(peer, peer, silence)
            silence, rank = self.silence_behind(peer, now)
            # The neighbours of a silent rank report it first. Other ranks wait a little longer for that report.
            self.refuse(peer, rank, silence - (0 if rank == peer else 2 * patience.BEAT_SECONDS))
        return max(left, 0.001)

    def refuse(self, peer: int, rank: int, silence: float) -> None:
        """Raise :class:`Problem` if ``rank``, which is ``peer`` or behind it, has been silent for too long, or ``peer``
        is gone."""
        detail = self._link.gone.get(peer)
        if detail is None or peer in self.heard:
            self._gone_since.pop(peer, None)
        else:
            since = self._gone_since.setdefault(peer, time.monotonic())
            limit = patience.STALLED_SECONDS if has_timed_out(detail) else patience.RECONNECT_SECONDS
            if time.monotonic() - since > min(limit, self._timeout_seconds):
                raise Problem("broke off: connection lost", missing={peer: self.words_for_lost(peer, detail)})
        if silence >= self._timeout_seconds:
            raise Problem.of_silent(rank, self._timeout_seconds, self.words_for_silent(rank, silence))

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
            work = f"its own work for {self.what}"
            return f"{self._called(rank)} is still at {work}, which has not got on for {seconds:.1f} seconds"
        if rank in self.heard:
            return f"{self._called(rank)} has given no sign of life for {seconds:.1f} seconds"
        if rank in self.tree.neighbours:
            return f"{self._called(rank)} has not come"
        return f"rank {rank} has shown no progress for {seconds:.1f} seconds"

    def _called(self, rank: int) -> str:
        process = self._link.process_of(rank) if rank in self.tree.neighbours else ""
        return f"rank {rank} ({process})" if process else f"rank {rank}"


class Operation:
    """The exchanges of one caller with all ranks of a group. After an end out of step, the next exchange starts anew.

    Args:
        link: the link of the group.
        name: what the operation does, for example ``"save /ckpt/step_3"``. It is the same on all ranks.
        timeout_seconds: how long a rank may show no sign of progress.
        deadline_seconds: how long the whole operation may take; ``None`` for no limit.

    Attributes:
        key: identifies it among all operations of the group.
        what, phase: the current or latest exchange: its full description, and the caller's name for it.
        stragglers: on the root, the log lines about ranks that the others waited for.
        n_exchanges: how many exchanges have ended well.
        stats: what the exchanges have cost this rank so far.
    """

    key = OperationKey(0, 0)

    def __init__(self, link: Link, name: str, timeout_seconds: float, deadline_seconds: float | None = None) -> None:
        self.link = link
        self.name = name
        self.timeout_seconds = timeout_seconds
        self.deadline_seconds = math.inf if deadline_seconds is None else deadline_seconds
        self.what = self.phase = ""
        self.stragglers: list[str] = []
        self.n_exchanges = 0
        self.stats = ExchangeStats()
        self._busy = threading.Lock()
        self._changed = threading.Condition()
        self._end_message: EndMessage | None = None  # until the caller has seen the end
        self._has_begun = False
        self._until = math.inf
        self._last_beat = 0.0
        self._next_log_seconds = 0.0
        self._exchange: _Exchange | None = None  # the one that runs
        self._last: _Exchange | None = None  # the latest that has ended well
        self._heard: set[int] = set()  # the ranks that have come to this operation
        self._raised: BaseException | None = None
        self._own_error: BaseException | None = None

    # What the channel calls.

    def run(self, verb: str, phase: str, root: int, work: Work) -> tuple[Agreement, Any, Payload]:
        """Run one exchange: this rank's work, then up the tree under ``root``, and down again.

        Args:
            verb: the kind of exchange.
            phase: the caller's name for it. Ranks with another verb or phase are in different operations.
            root: a rank of the group.
            work: what this rank does in the exchange.

        Returns:
            The agreement of all ranks, what this rank has produced, and the root's reply to it and those below it.

        Raises:
            ExchangeError: the ranks are out of step. All of them raise the same error.
            RobustCheckpointError: the work of some rank failed. All ranks raise the same error, and the next exchange
                works.
        """
        if not self._busy.acquire(blocking=False):
            raise RobustCheckpointError(
                f"{phase} was called within the work of another exchange of the same channel: "
                "finish that one first, or use a channel of another operation"
            )
        self._own_error = None
        for stats in (self.stats, self.link.stats):
            stats.exchanges += 1
        try:
            exchange = self._start(verb, phase, root)
            exchange.interrupt = work.interrupt
            own, offer, failures = None, Offer(), None
            try:
                own = work.produce()
                made = own if work.offer is None else work.offer(own)
                offer = made if isinstance(made, Offer) else offer
            except BaseException as own_error:
                failures = self._failed(exchange, own_error)
            with self._changed:
                exchange.is_working = False
                exchange.moved_seconds = time.monotonic()
            has_failed, agreement, payload = self._go_up(exchange, work, own, offer, failures)
            self._go_down(exchange, work, has_failed, agreement, payload)
            with self._changed:
                self.n_exchanges += 1
                self._last = exchange
        except _Ended as ended:
            error = as_told_to(self.link.rank, ended.args[0].error.to_error())
            self._end_message = None
        except BaseException as interrupt:
            if self._exchange is not None:
                self._conclude(Problem.of_leaving(self.link.rank, interrupt))
            raise
        else:
            if not has_failed:
                return agreement, own, payload
            error = decode(payload, ErrorMessage).to_error()
        finally:
            with self._changed:
                over, self._exchange = self._exchange, None
                if over is not None and not over.may_be_unread:
                    for connections in over.open.values():
                        connections.kept.pop(over, None)  # all of it has arrived
            _beating.discard(self)
            self._busy.release()
        if isinstance(self._own_error, KeyboardInterrupt | SystemExit | GeneratorExit):
            self._raised = self._own_error  # this rank raises that, whatever the others raise
        else:
            error.__cause__, self._raised = self._own_error, error
        raise self._raised

    def leave(self, error: BaseException) -> None:
        """End the operation because this rank failed between two exchanges. Tell the others unless they know."""
        if self._has_begun and error is not self._raised:
            self._conclude(Problem.of_leaving(self.link.rank, error))

    def stop_if_announced(self) -> None:
        """Leave this rank's own work if another rank has announced a failure, or the deadline has passed.

        Raises:
            Stopped: let it leave the work. The exchange then raises the failure that was announced.
            ExchangeTimeout: the deadline has passed.
        """
        if (ended := self._end_message) is not None:
            raise Stopped(ended.error.to_error().message)
        exchange = self._exchange
        if exchange is not None and exchange.failure is not None:
            raise Stopped(exchange.failure)
        if time.monotonic() >= self._until:  # nobody may be waiting for this rank, and notice that
            rank = self.link.rank
            problem = Problem.of_late({rank: f"rank {rank} is not done"}, self.deadline_seconds)
            raise missing_ranks_error(problem, self, self.link.size, ())

    def stop_if_given_up(self) -> None:
        """Leave this rank's own work as :meth:`stop_if_announced` does, or if others may have given up on this rank.

        A process that was frozen (``SIGSTOP``, say) first reads what has come meanwhile. If the others heard nothing of
        it for the timeout, all neighbours have to be there still: they send beats.

        Raises:
            Stopped, ExchangeTimeout: let it leave the work.
        """
        exchange, beat_seconds = self._exchange, min(patience.BEAT_SECONDS, self.timeout_seconds / 4)
        if exchange is not None:
            with self._changed:
                while (left := exchange.catching_up_seconds()) and self._end_message is None:
                    self._changed.wait(left)
        self.stop_if_announced()
        if exchange is None or exchange.stood_still_seconds + beat_seconds < self.timeout_seconds:
            return
        lately = time.monotonic() - 1.5 * patience.BEAT_SECONDS  # what was sent before has been read long ago
        if any(exchange.heard.get(peer, 0.0) < lately for peer in exchange.tree.neighbours):
            rank, seconds = self.link.rank, exchange.stood_still_seconds
            text = f"rank {rank} stood still for {seconds:.1f} seconds, and others have given up on it"
            problem = Problem.of_silent(rank, self.timeout_seconds, text)
            raise missing_ranks_error(problem, self, self.link.size, ())

    def note_progress(self, done_nbytes: int | None = None, total_nbytes: int | None = None) -> None:
        """Record that this rank's work has advanced, and how far, if the caller knows. Any thread may call this."""
        exchange = self._exchange
        if exchange is not None:
            exchange.moved_seconds = time.monotonic()
            exchange.done_nbytes = exchange.done_nbytes if done_nbytes is None else done_nbytes
            exchange.total_nbytes = exchange.total_nbytes if total_nbytes is None else total_nbytes

    def note_piece(self, peer: int) -> None:
        """A piece of what passes between this rank and ``peer`` in its own work has arrived, or has left."""
        self.note_progress()
        if self._exchange is not None:
            self._exchange.note_heard(peer)

    def note_waiting(self, is_waiting: bool) -> None:
        """Record whether this rank waits for others in its own work. Then it is not the one that does not get on."""
        self.note_progress()
        if self._exchange is not None:
            self._exchange.is_waiting = is_waiting

    def waits_in_vain(self) -> bool:
        """Whether this rank has waited for others in its own work for so long that one which is silent, or does not
        get on, would have been named."""
        exchange, limit = self._exchange, self.timeout_seconds + 3 * patience.BEAT_SECONDS
        return exchange is not None and exchange.is_waiting and time.monotonic() - exchange.moved_seconds > limit

    def announce(self, text: str) -> None:
        """Let all ranks leave their own work in this exchange. ``text`` says why."""
        with self._changed:
            exchange = self._exchange
            if exchange is not None and exchange.failure is None:
                exchange.failure = text
                self._announce_failure(exchange, text)

    # One exchange.

    def _start(self, verb: str, phase: str, root: int) -> _Exchange:
        self.what = f"{verb} {phase!r}" + (f" with coordinator {root}" if root else "")
        self.phase = phase
        if not self._has_begun and self._end_message is None:
            with self._changed:
                self.n_exchanges, self._last = 0, None
                self._heard = set()
                self._until = time.monotonic() + self.deadline_seconds
            self.link.begin(self.name, self)
            with self._changed:
                self._has_begun = self._end_message is None  # not before, or Ctrl-C would end what is not there
        if self._end_message is not None:
            raise _Ended(self._end_message)  # it ended while this rank was between two exchanges
        tree = Tree(self.link.rank, self.link.size, root)
        unanswered = {} if self._last is None else self._last.unanswered
        exchange = _Exchange(self.n_exchanges, self.what, tree, self.link, self.timeout_seconds, unanswered)
        with self._changed:
            self._last_beat, self._next_log_seconds = time.monotonic(), patience.LOG_SECONDS
            self._exchange = exchange
            new = [peer for peer in exchange.tree.neighbours if not self.link.process_of(peer)]
            self._read_from_all(exchange)
            # If this process ends in its own work, the others notice that nobody listens there any more.
            self._changed.wait_for(lambda: exchange.announced.issuperset(new), patience.ANNOUNCE_SECONDS)
        if self.link.size > 1:
            _begin_beats(self)
        return exchange

    def _failed(self, exchange: _Exchange, error: BaseException) -> FailuresBelow:
        """Record a failure of this rank, and tell the ranks that are still working."""
        self._own_error = error
        rank = self.link.rank
        if not isinstance(error, Stopped):
            line = str(error).partition("\n")[0][:500]
            with self._changed:
                self._announce_failure(exchange, f"rank {rank}: {type(error).__name__}: {line}")
        return FailuresBelow.on(rank, error)

    def _go_up(
        self, exchange: _Exchange, work: Work, own: Any, offer: Offer, failures: FailuresBelow | None
    ) -> tuple[bool, Agreement, Payload]:
        """Wait for the children, join what comes from them with what this rank adds, and pass it to the parent.

        Returns:
            The result of all ranks: whether some have failed, their agreement, and the root's reply, or the error.
        """
        parent = exchange.tree.parent
        payload: Payload | None = None
        children, below = list[Agreement](), list[Payload]()
        for message in self._receive(exchange, exchange.tree.children, Kind.UP):
            children.append(Agreement.decode(message.frame.body))
            if message.frame.has_failed:
                of_child = decode(message.payload, FailuresBelow)
                failures = of_child if failures is None else failures.merged(of_child)
            elif message.payload:
                below.append(message.payload)
        total = Agreement.of(exchange.tree.rank, offer, children)
        if failures is None:
            try:
                if parent is None:
                    self.note_progress()  # this rank may have waited for long before
                make = work.reply if parent is None else work.merge
                payload = None if make is None else make(own, below)
            except BaseException as error:
                failures = self._failed(exchange, error)
        if failures is not None:
            told = failures if parent is not None else ErrorMessage.of(failures.joint_error(self.phase))
            payload = encode(told)
        payload = payload or b""
        if parent is None:
            return failures is not None, total, payload
        up = Frame(Kind.UP, has_failed=failures is not None, body=total.encode())
        self._send(exchange, parent, up, payload)
        (reply,) = self._receive(exchange, (parent,), Kind.DOWN)
        return reply.frame.has_failed, Agreement.decode(reply.frame.body), reply.payload

    def _go_down(
        self, exchange: _Exchange, work: Work, has_failed: bool, agreement: Agreement, payload: Payload
    ) -> None:
        """Send the result to the children, and wait until they have heard it. Once another rank has heard it the result
        stands. If the operation ends now, because a child is lost for example, that is a matter of the next exchange.

        It waits for half the timeout: others are in the next exchange, and hear nothing of this rank meanwhile."""
        children = exchange.tree.children
        for child in reversed(children):
            share = payload if has_failed or not payload or work.share is None else work.share(payload, child)
            self._send(exchange, child, Frame(Kind.DOWN, has_failed=has_failed, body=agreement.encode()), share)
        with self._changed:
            exchange.absent = children
            exchange.waiting_since = time.monotonic()
            generation, until = self.link.generation, math.inf
            while self._end_message is None:
                if generation != self.link.generation:  # those that have not got the result connect again soon
                    generation = self.link.generation
                    until = min(until, time.monotonic() + patience.RECONNECT_SECONDS)
                exchange.catching_up_seconds()
                now, gone = time.monotonic(), self.link.gone
                exchange.absent = tuple(
                    peer
                    for peer in exchange.lacking(children, Kind.HEARD)
                    if peer not in gone and exchange.silence_of(peer, now) < self.timeout_seconds / 2
                )
                if not exchange.absent or now > until:
                    lacking = exchange.lacking(children, Kind.HEARD)
                    exchange.may_be_unread |= bool(lacking)
                    exchange.unanswered = {peer: exchange.silence_of(peer, now) for peer in lacking}
                    return
                self._changed.wait(max(0.001, min(patience.BEAT_SECONDS, until - now)))
        exchange.may_be_unread = True
        if exchange.tree.parent is None and exchange.lacking(children, Kind.HEARD) == children:
            raise _Ended(self._end_message)  # the others had given up on this rank before it sent the result

    # Sending.

    def _send(self, exchange: _Exchange, peer: int, frame: Frame, payload: Payload = b"") -> None:
        """Send a message that ``peer`` has to get, now or as soon as it is connected."""
        with self._changed:
            exchange.sent[peer].append((frame, payload))
            self._post(exchange, peer, frame, payload)
            if frame.kind == Kind.DOWN:
                exchange.closed.add(peer)
            self.count_sent(len(payload))

    def count_sent(self, payload_nbytes: int) -> None:
        """Count a message of one frame and this many bytes."""
        for stats in (self.stats, self.link.stats):
            stats.messages_sent += 1 + bool(payload_nbytes)
            stats.header_nbytes_sent += FRAME_NBYTES
            stats.payload_nbytes_sent += payload_nbytes

    def _post(self, exchange: _Exchange, peer: int, frame: Frame, payload: Payload = b"") -> Moving | None:
        """Start to send, if ``peer`` is connected. Called with the lock."""
        connections = exchange.open.get(peer)
        if connections is None:
            return None
        kept = connections.kept[exchange]
        if len(payload):
            crc32, tag = isal_zlib.crc32(payload), next(connections.tags)
            frame = frame._replace(payload_nbytes=len(payload), payload_crc32=crc32, payload_tag=tag)
        with contextlib.suppress(Broken):  # the thread that reads finds the same
            stamped = self.stamped(frame, exchange).encode()
            moving = connections.start("send", peer, self.tag(exchange.number), stamped)
            kept.append(moving)
            if len(payload):
                kept.append(connections.start("send", peer, frame.payload_tag, payload))
                if len(kept[-1].works) > 1:
                    self.link.in_thread(self._watch_leaving, exchange, peer, connections, kept[-1])
            return moving
        return None

    def _watch_leaving(self, exchange: _Exchange, peer: int, connections: Connections, moving: Moving) -> None:
        """Count each piece that leaves as a sign that ``peer`` is alive. gloo brings a beat of ``peer`` only once it
        has told it that we are ready for it, and on a slow link that waits behind the payload."""
        with contextlib.suppress(Broken):
            connections.finish(moving, note_piece=partial(exchange.note_heard, peer))

    def stamped(self, frame: Frame, exchange: _Exchange | None = None) -> Frame:
        """``frame`` with the numbers of this operation and of ``exchange``, or of the exchange that runs."""
        exchange = exchange or self._exchange
        if exchange is None:
            raise ValueError("no exchange runs")
        return frame._replace(
            secret=self.link.secret,
            operation=self.key.operation,
            occurrence=self.key.occurrence,
            exchange=exchange.number,
            phase=exchange.phase_id,
        )

    def tag(self, number: int) -> int:
        """The gloo tag of all frames of an exchange."""
        return (self.key.operation ^ self.key.occurrence * 0x9E3779B1 ^ number * 0x85EBCA6B) & 0x3FFFFFFF

    def _announce_failure(self, exchange: _Exchange, text: str, but: int | None = None) -> None:
        for peer in exchange.tree.neighbours:
            if peer != but and peer not in exchange.closed:
                self._send(exchange, peer, Frame(Kind.STOP), text.encode(errors="replace"))

    def say_gone(self, connections: Connections, missing: Sequence[int]) -> None:
        """Tell all neighbours that ``connections`` are dropped, and which ranks are missing.

        The store says more. But it may be lost too, and a forked child may hold the connections open.
        """
        shown = sorted(missing)[: BODY_NBYTES // 4 - 1]
        body = struct.pack(f"<{1 + len(shown)}I", len(shown), *shown)
        with self._changed:
            # Without an exchange the others may have begun the next one.
            number = self.n_exchanges if self._exchange is None else self._exchange.number
            gone = Frame(Kind.GONE, *self.key, number, body=body, secret=self.link.secret).encode()
            for peer in list(connections.peers):
                with contextlib.suppress(Broken):
                    connections.kept[None].append(connections.start("send", peer, self.tag(number), gone))

    # Reading.

    def _read_from_all(self, exchange: _Exchange) -> None:
        last = self._last
        # Whoever has not heard the last result gets it when it connects. Under another root it may be no neighbour now.
        behind = () if last is None else last.lacking(last.tree.children, Kind.HEARD)
        for peer in {*exchange.tree.neighbours, *behind}:
            if peer not in exchange.done:
                self.link.in_thread(self._read, exchange, peer)

    def _read(self, exchange: _Exchange, peer: int) -> None:
        """Take what ``peer`` sends in this exchange, in a thread of its own."""

        def note_announced() -> None:
            with self._changed:
                exchange.announced.add(peer)
                self._changed.notify_all()

        generation, lost = self.link.generation, ""
        connections: Connections | None = None
        try:
            generation, connections = self.link.connect(peer, lambda: self._exchange is not exchange, note_announced)
            with self._changed:
                is_old = self._exchange is not exchange or generation != self.link.generation
                if is_old or exchange.open.get(peer) is connections:  # then another thread reads from there already
                    return
                exchange.may_be_unread |= peer in exchange.open
                exchange.open[peer] = connections
                if exchange.number == 0 and peer not in exchange.closed:
                    self._post(exchange, peer, _HAS_COME)
                exchanges, last = [exchange], self._last
                if last is not None and last.open.get(peer) is not connections:
                    last.open[peer] = connections
                    exchanges.insert(0, last)
                for each in exchanges:  # all that it has to get, over the new connection
                    for frame, payload in each.sent[peer]:
                        self._post(each, peer, frame, payload)
            while not self._read_one(exchange, peer, connections):
                pass
        except Problem as problem:
            self.link.break_up(generation, problem, self)
        except RobustCheckpointError as error:
            self.link.break_up(generation, Problem.of_leaving(self.link.rank, error), self)
        except Broken as error:
            lost = str(error)
        except Exception as error:
            logger.exception("reading from rank %d fails", peer)
            lost = f"{type(error).__name__}: {error}"
        if lost:  # the exception is gone by now: it would keep gloo's group alive
            self._lose(exchange, peer, generation, connections, lost)

    def _read_one(self, exchange: _Exchange, peer: int, connections: Connections) -> bool:
        """Take the next message. Return whether it was the last one in this exchange.

        Raises:
            Broken: nothing more comes.
            Problem: what came was damaged, or the ranks are in different operations.
        """
        payload: Payload = b""
        try:
            data = connections.receive(peer, self.tag(exchange.number), FRAME_NBYTES)
            frame = Frame.decode(bytes(data), self.link.secret)
            if frame.payload_nbytes:
                exchange.note_heard(peer, frame)
                note_piece = partial(exchange.note_heard, peer)
                payload = connections.receive(peer, frame.payload_tag, frame.payload_nbytes, note_piece=note_piece)
                crc32 = isal_zlib.crc32(payload)
                if crc32 != frame.payload_crc32:
                    raise FrameError(
                        f"a payload of {frame.payload_nbytes} bytes arrived damaged: its CRC-32 is {crc32:#010x}, "
                        f"announced was {frame.payload_crc32:#010x}"
                    )
        except FrameError as error:
            what = str(error) if str(error).startswith("a payload") else f"a frame arrived damaged: {error}"
            if peer in exchange.damaged:
                sent = f"what rank {peer} sent to rank {self.link.rank}"
                raise Problem(f"{sent} arrived damaged twice: {what}", damaged_by=peer) from None
            exchange.damaged.add(peer)
            logger.info("rank %d has to send once more, over new connections: %s", peer, what)
            raise Problem.of_lost({peer: what}, may_return=True) from None
        if (frame.operation, frame.occurrence, frame.exchange) != (*self.key, exchange.number):
            return False
        if frame.kind == Kind.DOWN:
            # Answer before the caller knows the result, and may end.
            with self._changed:
                exchange.sent[peer].append((Frame(Kind.HEARD), b""))
                heard = self._post(exchange, peer, Frame(Kind.HEARD))
                exchange.closed.add(peer)
            if heard is not None:
                with contextlib.suppress(Broken):
                    connections.finish(heard, self.timeout_seconds)
        with self._changed:
            if self._exchange is not exchange or self._end_message is not None:
                return True
            self._heard.add(peer)
            exchange.note_heard(peer, frame)
            if frame.kind == Kind.GONE:
                (n_missing,) = struct.unpack_from("<I", frame.body)
                missing = struct.unpack_from(f"<{n_missing}I", frame.body, 4)
                if not missing:
                    raise Broken("it dropped its connections")
                raise Problem.of_lost({rank: exchange.words_for_lost(rank, f"rank {peer} says so") for rank in missing})
            if frame.phase != exchange.phase_id:
                raise Problem("in different operations", is_elsewhere=True)
            if frame.kind == Kind.STOP and exchange.failure is None:
                exchange.failure = bytes(payload).decode(errors="replace")
                self._announce_failure(exchange, exchange.failure, but=peer)
                self._interrupt_work(exchange)
            if frame.kind in (Kind.UP, Kind.DOWN, Kind.HEARD):
                exchange.arrived.setdefault((peer, frame.kind), Message(frame, payload))
                if not exchange.lacking(exchange.absent, frame.kind):
                    self._changed.notify_all()
            if frame.kind in (Kind.DOWN, Kind.HEARD):
                exchange.done.add(peer)
            return peer in exchange.done

    def _lose(
        self, exchange: _Exchange, peer: int, generation: int, connections: Connections | None, detail: str
    ) -> None:
        """The connection to ``peer`` broke, or could not be made."""
        with self._changed:
            if self._exchange is not exchange or generation != self.link.generation:
                return
            if peer in exchange.done or peer not in exchange.tree.neighbours:
                return
            exchange.catching_up_seconds()
            is_closed_there = connections is not None and not connections.is_dropped
            may_return = not is_closed_there or peer not in self._heard or peer in exchange.closed
            problem = Problem.of_lost({peer: exchange.words_for_lost(peer, detail)}, may_return=may_return)
            if connections is not None and is_closed_there:
                connections.closed[peer] = connections.closed.get(peer) or ("" if may_return else problem.missing[peer])
            elif detail.startswith(CONNECTING_FAILED):
                self.link.gone[peer] = detail
            if exchange.stood_still_seconds > self.timeout_seconds / 2:
                rank, seconds = self.link.rank, exchange.stood_still_seconds
                text = f"rank {rank} stood still for {seconds:.1f} seconds"
                problem = Problem.of_silent(rank, self.timeout_seconds, text)
        self.link.break_up(generation, problem, self)

    def resume(self) -> None:
        """Go on over new connections. The link calls this."""
        with self._changed:
            exchange = self._exchange
            if exchange is not None and self._end_message is None:
                exchange.count_from_now()
                self._read_from_all(exchange)
                self._changed.notify_all()

    # Waiting.

    def _receive(self, exchange: _Exchange, peers: Sequence[int], kind: Kind) -> list[Message]:
        """Wait for the messages of all ``peers``, and return them.

        Raises:
            _Ended: the operation has ended on all ranks.
        """
        exchange.waiting_since = time.monotonic()
        look_seconds = min(patience.ELSEWHERE_SECONDS, self.timeout_seconds / 2)
        said = ""
        try:
            while True:
                generation = self.link.generation
                try:
                    with self._changed:
                        if self._wait(exchange, peers, kind):
                            break
                        waited = time.monotonic() - exchange.waiting_since
                        unheard = set(exchange.tree.neighbours) - exchange.heard.keys()
                    if unheard and waited > look_seconds / 2:
                        where = f"{generation} {self.key} {exchange.number} {self.what}"
                        where = where.encode(errors="replace").decode()  # a path may be no UTF-8
                        if said != where:
                            said = where
                            self.link.say_waiting(generation, where)
                        elif waited > look_seconds and any(
                            self._is_elsewhere(peer, generation, said) for peer in unheard
                        ):
                            raise Problem("in different operations", is_elsewhere=True)
                except Problem as problem:
                    self.link.break_up(generation, problem, self)
        finally:
            if said:
                self.link.say_waiting(int(said.partition(" ")[0]), "")
        with self._changed:
            return [exchange.arrived[peer, kind] for peer in peers]

    def _is_elsewhere(self, peer: int, generation: int, own: str) -> bool:
        """Whether ``peer`` waits in another operation than this rank, or for another purpose in this exchange. In
        another exchange of this operation it is only late."""
        where = self.link.where_waits(generation, peer)
        if where in ("", own):
            return False
        _, key, number, _ = own.split(" ", 3)
        _, peers_key, peers_number, _ = where.split(" ", 3)
        return key != peers_key or number == peers_number

    def _wait(self, exchange: _Exchange, peers: Sequence[int], kind: Kind) -> bool:
        """Wait a while. Return whether the messages of all ``peers`` have come. Called with the lock.

        Raises:
            Problem: some message will not come.
            _Ended: the operation has ended on all ranks.
        """
        if self._end_message is not None:
            raise _Ended(self._end_message)
        catching_up = exchange.catching_up_seconds()
        if catching_up:
            self._changed.wait(catching_up)
            return False
        exchange.absent = exchange.lacking(peers, kind)
        if not exchange.absent:
            return True
        if exchange.problem is not None:
            problem, exchange.problem = exchange.problem, None
            raise problem
        left = min(exchange.seconds_to_wait(), self._until - time.monotonic())
        if left <= 0:
            if self._own_error is not None and not isinstance(self._own_error, Stopped | ExchangeError):
                # Who waits with this rank hears of its failure, not of the ranks for which it has waited.
                raise Problem.of_leaving(self.link.rank, self._own_error)
            raise Problem.of_late(exchange.late(), self.deadline_seconds)
        self._changed.wait(left)
        return False

    # Beats.

    def beat(self) -> None:
        """Tell the neighbours that this rank is alive, and how far the slowest rank behind it has come."""
        with self._changed:
            now, exchange = time.monotonic(), self._exchange
            if exchange is None or self._end_message is not None:
                return
            exchange.catching_up_seconds()
            if exchange.is_working and exchange.problem is None and not self.link.breaking.locked():
                try:
                    for peer in exchange.tree.neighbours:  # it waits for nobody, and would not notice
                        exchange.refuse(peer, peer, exchange.silence_of(peer, now))
                except Problem as problem:
                    exchange.problem = problem
                    exchange.failure = "; ".join(problem.missing.values())
                    self._announce_failure(exchange, exchange.failure)
                    self._interrupt_work(exchange)
            if self.waits_in_vain():
                self.note_waiting(False)  # or the others would take it for the one that does not get on
                self._interrupt_work(exchange)
            if now - self._last_beat < min(patience.BEAT_SECONDS, self.timeout_seconds / 4):
                return
            self._last_beat = now
            waited = now - exchange.waiting_since
            if exchange.tree.parent is None and not exchange.is_working and waited >= self._next_log_seconds:
                self._next_log_seconds *= 2
                self.stragglers.append(f"{self.what}: after {waited:.0f} seconds, {exchange.beat_for(None)}")
                logger.warning("%s", self.stragglers[-1])
            for peer in exchange.tree.neighbours:
                if peer not in exchange.closed:
                    self._post(exchange, peer, Frame(Kind.BEAT, body=exchange.beat_for(peer).encode()))

    # Ending out of step.

    def _conclude(self, problem: Problem) -> None:
        """End the operation on all ranks, whatever else ends its connections meanwhile."""
        while self._end_message is None:
            self.link.break_up(self.link.generation, problem, self)
        self._end_message = None

    def end(self, end_message: EndMessage) -> None:
        """The operation is over on all ranks; ``end_message`` says why. The link calls this."""
        with self._changed:
            self._end_message = end_message
            self._has_begun = False
            if self._exchange is not None:
                self._interrupt_work(self._exchange)
            self._changed.notify_all()

    def _interrupt_work(self, exchange: _Exchange) -> None:
        if exchange.interrupt is not None and exchange.is_working:
            self.link.in_thread(exchange.interrupt)

    # What this rank tells others after a failure.

    def doing(self) -> str:
        """Describe where this rank is, for people."""
        if self._exchange is not None:
            return f"{self.what} of {self.name}"
        return f"{self.name}, after {self.n_exchanges} exchanges"

    def missing(self) -> dict[int, str]:
        """The neighbours that this rank did not hear for most of the timeout, and what it knows of each."""
        now, found = time.monotonic(), {}
        with self._changed:
            if self._exchange is not None:
                for peer in self._exchange.absent:
                    silence, rank = self._exchange.silence_behind(peer, now)
                    if rank == peer and silence > _MISSED_AFTER * self.timeout_seconds:
                        found[peer] = self._exchange.words_for_silent(peer, silence)
        return found


_beating: set[Operation] = set()
"""The operations of this process that are in an exchange. One thread sends the beats of all of them. It ends when there
are none. At the end of the process nobody waits for it: once the link has ended an operation, it sends no beats.
"""

_beating_lock = threading.Lock()
_beats_threads: list[threading.Thread] = []


def _begin_beats(operation: Operation) -> None:
    with _beating_lock:
        _beating.add(operation)
        if not _beats_threads:
            _beats_threads.append(start_thread(_send_beats, name="robust_dcp: beats"))


def _send_beats() -> None:
    """Let each exchange send its beats when it is time."""
    while True:
        with _beating_lock:
            left = list(_beating)
            if not left:
                _beats_threads.clear()
                return
        while left:
            operation = left.pop()
            try:
                operation.beat()
            except Exception:  # the beats of other operations go on, and this one may succeed next time
                with contextlib.suppress(Exception):  # it may be a log handler that raises
                    logger.exception("a beat of %s fails", operation.name)
            del operation  # it may be over before the next beat
        time.sleep(patience.TICK_SECONDS)


def _forget_beats() -> None:
    """In a forked child: the operations are the parent's, and the thread does not exist here."""
    _beating.clear()
    _beats_threads.clear()
    _beating_lock.release()


os.register_at_fork(before=_beating_lock.acquire, after_in_parent=_beating_lock.release, after_in_child=_forget_beats)
