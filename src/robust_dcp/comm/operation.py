"""One operation on one rank, a save or a load: exchanges over the tree, in order, each with one verdict for all ranks.

Owns the rules by which all ranks stay in step: what goes up, what comes down, the beats while ranks work, and both ways
to fail. In step, all ranks raise the same and go on. Out of step (a rank is gone, silent, or elsewhere), the operation
ends on all ranks with one account of why. It never knows what a payload means; the channel does.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from robust_dcp.comm import wire
from robust_dcp.comm.beats import Beat, Progress
from robust_dcp.comm.combine import Agreement, Offer
from robust_dcp.comm.conclusion import Problem, as_told_to, conclude, without_store
from robust_dcp.comm.failures import EndMessage, ErrorMessage, FailuresBelow, Stopped
from robust_dcp.comm.frames import FRAME_NBYTES, Frame, Kind, Status, phase_id
from robust_dcp.comm.link import Link, Message, OperationKey
from robust_dcp.comm.meeting import STORE_IS_LOST, StoreLost
from robust_dcp.comm.pipe import Payload
from robust_dcp.comm.stats import ExchangeStats, PhaseStats
from robust_dcp.comm.tree import Tree
from robust_dcp.errors import RobustCheckpointError

__all__ = ["Contribution", "Operation", "Work"]

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
"""How often ranks that work or wait say so."""

LOG_SECONDS = 10.0
"""How long ranks are waited for before the log says for whom; then after twice that, and so on."""

TOGETHER_SECONDS = 0.2
"""How long a rank that has lost another waits for others to be lost as well, before it says who is."""

PARENT_LOST_SECONDS = 0.8
"""How long a rank that has lost its parent waits for what others have to say of it."""

RECONNECT_SECONDS = 5.0
"""How long a rank whose connection broke between two operations has to come back."""


@dataclass(frozen=True)
class Contribution:
    """What a rank says of itself in an exchange, and the payload that it sends up (none if empty)."""

    offer: Offer = field(default_factory=Offer)
    payload: Payload = b""


@dataclass(frozen=True)
class Work:
    """What one exchange does on a rank.

    Attributes:
        contribute: this rank's own work.
        merge: on the way up, the payload of this rank and those of its children, at least one, become one.
        reply: on the root, from what all ranks agree on, its own payload and those of its children: the payload that
            goes down.
        share: on the way down, what of the payload ``child`` is to get.
    """

    contribute: Callable[[], Contribution]
    merge: Callable[[Payload, list[Payload]], Payload] = lambda own, below: own
    reply: Callable[[Agreement, Payload, list[Payload]], Payload] = lambda agreement, own, below: b""
    share: Callable[[Payload, int], Payload] = lambda payload, child: payload


class _Ended(Exception):
    """The operation is over on this rank: another has sent the account."""


class Operation:
    """The exchanges of one caller with all ranks of a group. After one that ended out of step, the next begins anew.

    Args:
        link: of the group.
        name: what is done, ``"save /ckpt/step_3"`` say; the same on all ranks.
        timeout_seconds: how long a rank may go without any sign of progress.
        deadline_seconds: for the operation as a whole; ``None`` for no such limit.

    Attributes:
        interrupt: ends the wait of work that cannot be asked to stop; called when the exchange will fail.
        what, phase: the exchange that is under way or was last, in full and by the caller's name.
        stragglers: what was logged of ranks that were waited for, on the root.
    """

    key = OperationKey(0, 0)

    def __init__(self, link: Link, name: str, timeout_seconds: float, deadline_seconds: float | None = None) -> None:
        self.link = link
        self.name = name
        self.timeout_seconds = timeout_seconds
        self.deadline_seconds = deadline_seconds
        self.tree = Tree(link.rank, link.size)
        self.what = self.phase = ""
        self.interrupt: Callable[[], None] | None = None
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
        self._account: bytes | None = None
        self._lost: dict[int, tuple[str, bool]] = {}
        self._heard: dict[int, float] = {}
        self._beats: dict[int, Beat] = {}
        self._absent: tuple[int, ...] = ()
        self._runs = False
        self._is_working = False
        self._progress = Progress.now()
        self._problem: Problem | None = None
        self._reads_until = 0.0
        self._next_log_seconds = LOG_SECONDS
        self._last_tick = self._last_beat = self._waiting_since = self._began = self._begun = time.monotonic()

    # What the channel calls.

    def run(self, verb: str, phase: str, root: int, work: Work) -> tuple[Agreement, Payload]:
        """One exchange: this rank's work, then up the tree under ``root`` and down again.

        Args:
            verb: what kind of exchange it is.
            phase: the caller's name for it. Ranks with another verb or phase are in different operations.
            root: rank of the group.
            work: see there.

        Returns:
            What all ranks agree on, and what the root replied to this rank and those below it.

        Raises:
            ExchangeError: the ranks fell out of step; the same on all of them.
            RobustCheckpointError: some rank's work failed; the same on all of them, and the next exchange works.
        """
        with self._held(phase):
            cost = PhaseStats(exchanges=1)
            own_error: list[BaseException] = []
            try:
                self._start(verb, phase, root)
                result = self._sweep(phase, work, cost, own_error)
            except _Ended:
                error = self._told()
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
        """This rank ends the operation between two exchanges: tell the others, unless they know."""
        if self._has_begun and error is not self._raised:
            self._conclude(Problem(f"was left by rank {self.link.rank}: {type(error).__name__}", error))

    def _as_raised(self, error: RobustCheckpointError, own_error: list[BaseException]) -> BaseException:
        """What this rank raises: ``error``, unless its own work was interrupted."""
        if own_error and is_interrupt(own_error[0]):
            self._raised = own_error[0]
        else:
            error.__cause__ = own_error[0] if own_error else None
            self._raised = error
        return self._raised

    @property
    def neighbours(self) -> Sequence[int]:
        """The ranks that this one talks to in the exchange that is under way or was last."""
        return self.tree.neighbours

    def stopped(self) -> str | None:
        """What another rank has said of the exchange that is under way, or comes next; ``None`` if it may succeed."""
        if self._account is not None:
            return wire.decode(self._account, EndMessage).error.to_error().message
        return self._stops.get(self._exchange)

    def note_progress(self, done_nbytes: int | None = None, total_nbytes: int | None = None) -> None:
        """This rank has got on with its work; how far, if it can be said."""
        self._progress = self._progress.moved(done_nbytes, total_nbytes)

    def add_cost(self, phase: str, cost: PhaseStats) -> None:
        """Count what ``phase`` has cost this rank."""
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
        """One exchange at a time."""
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
        tree = Tree(self.link.rank, self.link.size, root)
        what = f"{verb} {phase!r}" + (f" with coordinator {root}" if root else "")
        with self._changed:
            self.what, self.phase, self.tree = what, phase, tree
        if self._is_untold:
            raise _Ended  # it ended for all ranks while this one was between two exchanges
        if not self._has_begun:
            self._reset()
            self._has_begun = True  # until the link says that it is over, which it may do at once
            self.link.begin(self.name, self)
        self.link.connect(tree.neighbours)
        with self._changed:
            self._problem = None
            self._next_log_seconds = LOG_SECONDS
            self._began = self._last_tick = self._last_beat = self._waiting_since = time.monotonic()
            self._beats.clear()
            self._progress = Progress.now()
            self._runs = self._is_working = True
            self._refuse_lost()

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
            contribution = work.contribute()
        except BaseException as error:
            failures = self._failed(error, own_error)
        with self._changed:
            self._is_working = False
            self._progress = self._progress.moved(None, None)
        return Agreement.of(self.link.rank, contribution.offer), contribution.payload, failures

    def _failed(self, error: BaseException, own_error: list[BaseException]) -> FailuresBelow:
        """Keep what failed on this rank, and tell those that still work."""
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

    # Waiting, and what arrives meanwhile.

    def _await(self, peers: Sequence[int], kind: Kind) -> list[Message]:
        """The messages of ``peers``, once all have come.

        Raises:
            Problem: some will not.
            _Ended: another rank has ended the operation.
        """
        with self._changed:
            self._waiting_since = time.monotonic()
            while True:
                if self._account is not None:
                    raise _Ended
                now = time.monotonic()
                self._notice_standstill(now)
                if now < self._reads_until:
                    self._changed.wait(self._reads_until - now)
                    continue
                if self._problem is not None:
                    raise self._problem
                places = [(self._exchange, kind, peer) for peer in peers]
                self._absent = tuple(place[2] for place in places if place not in self._arrived)
                self._refuse_other_phases(places)
                if not self._absent:
                    break
                self._changed.wait(self._seconds_to_wait())
        messages = [self._arrived.pop(place) for place in places]
        # Later than by half, for those who count have begun to count before this rank has.
        if any(time.monotonic() - message.seconds > self.timeout_seconds / 2 for message in messages):
            self._refuse_if_given_up()
        return messages

    def _refuse_if_given_up(self) -> None:
        """Some have waited for this rank so long that they may have given up, and the word of it be on its way."""
        account = self._known_account()
        if account is not None:
            self.link.end_operations(account)
            raise _Ended

    def _refuse_other_phases(self, places: Sequence[tuple[int, Kind, int]]) -> None:
        own = phase_id(self.what)
        for place in places:
            if place in self._arrived and self._arrived[place].frame.phase != own:
                raise Problem("in different operations", is_elsewhere=True)

    def _refuse_lost(self) -> None:
        # Also one that is no neighbour in this exchange: it was before, and may have missed how that ended.
        for peer, (detail, damaged) in self._lost.items():
            if damaged:
                raise Problem.of_damage(self.link.rank, peer, detail)
            raise Problem.of_lost(peer, self._words_for_lost(peer, detail))

    def _seconds_to_wait(self) -> float:
        """How long nothing has to be looked at again.

        Raises:
            Problem: it is too late for that.
        """
        self._refuse_lost()
        now = time.monotonic()
        left = BEAT_SECONDS
        for peer in self._absent:
            connection = self.link.connection(peer)
            if connection.previous_loss is not None and not connection.is_open:
                left = min(left, self._began + RECONNECT_SECONDS - now)
                if left <= 0:
                    raise Problem.of_lost(peer, self._words_for_lost(peer, connection.previous_loss))
            silence, rank = self._silence_behind(peer, now)
            left = min(left, self.timeout_seconds - silence if rank == peer else left)
            # Those next to a silent rank say so first; the others wait for their word a little longer.
            patience = self.timeout_seconds if rank == peer else self.timeout_seconds + 2 * BEAT_SECONDS
            if silence >= patience:
                raise Problem.of_silent(rank, self.timeout_seconds, self._words_for_silent(rank, silence))
            if peer not in self._heard and self.link.is_elsewhere(peer, self.timeout_seconds / 2):
                raise Problem("in different operations", is_elsewhere=True)
        if self.deadline_seconds is not None:
            left = min(left, self._begun + self.deadline_seconds - now)
            if left <= 0:
                raise Problem.of_deadline(self._absent, self.deadline_seconds)
        return max(left, 0.001)

    def _silence_behind(self, peer: int, now: float) -> tuple[float, int]:
        """How long, and which rank, ``peer`` or one behind it, has given no sign of progress."""
        silence = now - max(self._waiting_since, self._heard.get(peer, 0.0))
        beat = self._beats.get(peer)
        if beat is None or beat.silent_rank < 0:
            return silence, peer
        behind = beat.silent_seconds + now - beat.arrived_seconds
        return (behind, beat.silent_rank) if behind > silence else (silence, peer)

    def deliver(self, message: Message) -> None:
        peer, frame, payload, _ = message
        with self._changed:
            if self._account is not None:
                return
            self._heard[peer] = time.monotonic()
            if frame.kind == Kind.BEAT:
                if frame.exchange == self._exchange:
                    self._beats[peer] = Beat.decode(frame.body)
                return
            if frame.kind in (Kind.UP, Kind.DOWN):
                self._arrived[frame.exchange, frame.kind, peer] = message
            elif frame.kind == Kind.STOP:
                is_news = frame.exchange not in self._stops and frame.exchange >= self._exchange
                if is_news:
                    self._stops[frame.exchange] = bytes(payload).decode(errors="replace")
                    self._pass_on(Kind.STOP, bytes(payload), but=peer)
                    self._interrupt_work()
            self._changed.notify_all()

    def lost(self, peer: int, detail: str, *, damaged: bool) -> None:
        with self._changed:
            self._lost[peer] = detail, damaged
            if self._is_working and not damaged:
                text = self._words_for_lost(peer, detail)
                self._stop_work(Problem.of_lost(peer, text), text)
            self._interrupt_work()
            self._changed.notify_all()

    # Beats.

    def beat(self) -> None:
        """Say to the neighbours that this rank is here, and how far the slowest behind it has come."""
        with self._changed:
            now = time.monotonic()
            if not self._runs:
                return
            self._notice_standstill(now)
            if self._is_working:
                self._watch_neighbours(now)
            if now - self._last_beat < min(BEAT_SECONDS, self.timeout_seconds / 4):
                return
            self._last_beat = now
            self._log_stragglers(now)
            for peer in self.tree.neighbours:
                connection = self.link.connection(peer)
                # Also to a parent that only it waits for: else that could not tell whether its own beats are heard.
                if connection.n_unacknowledged < _MAX_UNHEARD_BEATS:
                    body = self._beat_for(peer, now).encode()
                    self.link.send(peer, self._frame(Kind.BEAT, body=body))
                    if (
                        peer in self._absent
                        and now - max(self._waiting_since, self._heard.get(peer, 0.0)) > 2 * BEAT_SECONDS
                    ):
                        connection.ask_for_lost()

    def _log_stragglers(self, now: float) -> None:
        """On the root: say now and then for whom all are waiting."""
        waited = now - max(self._began, self._waiting_since)
        if self.tree.parent is None and not self._is_working and waited >= self._next_log_seconds:
            self._next_log_seconds *= 2
            self.stragglers.append(f"{self.what}: after {waited:.0f} seconds, {self._beat_for(None, now)}")
            logger.warning("%s", self.stragglers[-1])

    def _notice_standstill(self, now: float) -> None:
        """If this process stood still itself, by SIGSTOP say, what came meanwhile is read before anything is decided:
        the others may have given up on it."""
        if now - self._last_tick > self.timeout_seconds / 2:
            self._waiting_since, self._reads_until = now, now + 2 * BEAT_SECONDS
        self._last_tick = now

    def _watch_neighbours(self, now: float) -> None:
        """While this rank works, nobody waits here who would miss a rank that is silent."""
        for peer in self.tree.neighbours:
            silence = now - max(self._waiting_since, self._heard.get(peer, 0.0))
            if silence >= self.timeout_seconds:
                text = self._words_for_silent(peer, silence)
                self._stop_work(Problem.of_silent(peer, self.timeout_seconds, text), text)

    def _stop_work(self, problem: Problem, text: str) -> None:
        """Let the work of all ranks stop: the exchange will fail with ``problem``."""
        if self._problem is None:
            self._problem = problem
            self._stops.setdefault(self._exchange, text)
            self._pass_on(Kind.STOP, text.encode(errors="replace"), but=None)
            self._interrupt_work()

    def _beat_for(self, receiver: int | None, now: float) -> Beat:
        """What ``receiver`` is to know of this rank and of all others it hears of only from here."""
        is_busy = self._is_working or not self._absent
        own = [self._progress.beat(self.link.rank, now)] if is_busy else []
        behind = []
        children = [child for child in self.tree.children if (self._exchange, Kind.UP, child) not in self._arrived]
        for peer in self._absent if not self._is_working else children:
            if peer != receiver:
                silence, rank = self._silence_behind(peer, now)
                behind.append(Beat.of_silent(rank, silence, self._beats.get(peer), len(self.tree.places_below(peer))))
        return Beat.slowest([*own, *behind])

    # The end, out of step.

    def _conclude(self, problem: Problem) -> RobustCheckpointError:
        """End the operation on all ranks, and return what they are to raise."""
        with self._changed:
            if self._account is None and problem.missing:
                # Ranks die together. And those above a lost parent see more than this one: they have the first word.
                seconds = PARENT_LOST_SECONDS if self.tree.parent in problem.missing else TOGETHER_SECONDS
                self._changed.wait_for(lambda: self._account is not None, min(seconds, self.timeout_seconds))
        self.link.end_operations(self._known_account() or self._settled(conclude(problem, self)))
        return self._told()

    def _known_account(self) -> bytes | None:
        if self._account is None:
            with contextlib.suppress(StoreLost):
                return self.link.account_of(self.key)
        return self._account

    def _settled(self, ended: EndMessage) -> bytes:
        """The account that counts for all ranks, which may be another's."""
        if self._account is not None:
            return self._account  # it came while this rank asked the others
        keys = [OperationKey(*key) for key in ended.operations]
        try:
            account = self.link.settle(keys, wire.encode(ended))
            if self.key not in wire.decode(account, EndMessage).operations:  # that one is about others of them
                account = self.link.settle([self.key], wire.encode(ended))
        except StoreLost as lost:  # the ranks still tell each other
            account = wire.encode(without_store(ended, self, str(lost)))
        return account

    def end(self, account: bytes) -> None:
        """It is over on all ranks, for the reason that ``account`` gives. Called by the link."""
        with self._changed:
            self._account = account
            self._is_untold = True
            self._has_begun = False
            self._interrupt_work()
            self._changed.notify_all()

    def _interrupt_work(self) -> None:
        if self.interrupt is not None and self._is_working:
            threading.Thread(target=self.interrupt, name="robust_dcp: interrupt", daemon=True).start()

    def _told(self) -> RobustCheckpointError:
        self.link.await_heard()
        self._is_untold = False
        return as_told_to(self.link.rank, wire.decode(self._account or b"", EndMessage).error.to_error())

    # What other ranks are told when something has gone wrong.

    def whereabouts(self) -> str:
        """Where this rank is, for people."""
        return f"{self.what} of {self.name}" if self._runs else f"{self.name}, after {self._exchange} exchanges"

    def missing(self) -> dict[int, str]:
        """The neighbours that this rank has lost, or has not heard of for most of the timeout, and what it knows."""
        now, found = time.monotonic(), {}
        with self._changed:
            for peer in self.tree.neighbours:
                if peer in self._lost and not self._lost[peer][1]:
                    found[peer] = self._words_for_lost(peer, self._lost[peer][0])
            for peer in self._absent:
                silence, rank = self._silence_behind(peer, now)
                if peer not in found and rank == peer and silence > 0.7 * self.timeout_seconds:
                    found[peer] = self._words_for_silent(peer, silence)
        return found

    def _words_for_lost(self, peer: int, detail: str) -> str:
        if detail.startswith(STORE_IS_LOST):
            return f"{self._called(peer)} cannot be connected to"
        return f"{self._called(peer)} closed its connection: its process has ended, or was cut off ({detail})"

    def _words_for_silent(self, rank: int, seconds: float) -> str:
        if rank in self._beats:
            work = f"its own work for {self.what}"
            return f"{self._called(rank)} is still at {work}, which has not got on for {seconds:.1f} seconds"
        if rank in self._heard:
            return f"{self._called(rank)} has given no sign of life for {seconds:.1f} seconds"
        if rank in self.tree.neighbours:
            return f"{self._called(rank)} has not come"
        return f"rank {rank} has shown no progress for {seconds:.1f} seconds"

    def _called(self, rank: int) -> str:
        process = self.link.connection(rank).process if rank in self.tree.neighbours else ""
        return f"rank {rank} ({process})" if process else f"rank {rank}"


_MAX_UNHEARD_BEATS = 16


def is_interrupt(error: BaseException) -> bool:
    """Whether ``error`` is to be raised as itself where it came, whatever the other ranks raise."""
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
