"""One operation on one rank, such as a save or a load: a series of exchanges over the tree of ranks.

An exchange is the rank's own work, then a message up the tree, then one down, and an answer that it was heard:

    rank 1 (a child)                         rank 0 (its parent)
        beats, once a second      <------>       beats, once a second
        UP: what it contributes    ------>
                                  <------        DOWN: the result of all ranks
        HEARD                      ------>       returns
        returns

For each neighbour in the tree a thread reads what comes while an exchange runs. A rank returns when its children have
heard the result, so it may end at once. There are two ways to fail. If a rank's own work fails, the ranks stay in step:
all raise the same exception and can go on. If a rank is gone, silent, or in another operation, the operation ends on
all of them, with the verdict on which the ranks agree (:mod:`~robust_dcp.comm.ending`). If only the connections were
dropped, because of another operation, the ranks connect again and send again what the others may not have got.

What a payload means is known to the channel only.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import struct
import threading
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from robust_dcp.comm import patience, wire
from robust_dcp.comm.beats import Beat, Progress, Stragglers
from robust_dcp.comm.combine import Agreement, Offer
from robust_dcp.comm.connections import CONNECTING_FAILED, Broken, Connections, Payload
from robust_dcp.comm.ending import as_told_to
from robust_dcp.comm.failures import EndMessage, ErrorMessage, FailuresBelow, Problem, Stopped
from robust_dcp.comm.frames import BODY_NBYTES, FRAME_NBYTES, Frame, FrameError, Kind, Status, phase_id
from robust_dcp.comm.link import Link, OperationKey
from robust_dcp.comm.neighbours import Neighbours
from robust_dcp.comm.stats import Costs, PhaseStats
from robust_dcp.comm.tree import Tree
from robust_dcp.errors import RobustCheckpointError

__all__ = ["Contribution", "Operation", "Result", "Work"]

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Result:
    """How an exchange ended for all ranks. ``payload`` is the root's reply, or the error if ``status`` is not OK."""

    status: Status
    agreement: Agreement
    payload: Payload


class Message(NamedTuple):
    """What ``peer`` sent, and when it arrived (``time.monotonic()``)."""

    peer: int
    frame: Frame
    payload: Payload
    seconds: float


class Where(msgspec.Struct, array_like=True, frozen=True):
    """Where a rank waits for others: the generation of connections, the operation, its exchange, and what that is."""

    generation: int
    operation: int
    occurrence: int
    exchange: int
    what: str


class _Ended(Exception):
    """The operation has ended on all ranks."""


class _Exchange:
    """The state of one exchange, guarded by its operation's lock.

    Attributes:
        number: how many exchanges of the operation there were before.
        arrived: the messages that count, by the rank that sent them.
        done: the neighbours from which nothing more comes.
        open: the connections to the neighbours that are connected.
        closed: the neighbours to which nothing more may be sent.
        sent: for each neighbour what it has to get, so that it can be sent again.
        announced: the neighbours that find in the store where this rank listens.
        damaged: the neighbours that have been asked to send something again.
        kept: what gloo is sending. It must not be freed before it has arrived.
    """

    def __init__(self, number: int, what: str, tree: Tree, link: Link) -> None:
        self.number = number
        self.what = what
        self.phase_id = phase_id(what)
        self.tree = tree
        self.neighbours = Neighbours(what, tree, link.process_of, link.gone)
        self.arrived: dict[tuple[int, Kind], Message] = {}
        self.done: set[int] = set()
        self.open: dict[int, Connections] = {}
        self.closed: set[int] = set()
        self.sent: dict[int, list[tuple[Frame, Payload]]] = defaultdict(list)
        self.announced: set[int] = set()
        self.damaged: set[int] = set()
        self.kept: list[Any] = []
        self.failure: str | None = None
        self.problem: Problem | None = None
        self.is_working = True

    def absent(self, peers: Sequence[int], kind: Kind) -> tuple[int, ...]:
        """Those of ``peers`` whose message has not come."""
        return tuple(peer for peer in peers if (peer, kind) not in self.arrived)


