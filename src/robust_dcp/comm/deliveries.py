"""Moving payloads whose lengths all ranks know: who sends what to whom, and whether it arrived whole.

It never decodes a payload, and never asks for one again by itself: the exchange does, with all ranks. Every rank goes
through the same list of deliveries, so that tags stay in step, and takes part in those that concern it.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.link import Link
from robust_dcp.comm.stats import PhaseStats
from robust_dcp.comm.transport import Incoming, Payload, Transport

__all__ = ["MAX_UNDER_WAY_NBYTES", "Delivery", "Outgoing", "Received", "move"]

MAX_UNDER_WAY_NBYTES = 256 << 20
"""A rank that receives from many lets several send at once, but has no more than this under way; or one payload."""


@dataclass(frozen=True)
class Delivery:
    """``nbytes`` bytes with the CRC-32 ``crc32`` go from ``sender`` to ``receiver`` (``None``: to all others)."""

    sender: int
    receiver: int | None
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Received:
    """What arrived of ``delivery``: exactly as many bytes as announced, whole or not."""

    delivery: Delivery
    payload: Payload
    crc32: int

    @property
    def is_whole(self) -> bool:
        return self.crc32 == self.delivery.crc32


Outgoing = Callable[[Delivery], Payload]
"""The payload of a delivery of which this rank is the sender."""


def move(
    link: Link, deliveries: Sequence[Delivery], outgoing: Outgoing, deadline: Deadline, cost: PhaseStats
) -> Iterator[Received]:
    """Make ``deliveries`` in their order, and yield those that arrive here. To be exhausted, or the link is useless."""
    transport = link.transport(deadline)
    tagged = [(delivery, link.next_tag()) for delivery in deliveries]
    inbox = _Inbox(transport, [(delivery, tag) for delivery, tag in tagged if delivery.receiver == link.rank])
    for delivery, tag in tagged:
        is_sender = delivery.sender == link.rank
        if is_sender:
            cost.payload_nbytes_sent += delivery.nbytes
        if delivery.receiver is None:
            own = outgoing(delivery) if is_sender else None
            payload = transport.broadcast(own, delivery.nbytes, delivery.sender, tag, deadline)
            if is_sender:
                continue
        elif is_sender:
            transport.send(outgoing(delivery), delivery.receiver, tag, deadline)
            continue
        elif delivery.receiver == link.rank:
            payload = inbox.next_payload(deadline)
        else:
            continue
        cost.payloads_received += 1
        cost.payload_nbytes_received += delivery.nbytes
        yield Received(delivery, payload, zlib.crc32(payload))


class _Inbox:
    """What ``transport`` brings to this rank alone, in the order of ``expected`` (with tags), several at once.

    While one is decoded, the next arrive; and ranks that send little do not wait for one that sends much.
    """

    def __init__(self, transport: Transport, expected: Sequence[tuple[Delivery, int]]) -> None:
        self._transport = transport
        self._expected = deque(expected)
        self._under_way: deque[tuple[int, Incoming]] = deque()
        self._nbytes = 0

    def next_payload(self, deadline: Deadline) -> Payload:
        """The next one, whole or not."""
        while self._expected and (
            not self._under_way or self._nbytes + self._expected[0][0].nbytes <= MAX_UNDER_WAY_NBYTES
        ):
            delivery, tag = self._expected.popleft()
            incoming = self._transport.start_receiving(delivery.nbytes, delivery.sender, tag)
            self._under_way.append((delivery.nbytes, incoming))
            self._nbytes += delivery.nbytes
        nbytes, incoming = self._under_way.popleft()
        payload = incoming.finish(deadline)
        self._nbytes -= nbytes
        return payload
