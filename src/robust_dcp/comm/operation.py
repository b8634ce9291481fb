"""One operation on one rank, such as a save or a load: a series of exchanges over the tree of ranks.

This module owns the rules that keep the ranks in step: the order of exchanges, the beats that ranks send while they
work or wait, and the two ways to fail. If a rank's own work fails, the ranks stay in step: all raise the same exception
and can go on. If a rank is gone, silent, or in another operation, the ranks are out of step: the operation ends on all
of them, with one :class:`EndMessage` that says why. What goes up and down the tree is the matter of
:mod:`~robust_dcp.comm.exchange`; what a payload means is known to the channel only.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from robust_dcp.comm import patience, wire
from robust_dcp.comm.beats import Beat, Progress
from robust_dcp.comm.combine import Agreement
from robust_dcp.comm.ending import Ending
from robust_dcp.comm.exchange import Exchange, Work
from robust_dcp.comm.failures import EndMessage, ErrorMessage, Problem
from robust_dcp.comm.frames import Frame, Kind, Status, phase_id
from robust_dcp.comm.inbox import Inbox
from robust_dcp.comm.link import Link, Message, OperationKey
from robust_dcp.comm.neighbours import Neighbours
from robust_dcp.comm.pipe import Payload
from robust_dcp.comm.stats import Costs
from robust_dcp.comm.stragglers import Stragglers
from robust_dcp.comm.tree import Tree
from robust_dcp.errors import RobustCheckpointError

__all__ = ["Operation"]

_MAX_UNHEARD_BEATS = 16


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
        fault: for tests. It is called before this rank's own work in the next exchange.
        stragglers: on the root, the log lines about ranks that the others waited for.
        costs: what the exchanges have cost this rank.
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
        self.stragglers = Stragglers()
        self.costs = Costs(link.stats)
        self._busy = threading.Lock()
        self._holder: int | None = None
        self._changed = threading.Condition()
        self._has_begun = False
        self._raised: BaseException | None = None
        self._ending = Ending(link, self._changed)
        self._reset()

    def _reset(self) -> None:
        self._inbox = Inbox()
        self._ending.message = None
        self._neighbours = Neighbours(self.link)
        self._runs = False
        self._is_working = False
        self._progress = Progress.now()
        self._problem: Problem | None = None
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
            exchange = Exchange(self, phase, work)
            try:
                self._start(verb, phase, root)
                fault, self.fault = self.fault, None
                result = exchange.run(fault)
                with self._changed:
                    self._runs = False
                    self._inbox.end_exchange()
            except _Ended:
                error = self._ending.error()
            except Problem as problem:
                error = self._conclude(problem)
            except BaseException as interrupt:
                if self._runs:
                    self._conclude(Problem.of_leaving(self.link.rank, interrupt))
                raise
            else:
                if result.status == Status.OK:
                    return result.agreement, result.payload
                error = wire.decode(result.payload, ErrorMessage).to_error()
            finally:
                with self._changed:
                    self._runs = self._is_working = False
                self.costs.count(phase, exchange.cost)
            raise self._as_raised(error, exchange.own_error)

    def leave(self, error: BaseException) -> None:
        """End the operation because this rank failed between two exchanges. Tell the others unless they know."""
        if self._has_begun and error is not self._raised:
            self._conclude(Problem.of_leaving(self.link.rank, error))

    def _as_raised(self, error: RobustCheckpointError, own_error: BaseException | None) -> BaseException:
        """The exception that this rank raises: ``error``, unless its own work was interrupted (Ctrl-C, say)."""
        if own_error is not None and is_interrupt(own_error):
            self._raised = own_error
        else:
            error.__cause__ = own_error
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
        if self._ending.message is not None:
            return wire.decode(self._ending.message, EndMessage).error.to_error().message
        return self._inbox.failure()

    def note_progress(self, done_nbytes: int | None = None, total_nbytes: int | None = None) -> None:
        """Record that this rank's work has advanced, and how far, if the caller knows."""
        self._progress = self._progress.moved(done_nbytes, total_nbytes)

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
        if self._ending.is_untold:
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
            self.stragglers.begin_exchange()
            self._last_beat = time.monotonic()
            self._neighbours.count_from_now()
            self._progress = Progress.now()
            self._runs = self._is_working = True
            self._neighbours.refuse_lost()

    # What the exchange calls. See :class:`~robust_dcp.comm.exchange.Messenger`.

    def send(self, peer: int, kind: Kind, status: Status, agreement: Agreement, payload: Payload) -> None:
        self.link.send(peer, self._frame(kind, status, body=agreement.encode()), payload)

    def announce_failure(self, text: str, but: int | None = None) -> None:
        for peer in self.tree.neighbours:
            if peer != but:
                self.link.send(peer, self._frame(Kind.STOP), text.encode(errors="replace"))

    def note_work_done(self) -> None:
        with self._changed:
            self._is_working = False
            self._progress = self._progress.moved(None, None)

    def _frame(self, kind: Kind, status: Status = Status.OK, body: bytes = b"") -> Frame:
        return Frame(kind, *self.key, self._inbox.exchange, phase_id(self.what), status, body)

    # Waiting, and handling what arrives meanwhile.

    def receive(self, peers: Sequence[int], kind: Kind) -> list[Message]:
        """Wait for the messages of all ``peers``, and return them.

        Raises:
            Problem: some message will not come.
            _Ended: another rank has ended the operation.
        """
        with self._changed:
            self._neighbours.waiting_since = time.monotonic()
            while True:
                if self._ending.message is not None:
                    raise _Ended
                now = time.monotonic()
                catching_up = self._neighbours.seconds_to_catch_up(now, self.timeout_seconds)
                if catching_up:
                    self._changed.wait(catching_up)
                    continue
                if self._problem is not None:
                    raise self._problem
                self._neighbours.absent = self._inbox.absent(peers, kind)
                self._inbox.refuse_other_phases(peers, kind, phase_id(self.what))
                if not self._neighbours.absent:
                    break
                seconds = self._neighbours.seconds_to_wait(self.timeout_seconds)
                self._changed.wait(min(seconds, self._seconds_to_deadline()))
        messages = self._inbox.take(peers, kind)
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
            raise Problem.of_deadline(self._neighbours.late(), self.deadline_seconds)
        return left

    def _refuse_if_given_up(self) -> None:
        """Look for an end message, because others may have given up on this rank while they waited for it."""
        end_message = self._ending.known(self)
        if end_message is not None:
            self.link.end_operations(end_message)
            raise _Ended

    def deliver(self, message: Message) -> None:
        peer, frame, payload, _ = message
        with self._changed:
            if self._ending.message is not None:
                return
            is_beat = frame.kind == Kind.BEAT and frame.exchange == self._inbox.exchange
            self._neighbours.note_heard(peer, Beat.decode(frame.body) if is_beat else None)
            if frame.kind in (Kind.UP, Kind.DOWN):
                self._inbox.put(message)
            elif frame.kind == Kind.STOP:
                text = bytes(payload).decode(errors="replace")
                if self._inbox.note_failure(frame.exchange, text):
                    self.announce_failure(text, but=peer)
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
            if self.tree.parent is None and not self._is_working:
                waited = now - self._neighbours.waiting_since
                self.stragglers.note_wait(self.what, waited, lambda: self._beat_for(None, now))
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

    def _stop_work(self, problem: Problem) -> None:
        """Stop the work of all ranks, because the exchange will fail with ``problem``."""
        if self._problem is None:
            self._problem = problem
            text = "; ".join(problem.missing.values())
            self._inbox.note_failure(self._inbox.exchange, text)
            self.announce_failure(text)
            self._interrupt_work()

    def _beat_for(self, receiver: int | None, now: float) -> Beat:
        absent = self._inbox.absent(self.tree.children, Kind.UP) if self._is_working else self._neighbours.absent
        waits = not self._is_working and len(absent) > 0
        return self._neighbours.beat_for(receiver, absent, None if waits else self._progress, now)

    # Ending out of step.

    def _conclude(self, problem: Problem) -> RobustCheckpointError:
        """End the operation on all ranks, and return the exception that they raise."""
        return self._ending.conclude(problem, self, self.tree.parent)

    def end(self, end_message: bytes) -> None:
        """The operation is over on all ranks; ``end_message`` says why. The link calls this."""
        with self._changed:
            self._ending.note(end_message)
            self._has_begun = False
            self._interrupt_work()
            self._changed.notify_all()

    def _interrupt_work(self) -> None:
        if self.interrupt is not None and self._is_working:
            threading.Thread(target=self.interrupt, name="robust_dcp: interrupt", daemon=True).start()

    # What this rank tells others after a failure.

    def whereabouts(self) -> str:
        """Describe where this rank is, for people."""
        return f"{self.what} of {self.name}" if self._runs else f"{self.name}, after {self._inbox.exchange} exchanges"

    def missing(self) -> dict[int, str]:
        """The neighbours that this rank lost, or did not hear for most of the timeout, and what it knows of each."""
        with self._changed:
            return self._neighbours.missing(self.timeout_seconds)


def is_interrupt(error: BaseException) -> bool:
    """Whether this rank raises ``error`` itself, even if the other ranks raise something else."""
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