class Operation:
    """The exchanges of one caller with all ranks of a group. After an end out of step, the next exchange starts anew.

    Args:
        link: the link of the group.
        name: what the operation does, for example ``"save /ckpt/step_3"``. It is the same on all ranks.
        timeout_seconds: how long a rank may show no sign of progress.
        deadline_seconds: how long the whole operation may take; ``None`` for no limit.

    Attributes:
        key: identifies it among all operations of the group.
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
        self._end_message: bytes | None = None
        self._is_untold = False  # whether the caller has not seen the end yet
        self._has_begun = False
        self._n_exchanges = 0
        self._begun_seconds = time.monotonic()
        self._last_beat = 0.0
        self._exchange: _Exchange | None = None  # the one that runs
        self._last: _Exchange | None = None  # the latest that has ended well
        self._heard: set[int] = set()  # the ranks that have come to this operation
        self._early: dict[int, Message] = {}  # what neighbours have sent for the next exchange
        self._raised: BaseException | None = None
        self._progress = Progress.now()
        self._cost = PhaseStats()
        self._own_error: BaseException | None = None

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
            self._cost, self._own_error = PhaseStats(exchanges=1), None
            try:
                exchange = self._start(verb, phase, root)
                contribution, failures = self._do_own_work(exchange, work)
                began = time.monotonic()
                try:
                    result = self._result_of_all(exchange, *self._join_children(exchange, work, contribution, failures))
                    self._pass_down(exchange, work, result)
                finally:
                    self._cost.seconds = time.monotonic() - began
                with self._changed:
                    self._n_exchanges += 1
                    self._last = exchange
            except _Ended:
                error = self._error()
            except BaseException as interrupt:
                if self._exchange is not None:
                    self._conclude(Problem.of_leaving(self.link.rank, interrupt))
                raise
            else:
                if result.status == Status.OK:
                    return result.agreement, result.payload
                error = wire.decode(result.payload, ErrorMessage).to_error()
            finally:
                with self._changed:
                    if self._exchange is not None:
                        self._exchange.kept.clear()  # it has arrived, or the connections are dropped
                    self._exchange = None
                _CLOCK.discard(self)
                self.costs.count(phase, self._cost)
            raise self._as_raised(error)

    def leave(self, error: BaseException) -> None:
        """End the operation because this rank failed between two exchanges. Tell the others unless they know."""
        if self._has_begun and error is not self._raised:
            self._conclude(Problem.of_leaving(self.link.rank, error))

    def _as_raised(self, error: RobustCheckpointError) -> BaseException:
        """The exception that this rank raises: ``error``, unless its own work was interrupted (Ctrl-C, say)."""
        if self._own_error is not None and is_interrupt(self._own_error):
            self._raised = self._own_error
        else:
            error.__cause__ = self._own_error
            self._raised = error
        return self._raised

    @property
    def n_exchanges(self) -> int:
        """How many exchanges have ended well."""
        return self._n_exchanges

    @property
    def tree(self) -> Tree:
        """The tree of the current or latest exchange."""
        exchange = self._exchange or self._last
        return exchange.tree if exchange is not None else self.link.tree(0)

    def stopped(self) -> str | None:
        """The failure that another rank announced for the current or next exchange; ``None`` if there is none."""
        if self._end_message is not None:
            return wire.decode(self._end_message, EndMessage).error.to_error().message
        exchange = self._exchange
        return None if exchange is None else exchange.failure

    def note_progress(self, done_nbytes: int | None = None, total_nbytes: int | None = None) -> None:
        """Record that this rank's work has advanced, and how far, if the caller knows."""
        self._progress = self._progress.moved(done_nbytes, total_nbytes)

    @contextlib.contextmanager
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

    # One exchange.

    def _start(self, verb: str, phase: str, root: int) -> _Exchange:
        self.what = f"{verb} {phase!r}" + (f" with coordinator {root}" if root else "")
        self.phase = phase
        if self._is_untold:
            raise _Ended  # the operation ended for all ranks while this one was between two exchanges
        if not self._has_begun:
            with self._changed:
                self._end_message, self._n_exchanges, self._last, self._early = None, 0, None, {}
                self._heard = set()
                self._begun_seconds = time.monotonic()
                self._has_begun = True
            self.link.begin(self.name, self)
            if self._is_untold:
                raise _Ended
        exchange = _Exchange(self._n_exchanges, self.what, self.link.tree(root), self.link)
        with self._changed:
            self.stragglers.begin_exchange()
            self._last_beat = time.monotonic()
            self._progress = Progress.now()
            early, self._early = self._early, {}
            self._exchange = exchange
            try:
                for message in early.values():
                    self._take(exchange, message)
            except Problem as problem:
                exchange.problem = problem
            new = [peer for peer in exchange.tree.neighbours if not self.link.process_of(peer)]
            self._read_from_all(exchange)
            # If this process ends in its own work, the others notice that nobody listens there any more.
            self._changed.wait_for(lambda: exchange.announced.issuperset(new), patience.ANNOUNCE_SECONDS)
        if self.link.size > 1:
            _CLOCK.add(self)
        return exchange

    def _do_own_work(self, exchange: _Exchange, work: Work) -> tuple[Contribution, FailuresBelow]:
        contribution, failures = Contribution(), FailuresBelow()
        fault, self.fault = self.fault, None
        try:
            if fault is not None:
                fault()
            contribution = work.contribute()
        except BaseException as error:
            failures = self._failed(exchange, error)
        with self._changed:
            exchange.is_working = False
            self._progress = self._progress.moved(None, None)
        return contribution, failures

    def _failed(self, exchange: _Exchange, error: BaseException) -> FailuresBelow:
        """Record a failure of this rank, and tell the ranks that are still working."""
        self._own_error = error
        rank = self.link.rank
        if isinstance(error, Stopped):
            return FailuresBelow.stopped_on(rank, str(error))
        line = str(error).partition("\n")[0][:500]
        with self._changed:
            self._announce_failure(exchange, f"rank {rank}: {type(error).__name__}: {line}")
        return FailuresBelow.on(rank, error)

    def _join_children(
        self, exchange: _Exchange, work: Work, contribution: Contribution, failures: FailuresBelow
    ) -> tuple[Agreement, Payload, FailuresBelow]:
        """Wait for the children, and join what comes from them with what this rank adds."""
        tree, payload = exchange.tree, contribution.payload
        arrived = self._receive(exchange, tree.children, Kind.UP)
        own = Agreement.of(tree.rank, contribution.offer)
        total = own.with_children([Agreement.decode(message.frame.body) for message in arrived])
        for message in arrived:
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
                failures = self._failed(exchange, error)
        return total, payload, failures

    def _result_of_all(
        self, exchange: _Exchange, total: Agreement, payload: Payload, failures: FailuresBelow
    ) -> Result:
        """The result, from the parent. On the root it is made here."""
        status, parent = failures.status, exchange.tree.parent
        if parent is not None:
            up = payload if status == Status.OK else wire.encode(failures)
            self._send(exchange, parent, Frame(Kind.UP, status=status, body=total.encode()), up)
            (reply,) = self._receive(exchange, (parent,), Kind.DOWN)
            return Result(reply.frame.status, Agreement.decode(reply.frame.body), reply.payload)
        if status != Status.OK:
            payload = wire.encode(ErrorMessage.of(failures.joint_error(self.phase)))
        return Result(status, total, payload)

    def _pass_down(self, exchange: _Exchange, work: Work, result: Result) -> None:
        """Send the result to the children, and wait until they have heard it. A child that is lost now is a matter of
        the next exchange, because the result stands."""
        children = exchange.tree.children
        for child in reversed(children):
            share = result.payload
            if result.status == Status.OK and share:
                share = work.share(share, child)
            self._send(exchange, child, Frame(Kind.DOWN, status=result.status, body=result.agreement.encode()), share)
        with self._changed:
            exchange.neighbours.absent = children
            exchange.neighbours.waiting_since = time.monotonic()
            generation = self.link.generation
            until = time.monotonic() + self.timeout_seconds
            while self._end_message is None and (absent := self._not_heard_of(exchange, children)):
                if generation != self.link.generation:  # those that have not got the result connect again soon
                    generation = self.link.generation
                    until = min(until, time.monotonic() + patience.RECONNECT_SECONDS)
                if time.monotonic() > until:
                    break
                exchange.neighbours.absent = absent
                self._changed.wait(min(patience.BEAT_SECONDS, max(0.001, until - time.monotonic())))
            if self._end_message is not None:
                raise _Ended  # the others had given up on this rank before it sent the result
            silent = generation == self.link.generation and bool(absent)
        if silent:  # its thread must not read what belongs to the next exchange
            peer = absent[0]
            words = exchange.neighbours.words_for_silent(peer, self.timeout_seconds)
            self.link.break_up(generation, Problem.of_lost({peer: words}, may_return=True), self)

    def _not_heard_of(self, exchange: _Exchange, children: Sequence[int]) -> tuple[int, ...]:
        """The children that have not said that they have heard the result, and may still say so."""
        return tuple(peer for peer in exchange.absent(children, Kind.HEARD) if peer not in self.link.gone)

    # Sending.

    def _send(self, exchange: _Exchange, peer: int, frame: Frame, payload: Payload) -> None:
        """Send a message that ``peer`` has to get, now or as soon as it is connected."""
        with self._changed:
            exchange.sent[peer].append((frame, payload))
            self._post(exchange, peer, frame, payload)
            if frame.kind == Kind.DOWN:
                exchange.closed.add(peer)
        self._cost.sent(FRAME_NBYTES, payload)

    def _post(
        self, exchange: _Exchange, peer: int, frame: Frame, payload: Payload = b"", *, for_good: bool = False
    ) -> Any:
        """Start to send. Called with the lock.

        Args:
            for_good: the message may never be read. It is kept as long as the connections.
        """
        connections = exchange.open.get(peer)
        if connections is None:
            return None
        tag = connections.new_tag() if len(payload) else 0
        frame = frame._replace(
            secret=self.link.secret,
            operation=self.key.operation,
            occurrence=self.key.occurrence,
            exchange=exchange.number,
            phase=exchange.phase_id,
            payload_nbytes=len(payload),
            payload_crc32=zlib.crc32(payload),
            payload_tag=tag,
        )
        with contextlib.suppress(Broken):  # the thread that reads finds the same
            kept = connections.kept if for_good else exchange.kept
            kept.append(connections.send(peer, self._tag, frame.encode()))
            sending = kept[-1]
            if len(payload):
                kept.append(connections.send(peer, tag, payload))
            return sending
        return None

    @property
    def _tag(self) -> int:
        """The gloo tag of all frames of this operation."""
        return (self.key.operation ^ self.key.occurrence * 0x9E3779B1) & 0x3FFFFFFF

    def _announce_failure(self, exchange: _Exchange, text: str, but: int | None = None) -> None:
        for peer in exchange.tree.neighbours:
            if peer != but and peer not in exchange.closed:
                stop = Frame(Kind.STOP), text.encode(errors="replace")
                exchange.sent[peer].append(stop)
                self._post(exchange, peer, *stop)

    def say_gone(self, missing: Sequence[int]) -> None:
        """Tell the neighbours that the connections are dropped, and which ranks are missing.

        The store says more. But it may be lost too, and a forked child may hold the connections open.
        """
        shown = sorted(missing)[: BODY_NBYTES // 4 - 1]
        gone = Frame(Kind.GONE, body=struct.pack(f"<{1 + len(shown)}I", len(shown), *shown))
        with self._changed:
            exchange = self._exchange
            if exchange is None and self._last is not None:  # the others may have begun the next one
                exchange = _Exchange(self._n_exchanges, "", self._last.tree, self.link)
                exchange.open = self._last.open
            for peer in exchange.tree.neighbours if exchange is not None else ():
                if exchange is not None and peer not in exchange.closed:
                    self._post(exchange, peer, gone, for_good=True)

    # Reading.

    def _read_from_all(self, exchange: _Exchange) -> None:
        for peer in exchange.tree.neighbours:
            if peer not in exchange.done:
                thread = threading.Thread(
                    target=self._read, args=(exchange, peer), name=f"robust_dcp: from rank {peer}", daemon=True
                )
                self.link.threads.add(thread)
                thread.start()

    def _read(self, exchange: _Exchange, peer: int) -> None:
        """Take what ``peer`` sends in this exchange. A thread of its own runs this."""
        generation = self.link.generation
        connections: Connections | None = None
        try:
            generation, connections = self.link.connect(
                peer, lambda: self._exchange is not exchange, lambda: self._note_announced(exchange, peer)
            )
            with self._changed:
                is_old = self._exchange is not exchange or generation != self.link.generation
                if is_old or exchange.open.get(peer) is connections:  # then another thread reads from there already
                    return
                exchange.open[peer] = connections
                if exchange.number == 0 and peer not in exchange.closed:  # so that the others know that this rank came
                    self._post(exchange, peer, self._beat_frame(exchange, peer, time.monotonic()))
                for frame, payload in exchange.sent[peer]:
                    self._post(exchange, peer, frame, payload, for_good=True)
            while not self._read_one(exchange, peer, connections):
                pass
        except Problem as problem:
            self.link.break_up(generation, problem, self)
        except RobustCheckpointError as error:
            self.link.break_up(generation, Problem.of_leaving(self.link.rank, error), self)
        except Broken as error:
            self._lose(exchange, peer, generation, connections, str(error))
        except Exception as error:
            logger.exception("reading from rank %d fails", peer)
            self._lose(exchange, peer, generation, connections, f"{type(error).__name__}: {error}")

    def _note_announced(self, exchange: _Exchange, peer: int) -> None:
        with self._changed:
            exchange.announced.add(peer)
            self._changed.notify_all()

    def _read_one(self, exchange: _Exchange, peer: int, connections: Connections) -> bool:
        """Take the next message. Return whether it was the last one in this exchange.

        Raises:
            Broken: nothing more comes.
            Problem: what came was damaged for the second time, or the ranks are in different operations.
        """
        payload: Payload = b""
        try:
            frame = Frame.decode(bytes(connections.receive(peer, self._tag, FRAME_NBYTES)), self.link.secret)
            is_old = frame.exchange < exchange.number or (frame.exchange, frame.kind) in self._have(exchange, peer)
            if frame.payload_nbytes and not is_old:  # the payload of a repeated message may never be sent
                payload = connections.receive(peer, frame.payload_tag, frame.payload_nbytes)
                found = zlib.crc32(payload)
                if found != frame.payload_crc32:
                    raise FrameError(
                        f"a payload of {frame.payload_nbytes} bytes arrived damaged: its CRC-32 is {found:#010x}, "
                        f"announced was {frame.payload_crc32:#010x}"
                    )
        except FrameError as error:
            text = str(error) if str(error).startswith("a payload") else f"a frame arrived damaged: {error}"
            return self._ask_again(exchange, peer, text)
        if frame.kind == Kind.DOWN and frame.exchange == exchange.number:
            self._answer_heard(exchange, peer, connections)
        message = Message(peer, frame, payload, time.monotonic())
        with self._changed:
            if self._exchange is not exchange or self._end_message is not None:
                return True
            try:
                return self._take(exchange, message)
            finally:
                self._changed.notify_all()

    def _answer_heard(self, exchange: _Exchange, peer: int, connections: Connections) -> None:
        """Tell ``peer`` that its result has come. This is sent before the caller knows the result, and may end."""
        with self._changed:
            heard = self._post(exchange, peer, Frame(Kind.HEARD))
            exchange.closed.add(peer)
        if heard is not None:
            with contextlib.suppress(Broken):
                connections.await_sent(heard, self.timeout_seconds)

    def _have(self, exchange: _Exchange, peer: int) -> list[tuple[int, Kind]]:
        """The messages that have come already, so that a repeated one is not read again."""
        return [(exchange.number, kind) for other, kind in exchange.arrived if other == peer]

    def _take(self, exchange: _Exchange, message: Message) -> bool:
        """Note a message. Return whether nothing more comes from its sender in this exchange. Called with the lock."""
        peer, frame = message.peer, message.frame
        if frame.operation != self.key.operation or frame.occurrence != self.key.occurrence:
            return False
        if frame.exchange < exchange.number:
            last = self._last
            if frame.kind == Kind.UP and last is not None and frame.exchange == last.number:
                # It did not get the result of the exchange before, because the connections were dropped.
                self._repeat(exchange, last, peer)
            return False
        if frame.exchange > exchange.number:  # so it has heard the result of this one
            self._early[peer] = message
            exchange.arrived[peer, Kind.HEARD] = message
            exchange.done.add(peer)
            return True
        self._heard.add(peer)
        exchange.neighbours.note_heard(peer, Beat.decode(frame.body) if frame.kind == Kind.BEAT else None)
        if frame.kind == Kind.GONE:
            (n_missing,) = struct.unpack_from("<I", frame.body)
            missing = struct.unpack_from(f"<{n_missing}I", frame.body, 4)
            if not missing:
                raise Broken("it dropped its connections")
            words = {rank: exchange.neighbours.words_for_lost(rank, f"rank {peer} says so") for rank in missing}
            raise Problem.of_lost(words)
        if frame.phase != exchange.phase_id:
            raise Problem("in different operations", is_elsewhere=True)
        if frame.kind == Kind.AGAIN:
            self._repeat(exchange, exchange, peer)
        elif frame.kind == Kind.STOP:
            if exchange.failure is None:
                exchange.failure = bytes(message.payload).decode(errors="replace")
                self._announce_failure(exchange, exchange.failure, but=peer)
                self._interrupt_work(exchange)
        elif frame.kind in (Kind.UP, Kind.DOWN, Kind.HEARD):
            exchange.arrived.setdefault((peer, frame.kind), message)
            if frame.kind != Kind.UP:
                exchange.done.add(peer)
                return True
        return False

    def _repeat(self, exchange: _Exchange, of: _Exchange, peer: int) -> None:
        """Send what ``peer`` has to get in an exchange again. Called with the lock."""
        again, of.sent[peer] = of.sent[peer], [each for each in of.sent[peer] if each[0].kind != Kind.AGAIN]
        of.open = exchange.open
        for frame, payload in again:
            self._post(of, peer, frame, payload, for_good=True)

    def _ask_again(self, exchange: _Exchange, peer: int, what: str) -> bool:
        with self._changed:
            if self._exchange is not exchange or self._end_message is not None:
                return True
            if peer in exchange.closed:  # it says that it has heard the result, or asks for the result again
                self._repeat(exchange, exchange, peer)
                exchange.arrived[peer, Kind.HEARD] = Message(peer, Frame(Kind.HEARD), b"", time.monotonic())
                exchange.done.add(peer)
                self._changed.notify_all()
                return True
            if peer in exchange.damaged:
                raise Problem.of_damage(self.link.rank, peer, f"twice: {what}")
            exchange.damaged.add(peer)
            self._cost.repeats += 1
            logger.info("asking rank %d again: %s", peer, what)
            again = Frame(Kind.AGAIN)
            exchange.sent[peer].append((again, b""))
            self._post(exchange, peer, again)
        return False

    def _lose(
        self, exchange: _Exchange, peer: int, generation: int, connections: Connections | None, detail: str
    ) -> None:
        """The connection to ``peer`` broke, or could not be made."""
        with self._changed:
            if self._exchange is not exchange or peer in exchange.done or generation != self.link.generation:
                return
            neighbours = exchange.neighbours
            neighbours.seconds_to_catch_up(time.monotonic(), self.timeout_seconds)
            is_closed_there = connections is not None and not connections.is_dropped
            may_return = not is_closed_there or peer not in self._heard or peer in exchange.closed
            words = neighbours.words_for_lost(peer, detail)
            problem = Problem.of_lost({peer: words}, may_return=may_return)
            if connections is not None and is_closed_there:
                connections.closed.add(peer)
                if not may_return:
                    connections.lost.update(problem.missing)
            elif detail.startswith(CONNECTING_FAILED):
                self.link.gone[peer] = detail
            if neighbours.stood_still_seconds > self.timeout_seconds / 2:
                rank, seconds = self.link.rank, neighbours.stood_still_seconds
                problem = Problem(
                    f"did not finish: no progress for {self.timeout_seconds:g} seconds",
                    missing={rank: f"rank {rank} stood still for {seconds:.1f} seconds"},
                )
        self.link.break_up(generation, problem, self)

    def resume(self) -> None:
        """Go on over new connections. The link calls this."""
        with self._changed:
            exchange = self._exchange
            if exchange is not None and self._end_message is None:
                exchange.neighbours.count_from_now()
                self._read_from_all(exchange)
                self._changed.notify_all()

    # Waiting.

    def _receive(self, exchange: _Exchange, peers: Sequence[int], kind: Kind) -> list[Message]:
        """Wait for the messages of all ``peers``, and return them.

        Raises:
            _Ended: the operation has ended on all ranks.
        """
        exchange.neighbours.waiting_since = time.monotonic()
        look_seconds = min(patience.ELSEWHERE_SECONDS, self.timeout_seconds / 2)
        says_where = -1  # in which generation of connections
        try:
            while True:
                generation = self.link.generation
                try:
                    with self._changed:
                        if self._wait(exchange, peers, kind):
                            break
                        waited = time.monotonic() - exchange.neighbours.waiting_since
                        unheard = exchange.neighbours.unheard
                    if unheard and waited > look_seconds / 2:
                        where = Where(generation, *self.key, exchange.number, self.what)
                        if says_where != generation:
                            says_where = generation
                            self.link.say_waiting(wire.encode(where))
                        elif waited > look_seconds and any(self._is_elsewhere(peer, where) for peer in unheard):
                            raise Problem("in different operations", is_elsewhere=True)
                except Problem as problem:
                    self.link.break_up(generation, problem, self)
        finally:
            if says_where >= 0:
                self.link.say_waiting(b"")
        with self._changed:
            messages = [exchange.arrived[peer, kind] for peer in peers]
        for message in messages:
            self._cost.received(message.payload)
        return messages

    def _wait(self, exchange: _Exchange, peers: Sequence[int], kind: Kind) -> bool:
        """Wait a while. Return whether the messages of all ``peers`` have come. Called with the lock.

        Raises:
            Problem: some message will not come.
            _Ended: the operation has ended on all ranks.
        """
        if self._end_message is not None:
            raise _Ended
        neighbours = exchange.neighbours
        catching_up = neighbours.seconds_to_catch_up(time.monotonic(), self.timeout_seconds)
        if catching_up:
            self._changed.wait(catching_up)
            return False
        neighbours.absent = exchange.absent(peers, kind)
        if not neighbours.absent:
            return True
        if exchange.problem is not None:
            problem, exchange.problem = exchange.problem, None
            raise problem
        self._changed.wait(min(neighbours.seconds_to_wait(self.timeout_seconds), self._seconds_to_deadline(neighbours)))
        return False

    def _is_elsewhere(self, peer: int, own: Where) -> bool:
        """Whether ``peer`` waits in another operation than ``own``, or in another exchange of this one."""
        said = self.link.where_waits(peer)
        where = wire.decode(said, Where) if said else own
        return where.generation == own.generation and where != own

    def _seconds_to_deadline(self, neighbours: Neighbours) -> float:
        """How much of ``deadline_seconds`` is left.

        Raises:
            Problem: nothing is left.
        """
        if self.deadline_seconds is None:
            return math.inf
        left = self._begun_seconds + self.deadline_seconds - time.monotonic()
        if left <= 0:
            raise Problem.of_deadline(neighbours.late(), self.deadline_seconds)
        return left

    # Beats.

    def beat(self) -> None:
        """Tell the neighbours that this rank is alive, and how far the slowest rank behind it has come."""
        with self._changed:
            now, exchange = time.monotonic(), self._exchange
            if exchange is None or self._end_message is not None:
                return
            exchange.neighbours.seconds_to_catch_up(now, self.timeout_seconds)
            if exchange.is_working and exchange.problem is None:
                try:
                    exchange.neighbours.refuse_silent(now, self.timeout_seconds)
                except Problem as problem:
                    exchange.problem = problem
                    exchange.failure = "; ".join(problem.missing.values())
                    self._announce_failure(exchange, exchange.failure)
                    self._interrupt_work(exchange)
            if now - self._last_beat < min(patience.BEAT_SECONDS, self.timeout_seconds / 4):
                return
            self._last_beat = now
            if exchange.tree.parent is None and not exchange.is_working:
                waited = now - exchange.neighbours.waiting_since
                self.stragglers.note_wait(self.what, waited, lambda: self._beat_for(exchange, None, now))
            for peer in exchange.tree.neighbours:
                if peer not in exchange.closed:
                    self._post(exchange, peer, self._beat_frame(exchange, peer, now))

    def _beat_frame(self, exchange: _Exchange, peer: int, now: float) -> Frame:
        return Frame(Kind.BEAT, body=self._beat_for(exchange, peer, now).encode())

    def _beat_for(self, exchange: _Exchange, receiver: int | None, now: float) -> Beat:
        neighbours = exchange.neighbours
        absent = exchange.absent(exchange.tree.children, Kind.UP) if exchange.is_working else neighbours.absent
        waits = not exchange.is_working and len(absent) > 0
        return neighbours.beat_for(receiver, absent, None if waits else self._progress, now)

    # Ending out of step.

    def _conclude(self, problem: Problem) -> None:
        """End the operation on all ranks, whatever else ends its connections meanwhile."""
        while self._end_message is None:
            self.link.break_up(self.link.generation, problem, self)
        self._is_untold = False

    def end(self, end_message: bytes) -> None:
        """The operation is over on all ranks; ``end_message`` says why. The link calls this."""
        with self._changed:
            self._end_message = end_message
            self._is_untold = True
            self._has_begun = False
            if self._exchange is not None:
                self._interrupt_work(self._exchange)
            self._changed.notify_all()

    def _error(self) -> RobustCheckpointError:
        """The exception that this rank raises for the end of the operation."""
        self._is_untold = False
        return as_told_to(self.link.rank, wire.decode(self._end_message or b"", EndMessage).error.to_error())

    def _interrupt_work(self, exchange: _Exchange) -> None:
        if self.interrupt is not None and exchange.is_working:
            threading.Thread(target=self.interrupt, name="robust_dcp: interrupt", daemon=True).start()

    # What this rank tells others after a failure.

    def whereabouts(self) -> str:
        """Describe where this rank is, for people."""
        if self._exchange is not None:
            return f"{self.what} of {self.name}"
        return f"{self.name}, after {self._n_exchanges} exchanges"

    def missing(self) -> dict[int, str]:
        """The neighbours that this rank did not hear for most of the timeout, and what it knows of each."""
        with self._changed:
            exchange = self._exchange
            return {} if exchange is None else exchange.neighbours.missing(self.timeout_seconds)


def is_interrupt(error: BaseException) -> bool:
    """Whether this rank raises ``error`` itself, even if the other ranks raise something else."""
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)


