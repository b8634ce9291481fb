"""Moving payloads whose lengths all ranks know: who sends what to whom, and whether it arrived whole.

It never decodes a payload, and never asks for one again by itself: the exchange does, with all ranks. Every rank goes
through the same list of deliveries, so that tags stay in step, and takes part in those that concern it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.link import Link
from robust_dcp.comm.stats import PhaseStats
from robust_dcp.comm.transport import Payload

__all__ = ["Delivery", "Outgoing", "Received", "move"]


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
    for delivery in deliveries:
        tag = link.next_tag()
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
            payload = transport.receive(delivery.nbytes, delivery.sender, tag, deadline)
        else:
            continue
        cost.payload_nbytes_received += delivery.nbytes
        yield Received(delivery, payload, zlib.crc32(payload))
