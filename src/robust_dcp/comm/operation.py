"""One operation on one rank, such as a save or a load: a series of exchanges over the tree of ranks.

Each exchange ends with one result for all ranks. This module owns the rules that keep the ranks in step: what goes up
and down the tree, the beats that ranks send while they work, and the two ways to fail. If a rank's own work fails, the
ranks stay in step: all raise the same exception and can go on. If a rank is gone, silent, or in another operation, the
ranks are out of step: the operation ends on all of them, with one :class:`EndMessage` that says why. An operation does
not know what a payload means; the channel does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from robust_dcp.comm import patience, wire
from robust_dcp.comm.beats import Beat, Progress
from robust_dcp.comm.combine import Agreement, Offer
from robust_dcp.comm.conclusion import as_told_to, conclude, settle
from robust_dcp.comm.failures import EndMessage, ErrorMessage, FailuresBelow, Problem, Stopped
from robust_dcp.comm.frames import FRAME_NBYTES, Frame, Kind, Status, phase_id
from robust_dcp.comm.link import Link, Message, OperationKey
from robust_dcp.comm.meeting import StoreLost
from robust_dcp.comm.neighbours import Neighbours
from robust_dcp.comm.pipe import Payload
from robust_dcp.comm.stats import ExchangeStats, PhaseStats
from robust_dcp.comm.tree import Tree
from robust_dcp.errors import RobustCheckpointError

__all__ = ["Contribution", "Operation", "Work"]

logger = logging.getLogger(__name__)

_MAX_UNHEARD_BEATS = 16


@dataclass(frozen=True)
class Contribution:
    """What a rank adds to an exchange: its offer, and the payload that it sends up (none if it is empty)."""

    offer: Offer = field(default_factory=Offer)
    payload: Payload = b""


@dataclass(frozen=True)
class Work:
    """What one exchange does on a rank.

    Attributes:
        contribute: does this rank's own work.
        merge: joins this rank's payload and those of its children into one, on the way up. It is called only if at
            least one child sent a payload.
        reply: makes the payload that goes down. It is called on the root, with the agreement of all ranks, the root's
            own payload, and those of its children.
        share: returns the part of the payload that ``child`` gets, on the way down.
    """

    contribute: Callable[[], Contribution]
    merge: Callable[[Payload, list[Payload]], Payload] = lambda own, below: own
    reply: Callable[[Agreement, Payload, list[Payload]], Payload] = lambda agreement, own, below: b""
    share: Callable[[Payload, int], Payload] = lambda payload, child: payload


class _Ended(Exception):
    """The operation has ended: another rank has sent the end message."""


class Operation:
    """The exchanges of one caller with all ranks of a group. After an end out of step, the next exchange starts anew.

    Args:
        link: the link of the group.
        name: what the operation does, for example ``"save /ckpt/step_3"``. It is the same on all ranks.
        timeout_seconds: how long a rank may show no sign of progress.
        deadline_seconds: how long the whole operation may take; ``None`` for no limit.

    Attributes:
        interrupt: ends a wait in this rank's own work. It is called when the exchange is going to fail, for work that
            does not ask by itself whether to stop.
        what, phase: the current or latest exchange: its full description, and the caller's name for it.
        stragglers: on the root, the log lines about ranks that the others waited for.
    """

    key = OperationKey(0, 0)

    def __init__(self, link: Link, name: str, timeout_seconds: float, deadline_seconds: float | None = None) -> None:
        self.link = link
        self.name = name
        self.timeout_seconds = timeout_seconds
        self.deadline_seconds = deadline_seconds
        self.what = self.phase = ""
        self.interrupt: Callable[[], None] | None = None
        self.fault: Callable[[], None] | None = None
        self.stragglers: list[str] = []
        self._recordings: list[ExchangeStats] = []
        self._busy = threading.Lock()
        self._holder: int | None = None
        self._changed = threading.Condition()
        self._has_begun = False
        self._raised: BaseException | None = None
        self._is_untold = False
        self._reset()

    def _reset(self) -> None:
        self._exchange = 0
        self._arrived: dict[tuple[int, Kind, int], Message] = {}
        self._stops: dict[int, str] = {}
        self._end_message: bytes | None = None
        self._neighbours = Neighbours(self.link)
        self._runs = False
        self._is_working = False
        self._progress = Progress.now()
        self._problem: Problem | None = None
        self._next_log_seconds = patience.LOG_SECONDS
        self._last_beat = self._begun = time.monotonic()

    # What the channel calls.

    def run(self, verb: str, phase: str, root: int, work: Work) -> tuple[Agreement, Payload]:
        """Run one exchange: this rank's work, then up the tree under ``root``, and down again.

        Args:
            verb: the kind of exchange.
            phase: the caller's name for it. Ranks with another verb or phase are in different operations.
            root: a rank of the group.
            work: what this rank does in the exchange.

        Returns:
            The agreement of all ranks, and the root's reply to this rank and those below it.

        Raises:
            ExchangeError: the ranks are out of step. All of them raise the same error.
            RobustCheckpointError: the work of some rank failed. All ranks raise the same error, and the next exchange
                works.
        """
        with self._held(phase):
            cost = PhaseStats(exchanges=1)
            own_error: list[BaseException] = []
            try:
                self._start(verb, phase, root)
                result = self._sweep(phase, work, cost, own_error)
            except _Ended:
                error = self._error_of_end_message()
            except Problem as problem:
                error = self._conclude(problem)
            except BaseException as interrupt:
                if self._runs:
                    self._conclude(Problem(f"was left by rank {self.link.rank}: {type(interrupt).__name__}", interrupt))
                raise
            else:
                return result
            finally:
                with self._changed:
                    self._runs = self._is_working = False
                self.add_cost(phase, cost)
            raise self._as_raised(error, own_error)

    def leave(self, error: BaseException) -> None:
        """End the operation because this rank failed between two exchanges. Tell the others unless they know."""
        if self._has_begun and error is not self._raised:
            self._conclude(Problem(f"was left by rank {self.link.rank}: {type(error).__name__}", error))

    def _as_raised(self, error: RobustCheckpointError, own_error: list[BaseException]) -> BaseException:
        """The exception that this rank raises: ``error``, unless its own work was interrupted (Ctrl-C, say)."""
        if own_error and is_interrupt(own_error[0]):
            self._raised = own_error[0]
        else:
            error.__cause__ = own_error[0] if own_error else None
            self._raised = error
        return self._raised

    @property
    def tree(self) -> Tree:
        """The tree of the current or latest exchange."""
        return self._neighbours.tree

    @property
    def neighbours(self) -> Sequence[int]:
        """The ranks that this rank talks to in that tree."""
        return self.tree.neighbours

    def stopped(self) -> str | None:
        """The failure that another rank announced for the current or next exchange; ``None`` if there is none."""
        if self._end_message is not None:
            return wire.decode(self._end_message, EndMessage).error.to_error().message
        return self._stops.get(self._exchange)

    def note_progress(self, done_nbytes: int | None = None, total_nbytes: int | None = None) -> None:
        """Record that this rank's work has advanced, and how far, if the caller knows."""
        self._progress = self._progress.moved(done_nbytes, total_nbytes)

    def add_cost(self, phase: str, cost: PhaseStats) -> None:
        """Add what ``phase`` has cost this rank to the statistics."""
        for stats in (self.link.stats, *self._recordings):
            stats.count(phase, cost)

    @contextmanager
    def recording(self) -> Iterator[ExchangeStats]:
        """Count the exchanges that end within the block."""
        stats = ExchangeStats()
        self._recordings.append(stats)
        try:
            yield stats
        finally:
            self._recordings = [other for other in self._recordings if other is not stats]

    # One exchange.

    @contextmanager
    def _held(self, phase: str) -> Iterator[None]:
        """Let only one exchange run at a time."""
        if self._holder == threading.get_ident():
            raise RobustCheckpointError(
                f"{phase} was called within the work of another exchange of the same channel: "
                "finish that one first, or use a channel of another operation"
            )
        with self._busy:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    def _start(self, verb: str, phase: str, root: int) -> None:
        tree = self.link.tree(root)
        what = f"{verb} {phase!r}" + (f" with coordinator {root}" if root else "")
        with self._changed:
            self.what, self.phase = what, phase
        if self._is_untold:
            raise _Ended  # the operation ended for all ranks while this one was between two exchanges
        if not self._has_begun:
            self._reset()
            self._has_begun = True  # before link.begin, because the link may end the operation at once
            self.link.begin(self.name, self)
        with self._changed:
            self._neighbours.begin(what, tree)
        self.link.connect(tree.neighbours)
        with self._changed:
            self._problem = None
            self._next_log_seconds = patience.LOG_SECONDS
            self._last_beat = time.monotonic()
            self._neighbours.count_from_now()
            self._progress = Progress.now()
            self._runs = self._is_working = True
            self._neighbours.refuse_lost()

    def _sweep(
        self, phase: str, work: Work, cost: PhaseStats, own_error: list[BaseException]
    ) -> tuple[Agreement, Payload]:
        tree = self.tree
        own, payload, failures = self._do_own_work(work, own_error)
        began = time.monotonic()
        try:
            arrived = self._await(tree.children, Kind.UP)
            total = own.with_children([Agreement.decode(message.frame.body) for message in arrived])
            for message in arrived:
                cost.received(message.payload)
                if message.frame.status != Status.OK:
                    failures = failures.merged(wire.decode(message.payload, FailuresBelow))
            if not failures:
                try:
                    below = [message.payload for message in arrived if message.payload]
                    if tree.parent is None:
                        self.note_progress()  # this rank may have waited for long before
                        payload = work.reply(total, payload, below)
                    elif below:
                        payload = work.merge(payload, below)
                except BaseException as error:
                    failures = self._failed(error, own_error)
            status = failures.status
            if tree.parent is not None:
                up = payload if status == Status.OK else wire.encode(failures)
                self._send(tree.parent, Kind.UP, status, total, up, cost)
                (reply,) = self._await((tree.parent,), Kind.DOWN)
                payload = reply.payload
                cost.received(payload)
                total, status = Agreement.decode(reply.frame.body), reply.frame.status
            elif status != Status.OK:
                payload = wire.encode(ErrorMessage.of(failures.joint_error(phase)))
            for child in reversed(tree.children):
                share = payload
                if status == Status.OK and payload:
                    share = work.share(payload, child)
                self._send(child, Kind.DOWN, status, total, share, cost)
        finally:
            cost.seconds = time.monotonic() - began
        with self._changed:
            self._runs = False
            self._exchange += 1
            self._stops.pop(self._exchange - 1, None)
        if status != Status.OK:
            raise self._as_raised(wire.decode(payload, ErrorMessage).to_error(), own_error)
        return total, payload

    def _do_own_work(self, work: Work, own_error: list[BaseException]) -> tuple[Agreement, Payload, FailuresBelow]:
        failures = FailuresBelow()
        contribution = Contribution()
        try:
            if self.fault is not None:
                fault, self.fault = self.fault, None
                fault()
            contribution = work.contribute()
        except BaseException as error:
            failures = self._failed(error, own_error)
        with self._changed:
            self._is_working = False
            self._progress = self._progress.moved(None, None)
        return Agreement.of(self.link.rank, contribution.offer), contribution.payload, failures

    def _failed(self, error: BaseException, own_error: list[BaseException]) -> FailuresBelow:
        """Record a failure of this rank, and tell the ranks that are still working."""
        own_error.append(error)
        if isinstance(error, Stopped):
            return FailuresBelow.stopped_on(self.link.rank, str(error))
        line = str(error).partition("\n")[0][:500]
        text = f"rank {self.link.rank}: {type(error).__name__}: {line}"
        self._pass_on(Kind.STOP, text.encode(errors="replace"), but=None)
        return FailuresBelow.on(self.link.rank, error)

    def _send(
        self, peer: int, kind: Kind, status: Status, agreement: Agreement, payload: Payload, cost: PhaseStats
    ) -> None:
        self.link.send(peer, self._frame(kind, status, body=agreement.encode()), payload)
        cost.sent(FRAME_NBYTES, payload)

    def _frame(self, kind: Kind, status: Status = Status.OK, body: bytes = b"") -> Frame:
        return Frame(kind, *self.key, self._exchange, phase_id(self.what), status, body)

    def _pass_on(self, kind: Kind, payload: bytes, but: int | None) -> None:
        for peer in self.tree.neighbours:
            if peer != but:
                self.link.send(peer, self._frame(kind), payload)

    # Waiting, and handling what arrives meanwhile.

    def _await(self, peers: Sequence[int], kind: Kind) -> list[Message]:
        """Wait for the messages of all ``peers``, and return them.

        Raises:
            Problem: some message will not come.
            _Ended: another rank has ended the operation.
        """
        with self._changed:
            self._neighbours.waiting_since = time.monotonic()
            while True:
                if self._end_message is not None:
                    raise _Ended
                now = time.monotonic()
                catching_up = self._neighbours.seconds_to_catch_up(now, self.timeout_seconds)
                if catching_up:
                    self._changed.wait(catching_up)
                    continue
                if self._problem is not None:
                    raise self._problem
                places = [(self._exchange, kind, peer) for peer in peers]
                self._neighbours.absent = tuple(place[2] for place in places if place not in self._arrived)
                self._refuse_other_phases(places)
                if not self._neighbours.absent:
                    break
                seconds = self._neighbours.seconds_to_wait(self.timeout_seconds)
                self._changed.wait(min(seconds, self._seconds_to_deadline()))
        messages = [self._arrived.pop(place) for place in places]
        # Half the timeout, because the others started their clocks before this rank did.
        if any(time.monotonic() - message.seconds > self.timeout_seconds / 2 for message in messages):
            self._refuse_if_given_up()
        return messages

    def _seconds_to_deadline(self) -> float:
        """How much of ``deadline_seconds`` is left.

        Raises:
            Problem: nothing is left.
        """
        if self.deadline_seconds is None:
            return math.inf
        left = self._begun + self.deadline_seconds - time.monotonic()
        if left <= 0:
            raise Problem.of_deadline(self._neighbours.absent, self.deadline_seconds)
        return left

    def _refuse_if_given_up(self) -> None:
        """Look for an end message, because others may have given up on this rank while they waited for it."""
        end_message = self._known_end_message()
        if end_message is not None:
            self.link.end_operations(end_message)
            raise _Ended

    def _refuse_other_phases(self, places: Sequence[tuple[int, Kind, int]]) -> None:
        own = phase_id(self.what)
        for place in places:
            if place in self._arrived and self._arrived[place].frame.phase != own:
                raise Problem("in different operations", is_elsewhere=True)

    def deliver(self, message: Message) -> None:
        peer, frame, payload, _ = message
        with self._changed:
            if self._end_message is not None:
                return
            is_beat = frame.kind == Kind.BEAT and frame.exchange == self._exchange
            self._neighbours.note_heard(peer, Beat.decode(frame.body) if is_beat else None)
            if frame.kind in (Kind.UP, Kind.DOWN):
                self._arrived[frame.exchange, frame.kind, peer] = message
            elif frame.kind == Kind.STOP:
                is_news = frame.exchange not in self._stops and frame.exchange >= self._exchange
                if is_news:
                    self._stops[frame.exchange] = bytes(payload).decode(errors="replace")
                    self._pass_on(Kind.STOP, bytes(payload), but=peer)
                    self._interrupt_work()
            else:
                return
            self._changed.notify_all()

    def lost(self, peer: int, detail: str, *, damaged: bool) -> None:
        with self._changed:
            self._neighbours.lost[peer] = detail, damaged
            if self._is_working and not damaged:
                self._stop_work(Problem.of_lost(peer, self._neighbours.words_for_lost(peer, detail)))
            self._interrupt_work()
            self._changed.notify_all()

    # Beats.

    def beat(self) -> None:
        """Tell the neighbours that this rank is alive, and how far the slowest rank behind it has come."""
        with self._changed:
            now = time.monotonic()
            if not self._runs:
                return
            self._neighbours.seconds_to_catch_up(now, self.timeout_seconds)
            if self._is_working:
                try:
                    self._neighbours.refuse_silent(now, self.timeout_seconds)
                except Problem as problem:
                    self._stop_work(problem)
            if now - self._last_beat < min(patience.BEAT_SECONDS, self.timeout_seconds / 4):
                return
            self._last_beat = now
            self._log_stragglers(now)
            for peer in self.tree.neighbours:
                connection = self.link.connection(peer)
                # Send beats even to a parent that only this rank waits for, to show the parent that its beats are
                # heard.
                if connection.n_unacknowledged < _MAX_UNHEARD_BEATS:
                    body = self._beat_for(peer, now).encode()
                    self.link.send(peer, self._frame(Kind.BEAT, body=body))
                    if (
                        peer in self._neighbours.absent
                        and self._neighbours.silence_of(peer, now) > 2 * patience.BEAT_SECONDS
                    ):
                        connection.ask_for_lost()

    def _log_stragglers(self, now: float) -> None:
        """On the root: log now and then which rank all others wait for."""
        waited = now - self._neighbours.waiting_since
        if self.tree.parent is None and not self._is_working and waited >= self._next_log_seconds:
            self._next_log_seconds *= 2
            self.stragglers.append(f"{self.what}: after {waited:.0f} seconds, {self._beat_for(None, now)}")
            logger.warning("%s", self.stragglers[-1])

    def _stop_work(self, problem: Problem) -> None:
        """Stop the work of all ranks, because the exchange will fail with ``problem``."""
        if self._problem is None:
            self._problem = problem
            text = "; ".join(problem.missing.values())
            self._stops.setdefault(self._exchange, text)
            self._pass_on(Kind.STOP, text.encode(errors="replace"), but=None)
            self._interrupt_work()

    def _beat_for(self, receiver: int | None, now: float) -> Beat:
        if self._is_working:
            absent = [child for child in self.tree.children if (self._exchange, Kind.UP, child) not in self._arrived]
        else:
            absent = list(self._neighbours.absent)
        waits = not self._is_working and len(absent) > 0
        return self._neighbours.beat_for(receiver, absent, None if waits else self._progress, now)

    # Ending out of step.

    def _conclude(self, problem: Problem) -> RobustCheckpointError:
        """End the operation on all ranks, and return the exception that they raise."""
        with self._changed:
            if self._end_message is None and problem.missing:
                # Several ranks may die at the same time: wait a little to report all of them. If this rank lost its
                # parent, the ranks above the parent see more than this one, so it gives them time to report first.
                seconds = (
                    patience.PARENT_LOST_SECONDS if self.tree.parent in problem.missing else patience.TOGETHER_SECONDS
                )
                self._changed.wait_for(lambda: self._end_message is not None, min(seconds, self.timeout_seconds))
        end_message = self._known_end_message()
        if end_message is None:
            ended = conclude(problem, self, self.link)
            # Another rank's end message may have come while this rank asked where the others are.
            end_message = self._end_message or settle(ended, self, self.link)
        self.link.end_operations(end_message)
        with self._changed:
            # Another thread of this process may be ending the operation right now. Wait until it has done so here.
            self._changed.wait_for(lambda: self._end_message is not None, patience.HEARD_SECONDS)
        if self._end_message is None:
            self.end(end_message)
        return self._error_of_end_message()

    def _known_end_message(self) -> bytes | None:
        if self._end_message is None:
            with contextlib.suppress(StoreLost):
                return self.link.end_message_of(self.key)
        return self._end_message

    def end(self, end_message: bytes) -> None:
        """The operation is over on all ranks; ``end_message`` says why. The link calls this."""
        with self._changed:
            self._end_message = end_message
            self._is_untold = True
            self._has_begun = False
            self._interrupt_work()
            self._changed.notify_all()

    def _interrupt_work(self) -> None:
        if self.interrupt is not None and self._is_working:
            threading.Thread(target=self.interrupt, name="robust_dcp: interrupt", daemon=True).start()

    def _error_of_end_message(self) -> RobustCheckpointError:
        self.link.await_heard()
        self._is_untold = False
        return as_told_to(self.link.rank, wire.decode(self._end_message or b"", EndMessage).error.to_error())

    # What this rank tells others after a failure.

    def whereabouts(self) -> str:
        """Describe where this rank is, for people."""
        return f"{self.what} of {self.name}" if self._runs else f"{self.name}, after {self._exchange} exchanges"

    def missing(self) -> dict[int, str]:
        """The neighbours that this rank lost, or did not hear for most of the timeout, and what it knows of each."""
        with self._changed:
            return self._neighbours.missing(self.timeout_seconds)


def is_interrupt(error: BaseException) -> bool:
    """Whether this rank raises ``error`` itself, even if the other ranks raise something else."""
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