class _Clock:
    """One thread that sends the beats of all exchanges of this process. It ends when there are none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: weakref.WeakSet[Operation] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, operation: Operation) -> None:
        with self._lock:
            self._operations.add(operation)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="robust_dcp: beats", daemon=True)
                self._thread.start()

    def discard(self, operation: Operation) -> None:
        with self._lock:
            self._operations.discard(operation)

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(patience.TICK_SECONDS)
            if self._is_closed:
                return
            with self._lock:
                operations = list(self._operations)
                if operations:
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > 10 * patience.TICK_SECONDS:
                    self._thread = None
                    return
            for operation in operations:
                self._beat(operation)
            del operations

    def _beat(self, operation: Operation) -> None:
        try:
            operation.beat()
        except Exception:  # the beats of other operations go on, and this one may succeed next time
            logger.exception("a beat of %s fails", operation.name)

    def close(self) -> None:
        """At the end of the process, before Python ends the thread in the midst of gloo."""
        self._is_closed = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(patience.EXIT_SECONDS)

    def begin_anew(self) -> None:
        """In a forked child, where the thread does not exist."""
        self.__init__()  # type: ignore[misc]


_CLOCK = _Clock()
atexit.register(_CLOCK.close)
os.register_at_fork(after_in_child=_CLOCK.begin_anew)
