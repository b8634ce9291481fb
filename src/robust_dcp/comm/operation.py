"""One operation on one rank, such as a save or a load: a series of exchanges over the tree of ranks.

An exchange is the rank's own work, then a message up the tree, then one down, and an answer that it was heard:

    rank 1 (a child)                         rank 0 (its parent)
        beats, once a second      <------>       beats, once a second
        UP: what it contributes    ------>
                                  <------        DOWN: the result of all ranks
        HEARD                      ------>       returns
        returns

What comes from each neighbour in the tree is read while an exchange runs. Each exchange has a gloo tag of its own, so
nobody reads what belongs to the next one. A rank returns when its children have heard the result, so it may end at
once.

There are two ways to fail. If a rank's own work fails, the ranks stay in step: all raise the same exception and can go
on. If a rank is gone, silent, or in another operation, the operation ends on all of them, with the verdict on which the
ranks agree (:mod:`~robust_dcp.comm.endings`). If only the connections were dropped, because of another operation or
because something arrived damaged, the ranks connect again. Then each sends again what it has sent in this exchange and
in the one before, and whoever lacks some of it reads it.

What a payload means is known to the channel only. The operation reads no clock and does nothing that waits: see
:mod:`~robust_dcp.comm.waits`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import struct
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import msgspec
from isal import isal_zlib

from robust_dcp.comm import patience
from robust_dcp.comm.combine import Agreement, Offer
from robust_dcp.comm.connections import CONNECTING_FAILED, Broken, Connections, Moving
from robust_dcp.comm.endings import (
    EndMessage,
    ErrorMessage,
    FailuresBelow,
    OperationKey,
    Problem,
    Stopped,
    Waiting,
    as_text,
    as_told_to,
    missing_ranks_error,
)
from robust_dcp.comm.exchange import Beat, Exchange, Message
from robust_dcp.comm.frames import BODY_NBYTES, FRAME_NBYTES, Frame, FrameError, Kind
from robust_dcp.comm.link import ExchangeStats, Link
from robust_dcp.comm.messages import Payload, decode, encode
from robust_dcp.comm.tree import Tree
from robust_dcp.comm.waits import Call, Finish, Steps, Until
from robust_dcp.errors import ExchangeError, RobustCheckpointError
from robust_dcp.events import Slowest

logger = logging.getLogger(__name__)

_MISSED_AFTER = 0.7
"""A rank that was silent for this part of the timeout is reported as missing when others ask."""

_LEAVES = 0xFFFFFFFF
_DROPPED = "it dropped its connections"

_MANY_BEATS = 100
"""So many beats to a neighbour are kept in one exchange before this rank makes sure that they have left."""

_HAS_COME = Frame(Kind.BEAT, body=Beat().encode())
"""The first beat to a neighbour. It says that the rank has come, and the next one says more."""


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

    Work that waits for other ranks returns its steps from ``produce``; what these return is what it has produced.
    """

    produce: Callable[[], Any]
    merge: Callable[[Any, list[Payload]], Payload] | None = None
    reply: Callable[[Any, list[Payload]], Payload | None] | None = None
    offer: Callable[[Any], Offer] | None = None
    share: Callable[[Payload, int], Payload] | None = None
    interrupt: Callable[[], Steps[None]] | None = None


