"""One exchange from the first header to the last verdict: the rules by which all ranks stay in step.

It owns the guard around each rank's work, the verdict on payloads, and both ways to fail: in step, where all ranks
raise the same and go on, and out of step, where the generation ends. It never knows what a payload means. The channel
says who sends what to whom, and what to do with what arrives.
"""

from __future__ import annotations

import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from robust_dcp.comm import wire
from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.deliveries import Delivery, Outgoing, Received, move
from robust_dcp.comm.failures import MAX_FAILURES_TOLD, ErrorMessage, Stopped, describe, joint_error
from robust_dcp.comm.frames import NO_PLAN_ID, NO_SIGNATURE, Frame, Kind, Status, operation_id
from robust_dcp.comm.link import Link
from robust_dcp.comm.post_mortem import Breakdown, settle
from robust_dcp.comm.roll_call import State
from robust_dcp.comm.rounds import gather_frames
from robust_dcp.comm.stats import PhaseStats
from robust_dcp.comm.transport import Payload
from robust_dcp.errors import ExchangeError, RobustCheckpointError

__all__ = ["Contribution", "Exchange", "exchange"]

_ALMOST_SECONDS = 0.05
"""gloo counts in milliseconds and may give up a moment before the deadline."""

Accept = Callable[[int, Payload], None]
"""Takes the sender and what it sent. What it raises becomes the failure of this rank."""


@dataclass(frozen=True)
class Contribution:
    """What a rank puts into its header, and the payload that it announces there (none if empty)."""

    payload: Payload = b""
    value: int = 0
    flags: int = 0
    signature: bytes = NO_SIGNATURE
    plan_id: bytes = NO_PLAN_ID


