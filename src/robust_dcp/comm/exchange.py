"""One exchange on one rank: the rank's own work, then up the tree of ranks, and down again.

This module owns what each message of an exchange holds, and how the failures of several ranks become one on the way up.
It knows nothing of beats, of time, or of ranks that are lost: the operation sends and receives for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from robust_dcp.comm import wire
from robust_dcp.comm.combine import Agreement, Offer
from robust_dcp.comm.failures import ErrorMessage, FailuresBelow, Stopped
from robust_dcp.comm.frames import FRAME_NBYTES, Kind, Status
from robust_dcp.comm.link import Message
from robust_dcp.comm.pipe import Payload
from robust_dcp.comm.stats import PhaseStats
from robust_dcp.comm.tree import Tree

__all__ = ["Contribution", "Exchange", "Result", "Work"]


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


class Messenger(Protocol):
    """What an exchange needs of its operation."""

    @property
    def tree(self) -> Tree: ...

    def send(self, peer: int, kind: Kind, status: Status, agreement: Agreement, payload: Payload) -> None: ...

    def receive(self, peers: Sequence[int], kind: Kind) -> list[Message]: ...

    def announce_failure(self, text: str) -> None: ...

    def note_progress(self) -> None: ...

    def note_work_done(self) -> None: ...


class Exchange:
    """One exchange on this rank.

    Args:
        messenger: reaches the neighbours in the tree.
        phase: the caller's name for the exchange.
        work: what this rank does in it.

    Attributes:
        cost: what it has cost this rank so far.
        own_error: what this rank's own work raised.
    """

    def __init__(self, messenger: Messenger, phase: str, work: Work) -> None:
        self.cost = PhaseStats(exchanges=1)
        self.own_error: BaseException | None = None
        self._messenger = messenger
        self._phase = phase
        self._work = work

    def run(self, fault: Callable[[], None] | None) -> Result:
        """Do this rank's work, and return the result of all ranks.

        Args:
            fault: is called before this rank's own work, for tests.
        """
        contribution, failures = self._do_own_work(fault)
        began = time.monotonic()
        try:
            result = self._result_of_all(*self._join_children(contribution, failures))
            self._pass_down(result)
            return result
        finally:
            self.cost.seconds = time.monotonic() - began

    def _do_own_work(self, fault: Callable[[], None] | None) -> tuple[Contribution, FailuresBelow]:
        contribution, failures = Contribution(), FailuresBelow()
        try:
            if fault is not None:
                fault()
            contribution = self._work.contribute()
        except BaseException as error:
            failures = self._failed(error)
        self._messenger.note_work_done()
        return contribution, failures

    def _failed(self, error: BaseException) -> FailuresBelow:
        """Record a failure of this rank, and tell the ranks that are still working."""
        self.own_error = error
        rank = self._messenger.tree.rank
        if isinstance(error, Stopped):
            return FailuresBelow.stopped_on(rank, str(error))
        line = str(error).partition("\n")[0][:500]
        self._messenger.announce_failure(f"rank {rank}: {type(error).__name__}: {line}")
        return FailuresBelow.on(rank, error)

    def _join_children(
        self, contribution: Contribution, failures: FailuresBelow
    ) -> tuple[Agreement, Payload, FailuresBelow]:
        """Wait for the children, and join what comes from them with what this rank adds."""
        tree, payload = self._messenger.tree, contribution.payload
        arrived = self._receive(tree.children, Kind.UP)
        own = Agreement.of(tree.rank, contribution.offer)
        total = own.with_children([Agreement.decode(message.frame.body) for message in arrived])
        for message in arrived:
            if message.frame.status != Status.OK:
                failures = failures.merged(wire.decode(message.payload, FailuresBelow))
        if not failures:
            try:
                below = [message.payload for message in arrived if message.payload]
                if tree.parent is None:
                    self._messenger.note_progress()  # this rank may have waited for long before
                    payload = self._work.reply(total, payload, below)
                elif below:
                    payload = self._work.merge(payload, below)
            except BaseException as error:
                failures = self._failed(error)
        return total, payload, failures

    def _result_of_all(self, total: Agreement, payload: Payload, failures: FailuresBelow) -> Result:
        """The result, from the parent. On the root it is made here."""
        status, parent = failures.status, self._messenger.tree.parent
        if parent is not None:
            self._send(parent, Kind.UP, status, total, payload if status == Status.OK else wire.encode(failures))
            (reply,) = self._receive((parent,), Kind.DOWN)
            return Result(reply.frame.status, Agreement.decode(reply.frame.body), reply.payload)
        if status != Status.OK:
            payload = wire.encode(ErrorMessage.of(failures.joint_error(self._phase)))
        return Result(status, total, payload)

    def _pass_down(self, result: Result) -> None:
        for child in reversed(self._messenger.tree.children):
            share = result.payload
            if result.status == Status.OK and share:
                share = self._work.share(share, child)
            self._send(child, Kind.DOWN, result.status, result.agreement, share)

    def _send(self, peer: int, kind: Kind, status: Status, agreement: Agreement, payload: Payload) -> None:
        self._messenger.send(peer, kind, status, agreement, payload)
        self.cost.sent(FRAME_NBYTES, payload)

    def _receive(self, peers: Sequence[int], kind: Kind) -> list[Message]:
        messages = self._messenger.receive(peers, kind)
        for message in messages:
            self.cost.received(message.payload)
        return messages