class _Ended(Exception):
    """The operation has ended on all ranks, as its argument says: an :class:`EndMessage`."""


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
        self.name = as_text(name)  # a path may be no UTF-8
        self.timeout_seconds = timeout_seconds
        self.deadline_seconds = math.inf if deadline_seconds is None else deadline_seconds
        self.what = self.phase = ""
        self.stragglers: list[str] = []
        self.n_exchanges = 0
        self.stats = ExchangeStats()
        self._is_busy = False
        self._end_message: EndMessage | None = None  # until the caller has seen the end
        self._has_begun = False
        self._until = math.inf
        self._last_beat = 0.0
        self._next_log_seconds = 0.0
        self._exchange: Exchange | None = None  # the one that runs
        self._last: Exchange | None = None  # the latest that has ended well
        self._heard: set[int] = set()  # the ranks that have come to this operation
        self._raised: BaseException | None = None
        self._own_error: BaseException | None = None

    # What the channel calls.

    def run(self, verb: str, phase: str, root: int, work: Work) -> Steps[tuple[Agreement, Any, Payload]]:
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
        if self._is_busy:
            raise RobustCheckpointError(
                f"{phase} was called within the work of another exchange of the same channel: "
                "finish that one first, or use a channel of another operation"
            )
        self._is_busy = True
        self._own_error = None
        for stats in (self.stats, self.link.stats):
            stats.exchanges += 1
        try:
            exchange = yield from self._start(verb, phase, root)
            exchange.interrupt = work.interrupt
            own, offer, failures = yield from self._work(exchange, work)
            exchange.is_working = False
            exchange.moved_seconds = self.link.now
            has_failed, agreement, payload = yield from self._go_up(exchange, work, own, offer, failures)
            yield from self._go_down(exchange, work, has_failed, agreement, payload)
            self.n_exchanges += 1
            self._last = exchange
            for neighbour in exchange.neighbours.values():  # who is behind may ask for the result, nobody for more
                neighbour.arrived = {kind: Message(each.frame) for kind, each in neighbour.arrived.items()}
                neighbour.sent = [each for each in neighbour.sent if not (neighbour.is_done and each.payload)]
            self.link.note_completed(self.key, self.n_exchanges)
        except GeneratorExit:  # nobody takes these steps any more
            raise
        except _Ended as ended:
            error = as_told_to(self.link.rank, ended.args[0].error.to_error())
            self._end_message = None
        except BaseException as interrupt:
            if self._exchange is not None:
                yield from self._conclude(Problem.of_leaving(self.link.rank, interrupt))
            raise
        else:
            if not has_failed:
                return agreement, own, payload
            error = decode(payload, ErrorMessage).to_error()
        finally:
            over, self._exchange = self._exchange, None
            if over is not None and not over.may_be_unread:
                for neighbour in over.neighbours.values():
                    if neighbour.connections is not None:
                        for key in (over, neighbour):
                            neighbour.connections.kept.pop(key, None)  # all of it has arrived
            self.link.loop.end_beats(self)
            self.link.loop.wake()  # who still connects for this exchange need not
            self._is_busy = False
        if isinstance(self._own_error, KeyboardInterrupt | SystemExit | GeneratorExit):
            self._raised = self._own_error  # this rank raises that, whatever the others raise
        else:
            error.__cause__, self._raised = self._own_error, error
        raise self._raised

    def leave(self, error: BaseException) -> Steps[None]:
        """End the operation because this rank failed between two exchanges. Tell the others unless they know."""
        if self._has_begun and error is not self._raised:
            yield from self._conclude(Problem.of_leaving(self.link.rank, error))

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
        if self.link.now >= self._until:  # nobody may be waiting for this rank, and notice that
            rank = self.link.rank
            problem = Problem.of_late({rank: f"rank {rank} is not done"}, self.deadline_seconds)
            raise missing_ranks_error(problem, self, self.link.size, ())

    def stop_if_given_up(self) -> Steps[None]:
        """Leave this rank's own work as :meth:`stop_if_announced` does, or if others may have given up on this rank.

        A process that was frozen (``SIGSTOP``, say) first reads what has come meanwhile. If the others heard nothing of
        it for the timeout, all neighbours have to be there still: they send beats.

        Raises:
            Stopped, ExchangeTimeout: let it leave the work.
        """
        exchange, beat_seconds = self._exchange, min(patience.BEAT_SECONDS, self.timeout_seconds / 4)
        if exchange is not None:
            while (left := exchange.catching_up_seconds(self.link.now)) and self._end_message is None:
                yield Until(self.link.now + left)
        self.stop_if_announced()
        if exchange is None or exchange.stood_still_seconds + beat_seconds < self.timeout_seconds:
            return
        lately = self.link.now - 1.5 * patience.BEAT_SECONDS  # what was sent before has been read long ago
        if any((exchange.neighbours[peer].heard_seconds or 0.0) < lately for peer in exchange.tree.neighbours):
            rank, seconds = self.link.rank, exchange.stood_still_seconds
            text = f"rank {rank} stood still for {seconds:.1f} seconds, and others have given up on it"
            problem = Problem.of_silent(rank, self.timeout_seconds, text)
            raise missing_ranks_error(problem, self, self.link.size, ())

    def note_progress(self, done_nbytes: int | None = None, total_nbytes: int | None = None) -> None:
        """Record that this rank's work has advanced, and how far, if the caller knows."""
        exchange = self._exchange
        if exchange is not None:
            exchange.moved_seconds = self.link.now
            exchange.done_nbytes = exchange.done_nbytes if done_nbytes is None else done_nbytes
            exchange.total_nbytes = exchange.total_nbytes if total_nbytes is None else total_nbytes

    def slowest(self) -> Slowest | None:
        """How far the slowest rank is that is still at work, as far as this one has heard."""
        exchange = self._exchange
        beat = Beat() if exchange is None else exchange.beat_for(None, self.link.now)
        if beat.slow_rank < 0:
            return None
        return Slowest(beat.slow_rank, beat.slow_done_nbytes, beat.slow_total_nbytes, beat.slow_seconds)

    def note_piece(self, peer: int) -> None:
        """A piece of what passes between this rank and ``peer`` in its own work has arrived, or has left."""
        self.note_progress()
        if self._exchange is not None:
            self._exchange.note_heard(peer, self.link.now)

    def note_waiting(self, is_waiting: bool) -> None:
        """Record whether this rank waits for others in its own work. Then it is not the one that does not get on."""
        self.note_progress()
        if self._exchange is not None:
            self._exchange.is_waiting = is_waiting

    def waits_in_vain(self) -> bool:
        """Whether this rank has waited for others in its own work for so long that one which is silent, or does not
        get on, would have been named."""
        exchange, limit = self._exchange, self.timeout_seconds + 3 * patience.BEAT_SECONDS
        return exchange is not None and exchange.is_waiting and self.link.now - exchange.moved_seconds > limit

    def announce(self, text: str, but: int | None = None) -> None:
        """Let all ranks leave their own work in this exchange. ``text`` says why; ``but`` has said so itself."""
        exchange = self._exchange
        if exchange is not None and exchange.failure is None:
            exchange.failure = text
            for peer in exchange.tree.neighbours:
                if peer != but and not exchange.neighbours[peer].is_closed:
                    self._send(exchange, peer, Frame(Kind.STOP), text.encode(errors="replace"))

    # One exchange.

    def _start(self, verb: str, phase: str, root: int) -> Steps[Exchange]:
        link = self.link
        self.what = f"{verb} {phase!r}" + (f" with coordinator {root}" if root else "")
        self.phase = phase
        if not self._has_begun and self._end_message is None:
            self.n_exchanges, self._last = 0, None
            self._heard = set()
            self._until = link.now + self.deadline_seconds
            link.begin(self.name, self)
            self._has_begun = self._end_message is None  # not before, or Ctrl-C would end what is not there
        if self._end_message is not None:
            raise _Ended(self._end_message)  # it ended while this rank was between two exchanges
        tree = Tree(link.rank, link.size, root)
        exchange = Exchange(
            self.n_exchanges, self.what, tree, self.timeout_seconds, link.gone, link.process_of, link.now
        )
        if self._last is not None:
            for peer, neighbour in self._last.neighbours.items():
                if neighbour.unanswered_seconds and peer in exchange.neighbours:
                    exchange.neighbours[peer].unanswered_seconds = neighbour.unanswered_seconds
        self._last_beat, self._next_log_seconds = link.now, patience.LOG_SECONDS
        self._exchange = exchange
        new = [exchange.neighbours[peer] for peer in tree.neighbours if not link.process_of(peer)]
        self._read_from_all(exchange)
        # If this process ends in its own work, the others notice that nobody listens there any more.
        until = link.now + patience.ANNOUNCE_SECONDS
        while self._has_begun and link.now < until and not all(each.is_announced for each in new):
            yield Until(until)
        if link.size > 1:
            link.loop.begin_beats(self)
        return exchange

    def _work(self, exchange: Exchange, work: Work) -> Steps[tuple[Any, Offer, FailuresBelow | None]]:
        """Do this rank's own work. Return what it has produced, its offer, and its failure."""
        own, error = yield Call(work.produce)
        if isinstance(own, Generator):  # work that waits for others
            try:
                own = yield from own
            except GeneratorExit:
                raise
            except BaseException as raised:
                error = raised
        made = own
        if error is None and work.offer is not None:
            made, error = yield Call(partial(work.offer, own))
        if error is not None:
            return own, Offer(), self._failed(error)
        return own, made if isinstance(made, Offer) else Offer(), None

    def _failed(self, error: BaseException) -> FailuresBelow:
        """Record a failure of this rank, and tell the ranks that are still working."""
        self._own_error = error
        rank = self.link.rank
        if not isinstance(error, Stopped):
            line = str(error).partition("\n")[0][:500]
            self.announce(f"rank {rank}: {type(error).__name__}: {line}")
        return FailuresBelow.on(rank, error)

    def _go_up(
        self, exchange: Exchange, work: Work, own: Any, offer: Offer, failures: FailuresBelow | None
    ) -> Steps[tuple[bool, Agreement, Payload]]:
        """Wait for the children, join what comes from them with what this rank adds, and pass it to the parent.

        Returns:
            The result of all ranks: whether some have failed, their agreement, and the root's reply, or the error.
        """
        parent = exchange.tree.parent
        payload: Payload | None = None
        children, below = list[Agreement](), list[Payload]()
        for message in (yield from self._receive(exchange, exchange.tree.children, Kind.UP)):
            children.append(Agreement.decode(message.frame.body))
            if message.frame.has_failed:
                of_child = decode(message.payload, FailuresBelow)
                failures = of_child if failures is None else failures.merged(of_child)
            elif message.payload:
                below.append(message.payload)
        total = Agreement.of(exchange.tree.rank, offer, children)
        make = work.reply if parent is None else work.merge
        if parent is None:
            self.note_progress()  # this rank may have waited for long before
        if failures is None and make is not None:
            payload, error = yield Call(partial(make, own, below))
            if error is not None:
                failures = self._failed(error)
        if failures is not None:
            payload = encode(failures if parent is not None else ErrorMessage.of(failures.joint_error(self.phase)))
        payload = payload or b""
        if parent is None:
            return failures is not None, total, payload
        up = Frame(Kind.UP, has_failed=failures is not None, body=total.encode())
        self._send(exchange, parent, up, payload)
        (reply,) = yield from self._receive(exchange, (parent,), Kind.DOWN)
        return reply.frame.has_failed, Agreement.decode(reply.frame.body), reply.payload

    def _go_down(
        self, exchange: Exchange, work: Work, has_failed: bool, agreement: Agreement, payload: Payload
    ) -> Steps[None]:
        """Send the result to the children, and wait until they have heard it. Once another rank has heard it the result
        stands. If the operation ends now, because a child is lost for example, that is a matter of the next exchange.

        It waits for half the timeout: others are in the next exchange, and hear nothing of this rank meanwhile."""
        link, children = self.link, exchange.tree.children
        for child in reversed(children):
            share = payload
            if work.share is not None and payload and not has_failed:
                share = (yield Call(partial(work.share, payload, child))).get()
            self._send(exchange, child, Frame(Kind.DOWN, has_failed=has_failed, body=agreement.encode()), share)
        exchange.absent = children
        exchange.waiting_since = link.now
        generation, until = link.generation, math.inf
        while self._end_message is None:
            now = link.now
            if generation != link.generation:  # those that have not got the result connect again soon
                generation = link.generation
                until = min(until, now + patience.RECONNECT_SECONDS)
            if exchange.catching_up_seconds(now) and until < math.inf:
                until = now + patience.RECONNECT_SECONDS  # this process stood still, and they may have done so as well
            lacking = exchange.lacking(children, Kind.HEARD)
            exchange.absent = tuple(
                peer
                for peer in lacking
                if peer not in link.gone and exchange.silence_of(peer, now) < self.timeout_seconds / 2
            )
            if not lacking or ((not exchange.absent or now > until) and not link.is_breaking):
                exchange.may_be_unread |= bool(lacking)
                for peer, neighbour in exchange.neighbours.items():
                    neighbour.unanswered_seconds = exchange.silence_of(peer, now) if peer in lacking else 0.0
                return
            yield Until(min(now + patience.BEAT_SECONDS, until) if now < until else now + patience.BEAT_SECONDS)
        exchange.may_be_unread = True
        if exchange.tree.parent is None and exchange.lacking(children, Kind.HEARD) == children:
            raise _Ended(self._end_message)  # the others had given up on this rank before it sent the result

    # Sending.

    def _send(self, exchange: Exchange, peer: int, frame: Frame, payload: Payload = b"") -> None:
        """Send a message that ``peer`` has to get, now or as soon as it is connected."""
        neighbour = exchange.neighbours[peer]
        neighbour.sent.append(Message(frame, payload))
        self._post(exchange, peer, frame, payload)
        if frame.kind == Kind.DOWN:
            neighbour.is_closed = True
        self.count_sent(len(payload))

    def count_sent(self, payload_nbytes: int) -> None:
        """Count a message of one frame and this many bytes."""
        for stats in (self.stats, self.link.stats):
            stats.messages_sent += 1 + bool(payload_nbytes)
            stats.header_nbytes_sent += FRAME_NBYTES
            stats.payload_nbytes_sent += payload_nbytes

    def _post(self, exchange: Exchange, peer: int, frame: Frame, payload: Payload = b"") -> Moving | None:
        """Start to send, if ``peer`` is connected."""
        neighbour = exchange.neighbours[peer]
        connections = neighbour.connections
        if connections is None:
            return None
        kept = connections.kept[neighbour if frame.kind == Kind.BEAT else exchange]
        if len(payload):
            crc32, tag = isal_zlib.crc32(payload), next(connections.tags)
            frame = frame._replace(payload_nbytes=len(payload), payload_crc32=crc32, payload_tag=tag)
        with contextlib.suppress(Broken):  # whoever reads finds the same
            stamped = self.stamped(frame, exchange).encode()
            moving: Moving = connections.start("send", peer, self.tag(exchange.number), stamped)
            kept.append(moving)
            if frame.kind == Kind.BEAT and len(kept) == _MANY_BEATS:
                self.link.loop.spawn(self._let_go(connections, kept))
            if len(payload):
                kept.append(connections.start("send", peer, frame.payload_tag, payload))
                if len(kept[-1].works) > 1:
                    self.link.loop.spawn(self._watch_leaving(exchange, peer, connections, kept[-1]))
            return moving
        return None

    def _let_go(self, connections: Connections, beats: list[Moving]) -> Steps[None]:
        """Wait until ``beats`` have left, and keep them no longer: a long exchange has thousands."""
        with contextlib.suppress(Broken):
            while len(beats) >= _MANY_BEATS:
                for moving in (sent := beats[:]):
                    yield Finish(connections, moving)
                del beats[: len(sent)]

    def _watch_leaving(self, exchange: Exchange, peer: int, connections: Connections, moving: Moving) -> Steps[None]:
        """Count each piece that leaves as a sign that ``peer`` is alive. gloo brings a beat of ``peer`` only once it
        has told it that we are ready for it, and on a slow link that waits behind the payload."""
        with contextlib.suppress(Broken):
            yield Finish(connections, moving, None, lambda: exchange.note_heard(peer, self.link.now))

    def stamped(self, frame: Frame, exchange: Exchange | None = None) -> Frame:
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

    def say_gone(self, connections: Connections, missing: Sequence[int] | None) -> None:
        """Tell all neighbours that ``connections`` are dropped, and which ranks are missing. ``None``: this one leaves.

        The store says more. But it may be lost too, and a forked child may hold the connections open.
        """
        shown = sorted(missing or ())[: BODY_NBYTES // 4 - 1]
        body = struct.pack(f"<{1 + len(shown)}I", _LEAVES if missing is None else len(shown), *shown)
        # Without an exchange the others may have begun the next one.
        number = self.n_exchanges if self._exchange is None else self._exchange.number
        gone = Frame(Kind.GONE, *self.key, number, body=body, secret=self.link.secret).encode()
        for peer in list(connections.peers):
            with contextlib.suppress(Broken):
                connections.kept[None].append(connections.start("send", peer, self.tag(number), gone))

    # Reading.

    def _read_from_all(self, exchange: Exchange) -> None:
        last = self._last
        # Whoever has not heard the last result gets it when it connects. Under another root it may be no neighbour now.
        behind = () if last is None else last.lacking(last.tree.children, Kind.HEARD)
        for peer in {*exchange.tree.neighbours, *behind}:
            if not exchange.neighbours[peer].is_done:
                self.link.loop.spawn(self._read(exchange, peer))

    def _read(self, exchange: Exchange, peer: int) -> Steps[None]:
        """Take what ``peer`` sends in this exchange."""
        neighbour = exchange.neighbours[peer]

        def note_announced() -> None:
            neighbour.is_announced = True
            self.link.loop.wake()

        generation, lost = self.link.generation, ""
        connections: Connections | None = None
        try:
            generation, connections = yield from self.link.connect(
                peer, lambda: self._exchange is not exchange, note_announced
            )
            is_old = self._exchange is not exchange or generation != self.link.generation
            if is_old or neighbour.connections is connections:  # then others read from there already
                return
            exchange.may_be_unread |= neighbour.connections is not None
            neighbour.connections = connections
            exchanges, last = [exchange], self._last
            if (last is None or peer not in last.neighbours) and not neighbour.is_closed:
                self._post(exchange, peer, _HAS_COME)
            if last is not None and last.neighbours[peer].connections is not connections:
                last.neighbours[peer].connections = connections
                exchanges.insert(0, last)
            for each in exchanges:  # all that it has to get, over the new connection
                for frame, payload in each.neighbours[peer].sent:
                    self._post(each, peer, frame, payload)
            while not (yield from self._read_one(exchange, peer, connections)):
                pass
        except Problem as problem:
            yield from self.link.break_up(generation, problem, self)
        except RobustCheckpointError as error:
            yield from self.link.break_up(generation, Problem.of_leaving(self.link.rank, error), self)
        except Broken as error:
            lost = str(error)
        except Exception as error:
            logger.exception("reading from rank %d fails", peer)
            lost = f"{type(error).__name__}: {error}"
        # The exception is gone by now: it would keep gloo's group alive.
        is_running = self._exchange is exchange and generation == self.link.generation
        if lost and is_running and not neighbour.is_done and peer in exchange.tree.neighbours:
            exchange.catching_up_seconds(self.link.now)
            yield from self.link.break_up(generation, self.problem_of_lost(peer, connections, lost), self)

    def _read_one(self, exchange: Exchange, peer: int, connections: Connections) -> Steps[bool]:
        """Take the next message. Return whether it was the last one in this exchange.

        Raises:
            Broken: nothing more comes.
            Problem: what came was damaged, or the ranks are in different operations.
        """
        link, neighbour = self.link, exchange.neighbours[peer]
        payload = bytearray()

        def note_piece() -> None:
            exchange.note_heard(peer, link.now)

        try:
            data = bytearray(FRAME_NBYTES)
            yield Finish(connections, connections.start("recv", peer, self.tag(exchange.number), data))
            frame = Frame.decode(bytes(data), link.secret)
            if frame.payload_nbytes:
                exchange.note_heard(peer, link.now, frame)
                payload = (yield Call(partial(bytearray, frame.payload_nbytes))).get()
                yield Finish(connections, connections.start("recv", peer, frame.payload_tag, payload), None, note_piece)
                crc32 = (yield Call(partial(isal_zlib.crc32, payload))).get()
                if crc32 != frame.payload_crc32:
                    raise FrameError(
                        f"a payload of {frame.payload_nbytes} bytes arrived damaged: its CRC-32 is {crc32:#010x}, "
                        f"announced was {frame.payload_crc32:#010x}"
                    )
        except FrameError as error:
            what = str(error) if str(error).startswith("a payload") else f"a frame arrived damaged: {error}"
            if neighbour.is_damaged:
                sent = f"what rank {peer} sent to rank {link.rank}"
                raise Problem(f"{sent} arrived damaged twice: {what}", damaged_by=peer) from None
            neighbour.is_damaged = True
            logger.info("rank %d has to send once more, over new connections: %s", peer, what)
            raise Problem.of_lost({peer: what}, may_return=True) from None
        if (frame.operation, frame.occurrence, frame.exchange) != (*self.key, exchange.number):
            return False
        if frame.kind == Kind.DOWN:
            if link.is_breaking or self._end_message is not None:
                raise Broken(_DROPPED)  # who answers has to return this result
            # Answer before the caller knows the result, and may end.
            neighbour.sent.append(Message(Frame(Kind.HEARD)))
            heard = self._post(exchange, peer, Frame(Kind.HEARD))
            neighbour.is_closed = True
            if heard is not None:
                with contextlib.suppress(Broken):
                    yield Finish(connections, heard, self.timeout_seconds)
        if self._exchange is not exchange or self._end_message is not None:
            return True
        self._heard.add(peer)
        exchange.note_heard(peer, link.now, frame)
        if frame.kind == Kind.GONE:
            (n_missing,) = struct.unpack_from("<I", frame.body)
            if n_missing == _LEAVES:
                raise Broken("it leaves")
            missing = struct.unpack_from(f"<{n_missing}I", frame.body, 4)
            if not missing:
                raise Broken(_DROPPED)
            lost = {rank: exchange.words_for_lost(rank, f"rank {peer} says so") for rank in missing}
            problem = Problem.of_lost(lost, is_told=True)
            raise self._after_standstill(exchange, problem) if link.rank in missing else problem
        if frame.phase != exchange.phase_id:
            raise Problem("in different operations", is_elsewhere=True)
        if frame.kind == Kind.STOP and exchange.failure is None:
            self.announce(bytes(payload).decode(errors="replace"), but=peer)
            self._interrupt_work(exchange)
        if frame.kind in (Kind.UP, Kind.DOWN, Kind.HEARD):
            neighbour.arrived.setdefault(frame.kind, Message(frame, payload))
            if not exchange.lacking(exchange.absent, frame.kind):
                link.loop.wake()
        if frame.kind in (Kind.DOWN, Kind.HEARD):
            neighbour.is_done = True
        return neighbour.is_done

    def problem_of_lost(self, peer: int, connections: Connections | None, detail: str) -> Problem:
        """The connection to ``peer`` broke, or could not be made if there are no ``connections``."""
        link, exchange = self.link, self._exchange
        if exchange is None:
            return Problem.of_lost({}, may_return=True)
        neighbour = exchange.neighbours[peer]
        has_closed = connections is not None and not connections.is_dropped  # that rank, and not this one
        if detail.startswith(CONNECTING_FAILED):
            link.gone[peer] = detail
            # A process that was there and does not listen any more, or lets go of who connects, is no reason to wait.
            connections = link.connections if re.search("refused|reset|closed by peer", detail) else None
            has_been_here = True
        else:
            has_been_here = peer in self._heard
            if not has_closed:
                connections = None
        may_return = connections is None or not has_been_here or neighbour.is_closed or detail == _DROPPED
        problem = Problem.of_lost({peer: exchange.words_for_lost(peer, detail)}, may_return=may_return)
        if connections is not None:
            # That rank was there. If it is alive, it says so before it closes its connections, or it answers the roll.
            connections.closed[peer] = connections.closed.get(peer) or ("" if may_return else problem.missing[peer])
        # Who has not come to this operation closes because of a standstill of its own, while it connected. But if the
        # store stood still with this rank, the others have given up and could not say so there.
        is_silent = link.store_host == link.rank and exchange.stood_still_seconds >= self.timeout_seconds
        gave_up = has_closed and (peer in self._heard or is_silent) and detail != _DROPPED
        return self._after_standstill(exchange, problem) if gave_up else problem

    def _after_standstill(self, exchange: Exchange, problem: Problem) -> Problem:
        """``problem``; but if this process stood still, the others have closed because they gave up on it."""
        if exchange.stood_still_seconds <= self.timeout_seconds / 2:
            return problem
        text = f"rank {self.link.rank} stood still for {exchange.stood_still_seconds:.1f} seconds"
        return Problem.of_silent(self.link.rank, self.timeout_seconds, text)

    def resume(self) -> None:
        """Go on over new connections."""
        exchange = self._exchange
        if exchange is not None and self._end_message is None:
            exchange.count_from(self.link.now)
            self._read_from_all(exchange)
            if exchange.interrupt is not None:  # what was passed on in its work may be lost, and its sender is done
                self.announce("the ranks have connected again")
            self.link.loop.wake()

    # Waiting.

    def _receive(self, exchange: Exchange, peers: Sequence[int], kind: Kind) -> Steps[list[Message]]:
        """Wait for the messages of all ``peers``, and return them.

        Raises:
            _Ended: the operation has ended on all ranks.
        """
        link = self.link
        exchange.waiting_since = link.now
        look_seconds = min(patience.ELSEWHERE_SECONDS, self.timeout_seconds / 2)
        said: int | None = None
        while True:
            generation = link.generation
            try:
                until = self._waits_until(exchange, peers, kind)
                if until is None:
                    break
                yield Until(until)
                now, waited = link.now, link.now - exchange.waiting_since
                neighbours = exchange.neighbours
                is_cut_off = any(exchange.silence_of(each, now) > look_seconds / 2 for each in exchange.tree.neighbours)
                if waited <= look_seconds / 2 or not is_cut_off:
                    continue
                unheard = [peer for peer in exchange.tree.neighbours if neighbours[peer].heard_seconds is None]
                awaited = tuple([exchange.silence_behind(peer, now)[1] for peer in exchange.absent])
                here = Waiting(self.key, exchange.number, self.what, tuple(link.completed.items()), awaited)
                said = generation
                for there in (yield from link.say_waiting(said, here, unheard if waited > look_seconds else ())):
                    if here.is_elsewhere(there):
                        raise Problem("in different operations", is_elsewhere=True)
            except Problem as problem:
                yield from link.break_up(generation, problem, self)
        if said is not None:
            yield from link.say_waiting(said, None)
        return [exchange.neighbours[peer].arrived[kind] for peer in peers]

    def _waits_until(self, exchange: Exchange, peers: Sequence[int], kind: Kind) -> float | None:
        """Until when to wait for the messages of ``peers``, before looking again; ``None`` if they have come.

        Raises:
            Problem: some message will not come.
            _Ended: the operation has ended on all ranks.
        """
        now = self.link.now
        if self._end_message is not None:
            raise _Ended(self._end_message)
        catching_up = exchange.catching_up_seconds(now)
        if catching_up:
            return now + catching_up
        exchange.absent = exchange.lacking(peers, kind)
        if not exchange.absent:
            return None
        if exchange.problem is not None:
            problem, exchange.problem = exchange.problem, None
            raise problem
        # What has just failed here, at the deadline say, is told first.
        grace_seconds = 0.0 if self._own_error is None else 2 * patience.BEAT_SECONDS
        left = min(exchange.seconds_to_wait(now), self._until + grace_seconds - now)
        if left <= 0:
            if self._own_error is not None and not isinstance(self._own_error, Stopped | ExchangeError):
                # Who waits with this rank hears of its failure, not of the ranks for which it has waited.
                raise Problem.of_leaving(self.link.rank, self._own_error)
            raise Problem.of_late(exchange.late(), self.deadline_seconds)
        return now + left

    # Beats.

    def beat(self) -> None:
        """Tell the neighbours that this rank is alive, and how far the slowest rank behind it has come."""
        now, exchange = self.link.now, self._exchange
        if exchange is None or self._end_message is not None:
            return
        exchange.catching_up_seconds(now)
        if exchange.is_working and exchange.problem is None and not self.link.is_breaking:
            try:
                for peer in exchange.tree.neighbours:  # it waits for nobody, and would not notice
                    exchange.refuse(peer, peer, exchange.silence_of(peer, now), now)
            except Problem as problem:
                exchange.problem = problem
                self.announce("; ".join(problem.missing.values()))
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
            self.stragglers.append(f"{self.what}: after {waited:.0f} seconds, {exchange.beat_for(None, now)}")
            logger.warning("%s", self.stragglers[-1])
        for peer in exchange.tree.neighbours:
            if not exchange.neighbours[peer].is_closed:
                self._post(exchange, peer, Frame(Kind.BEAT, body=exchange.beat_for(peer, now).encode()))

    # Ending out of step.

    def _conclude(self, problem: Problem) -> Steps[None]:
        """End the operation on all ranks, whatever else ends its connections meanwhile."""
        while self._end_message is None:
            yield from self.link.break_up(self.link.generation, problem, self)
        self._end_message = None

    def end(self, end_message: EndMessage) -> None:
        """The operation is over on all ranks; ``end_message`` says why."""
        self._end_message = end_message
        self._has_begun = False
        if self._exchange is not None:
            self._interrupt_work(self._exchange)
        self.link.loop.wake()

    def _interrupt_work(self, exchange: Exchange) -> None:
        if exchange.interrupt is not None and exchange.is_working:
            self.link.loop.spawn(exchange.interrupt())

    # What this rank tells others after a failure.

    def doing(self) -> str:
        """Describe where this rank is, for people."""
        if self._exchange is not None:
            return f"{self.what} of {self.name}"
        return f"{self.name}, after {self.n_exchanges} exchanges"

    def missing(self) -> dict[int, str]:
        """The neighbours that this rank did not hear for most of the timeout, and what it knows of each."""
        missing = {}
        if self._exchange is not None:
            for peer in self._exchange.absent:
                silence, rank = self._exchange.silence_behind(peer, self.link.now)
                if rank == peer and silence > _MISSED_AFTER * self.timeout_seconds:
                    missing[peer] = self._exchange.words_for_silent(peer, silence)
        return missing