class Exchange:
    """One exchange under way on this rank. Made by :func:`exchange`; all ranks call the same methods in one order.

    Attributes:
        in_step: whether the exception now being raised is raised by all ranks, so that the link goes on.
        own_error: what this rank's own work or its acceptance of a payload raised.
    """

    def __init__(self, link: Link, operation: str, phase: str, timeout_seconds: float) -> None:
        self._link = link
        self._operation = operation
        self._operation_id = operation_id(operation)
        self._phase = phase
        self._timeout_seconds = timeout_seconds
        self._description = b""
        self._began: float | None = None
        self._messages_before = (0, 0)
        self.deadline = Deadline(timeout_seconds)
        self.cost = PhaseStats(exchanges=1)
        self.own_error: BaseException | None = None
        self.in_step = False

    def join(self, produce: Callable[[], Contribution]) -> list[Frame]:
        """Do this rank's work, then meet the others. The timeout counts from the meeting.

        Returns:
            the headers of all ranks, in rank order, all of them with status OK.

        Raises:
            RobustCheckpointError: ``produce`` failed on some rank; the same on all ranks.
        """
        link = self._link
        link.note(State.PREPARING, self._operation)
        contribution, status = Contribution(), Status.OK
        try:
            contribution = produce()
            header = self._header(contribution, status)
        except BaseException as error:
            status = self._fail(error)
            header = self._header(Contribution(payload=self._description), status)
            if status == Status.ERROR:
                # Those that still work are told now; they may poll for it, and stop.
                link.roll_call.announce(link.generation, link.sequence, f"rank {link.rank}: {_one_line(error)}")
        self.deadline = Deadline(self._timeout_seconds)
        self._began = time.monotonic()
        self._messages_before = link.messages()
        link.note(State.JOINED, self._operation)
        headers = gather_frames(link, header, self.deadline, self.cost)
        if any(each.status != Status.OK for each in headers):
            self._raise_joint_error(headers)
        return headers

    def deliver(
        self,
        deliveries: Sequence[Delivery],
        outgoing: Outgoing,
        accept: Accept,
        *,
        announce: Callable[[], Payload] = bytes,
    ) -> list[Frame]:
        """Make ``deliveries``, the same list on all ranks, and agree that they arrived.

        A receiver whose payload is damaged asks for it once more. Without deliveries there is nothing to agree on.

        Args:
            deliveries: who sends what to whom.
            outgoing: gives the payloads of which this rank is the sender.
            accept: takes those that arrive here.
            announce: called once all of them have: makes a payload for a later delivery, which the verdict announces.

        Returns:
            the verdicts of all ranks, in rank order, all of them with status OK.

        Raises:
            RobustCheckpointError: a payload was damaged twice, or ``accept`` or ``announce`` raised; the same on all
                ranks.
        """
        if not deliveries:
            return []
        verdicts = self._deliver(deliveries, outgoing, accept, self._fail, announce)
        if any(each.status == Status.ERROR for each in verdicts):
            self._raise_joint_error(verdicts)
        return verdicts

    def _deliver(
        self,
        deliveries: Sequence[Delivery],
        outgoing: Outgoing,
        accept: Accept,
        fail: Callable[[BaseException], object],
        announce: Callable[[], Payload] = bytes,
    ) -> list[Frame]:
        """Make ``deliveries``; ``fail`` gets what goes wrong on this rank. Returns the last verdicts: none is AGAIN."""
        asked: set[int] = set()
        damaged: set[int] = set()
        announced: Payload | None = None

        def take(received: Received) -> None:
            sender = received.delivery.sender
            damaged.discard(sender)
            try:
                if received.is_whole:
                    accept(sender, received.payload)
                elif sender not in asked:
                    damaged.add(sender)
                else:
                    raise self._damaged_twice(received)
            except BaseException as error:
                fail(error)

        for received in move(self._link, deliveries, outgoing, self.deadline, self.cost):
            take(received)
        while True:
            # One payload for each receiver and round, which is one more round in all but the worst cases.
            wanted = min(damaged, default=None)
            if wanted is not None:
                asked.add(wanted)
            elif announced is None and not self._description:
                try:
                    announced = announce()
                except BaseException as error:
                    fail(error)
            verdict = self._verdict(wanted, announced or b"")
            verdicts = gather_frames(self._link, verdict, self.deadline, self.cost)
            again = [(each.value, rank) for rank, each in enumerate(verdicts) if each.status == Status.AGAIN]
            if not again:
                return verdicts
            self.cost.repeats += 1
            repeated = [_repetition(deliveries, sender, receiver) for sender, receiver in again]
            for received in move(self._link, repeated, outgoing, self.deadline, self.cost):
                take(received)

    def _header(self, contribution: Contribution, status: Status) -> Frame:
        header = Frame(
            kind=Kind.HEADER,
            operation=self._operation_id,
            sequence=self._link.sequence,
            status=status,
            flags=contribution.flags,
            payload_nbytes=len(contribution.payload),
            payload_crc32=zlib.crc32(contribution.payload),
            signature=contribution.signature,
            plan_id=contribution.plan_id,
            value=contribution.value,
        )
        header.encode()  # a value that does not fit is this rank's failure, to be told like any other
        return header

    def _verdict(self, wanted: int | None, announced: Payload) -> Frame:
        """That of this rank. With OK it announces what follows in a later delivery, with ERROR the description."""
        status, value, payload = Status.OK, 0, announced
        if wanted is not None:
            status, value, payload = Status.AGAIN, wanted, b""
        elif self._description:
            status, payload = Status.ERROR, self._description
        return Frame(
            kind=Kind.VERDICT,
            operation=self._operation_id,
            sequence=self._link.sequence,
            status=status,
            payload_nbytes=len(payload),
            payload_crc32=zlib.crc32(payload),
            value=value,
        )

    def _fail(self, error: BaseException) -> Status:
        """Keep the first failure of this rank, to be told to the others."""
        if self.own_error is None:
            self.own_error = error
            if not isinstance(error, Stopped):
                self._description = describe(self._link.rank, error)
        return Status.STOPPED if isinstance(error, Stopped) else Status.ERROR

    def _damaged_twice(self, received: Received) -> ExchangeError:
        delivery = received.delivery
        return ExchangeError(
            f"the payload of rank {delivery.sender} in {self._phase!r} arrived damaged twice at rank "
            f"{self._link.rank}: expected {delivery.nbytes} bytes with CRC-32 {delivery.crc32:#010x}, "
            f"found {len(received.payload)} bytes with CRC-32 {received.crc32:#010x}",
            phase=self._phase,
            ranks=[delivery.sender],
        )

    def _raise_joint_error(self, frames: Sequence[Frame]) -> NoReturn:
        """Exchange the descriptions of failures, and raise on all ranks what they add up to."""
        failed = [rank for rank, frame in enumerate(frames) if frame.status == Status.ERROR]
        told: dict[int, ErrorMessage] = {}

        def keep(sender: int, payload: Payload) -> None:
            told[sender] = wire.decode(payload, ErrorMessage)

        deliveries = [
            Delivery(rank, None, frames[rank].payload_nbytes, frames[rank].payload_crc32)
            for rank in failed[:MAX_FAILURES_TOLD]
        ]
        if self._link.rank in failed:
            keep(self._link.rank, self._description)
        own_description = self._description
        self._description = b""  # it has been told of; the verdicts that follow are about the descriptions
        if deliveries and self._link.size > 1:
            # A description that does not arrive is no failure of its own: the rank is named all the same.
            self._deliver(deliveries, lambda _: own_description, keep, lambda _: None)
        error = joint_error(self._phase, failed, told) if failed else self._stopped_for_nothing(frames)
        self.in_step = True
        if isinstance(self.own_error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise self.own_error
        raise error from self.own_error

    def _stopped_for_nothing(self, frames: Sequence[Frame]) -> RobustCheckpointError:
        stopped = [rank for rank, frame in enumerate(frames) if frame.status == Status.STOPPED]
        reason = self._link.roll_call.announced(self._link.generation, self._link.sequence)
        return RobustCheckpointError(
            f"{self._phase!r} was stopped on ranks {stopped}, as a failure was announced: {reason or 'not known'}"
        )

    def finish(self) -> None:
        """Count what it cost, once it has ended in whatever way."""
        if self._began is not None:
            self.cost.seconds = time.monotonic() - self._began
            sent, received = self._link.messages()
            self.cost.messages_sent = sent - self._messages_before[0]
            self.cost.messages_received = received - self._messages_before[1]

    def breakdown(self, cause: BaseException) -> Breakdown:
        """What this rank knows of an exchange that ended out of step."""
        return Breakdown(
            operation=self._operation,
            phase=self._phase,
            rank=self._link.rank,
            size=self._link.size,
            generation=self._link.generation,
            sequence=self._link.sequence,
            timeout_seconds=self._timeout_seconds,
            timed_out=self.deadline.seconds_left <= _ALMOST_SECONDS,
            cause=cause,
        )


@contextmanager
def exchange(link: Link, operation: str, phase: str, timeout_seconds: float) -> Iterator[Exchange]:
    """The frame around one exchange: whatever happens within, it ends with ``link`` ready for the next.

    Args:
        link: to exchange over; other threads wait until it is free.
        operation: what is done, in full; ranks whose texts differ are in different operations.
        phase: the caller's name for it.
        timeout_seconds: how long to wait for others.

    Raises:
        ExchangeError: the ranks fell out of step: some are missing, lost or elsewhere, or frames were bad twice. All
            ranks raise the same, each when it learns of it, and the next exchange starts afresh.
        RobustCheckpointError: what was raised within, in step.
    """
    with link.held(operation):
        running = Exchange(link, operation, phase, timeout_seconds)
        try:
            yield running
        except BaseException as error:
            if running.in_step:
                link.finish_exchange(operation)
                raise
            cause = error
        else:
            link.finish_exchange(operation)
            return
        finally:
            running.finish()
            link.record(phase, running.cost)
        breakdown = running.breakdown(cause)
        # gloo closes a connection when nothing refers to what was under way on it, so the frames have to let go.
        traceback.clear_frames(cause.__traceback__)
        verdict = settle(link.roll_call, breakdown, link.close_transport)
        link.next_generation()
    for interrupt in (running.own_error, cause):
        if isinstance(interrupt, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise interrupt
    raise verdict from running.own_error or cause


def _repetition(deliveries: Sequence[Delivery], sender: int, receiver: int) -> Delivery:
    for delivery in deliveries:
        if delivery.sender == sender and delivery.receiver in (None, receiver):
            return Delivery(sender, receiver, delivery.nbytes, delivery.crc32)
    raise ExchangeError(f"rank {receiver} asks again for a payload that rank {sender} never announced")


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:500]}"
