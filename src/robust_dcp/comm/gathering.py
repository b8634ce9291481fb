"""The deliveries of a gather, in one level or two: what each rank passes on, and what the coordinator has in the end.

It owns the order of levels and who is blamed for what cannot be used. How bytes arrive whole is the exchange's affair,
which way they take that of :mod:`robust_dcp.comm.routes`. Called by ``Channel.gather`` only.

In two levels the ranks of a node send to their leader. The leader checks each message, so that a rank that sends
nonsense is named itself, and announces length and CRC-32 of its bundle in the verdict that ends the first level: the
second needs no round of its own to begin. No rank holds more than the messages of its node, equal columns once; the
coordinator what it holds anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from robust_dcp.comm import wire
from robust_dcp.comm.bundle import Bundler, Unbundler
from robust_dcp.comm.exchange import Accept, Exchange
from robust_dcp.comm.routes import Route
from robust_dcp.comm.transport import Payload
from robust_dcp.errors import ExchangeError

__all__ = ["blaming", "deliver_to_coordinator"]

M = TypeVar("M", bound=msgspec.Struct)


def deliver_to_coordinator(
    running: Exchange, route: Route, rank: int, payload: Payload, phase: str, message_type: type[M]
) -> dict[int, M]:
    """Deliver what all ranks announced.

    Args:
        running: joined by all ranks.
        route: of the payloads, the same on all ranks.
        rank: this one.
        payload: what this rank announced.
        phase: the name of the exchange.
        message_type: what the payloads are to be decoded as.

    Returns:
        the messages by rank on the coordinator, but for its own; nothing on the other ranks.

    Raises:
        RobustCheckpointError: a payload was damaged twice, or is no message; the same on all ranks.
    """
    if not route.bundled:
        messages: dict[int, M] = {}

        def accept(sender: int, arrived: Payload) -> None:
            messages[sender] = wire.decode(arrived, message_type)

        running.deliver(route.first, lambda _: payload, blaming(rank, phase, accept))
        return messages
    return _deliver_in_two_levels(running, route, rank, payload, phase, message_type)


def _deliver_in_two_levels(
    running: Exchange, route: Route, rank: int, payload: Payload, phase: str, message_type: type[M]
) -> dict[int, M]:
    messages: dict[int, M] = {}
    unbundler, bundler = Unbundler(message_type), Bundler(message_type)
    bundle = b""

    def accept_message(sender: int, arrived: Payload) -> None:
        if rank == route.coordinator_rank:
            messages[sender] = unbundler.message(arrived)
        else:
            bundler.add(sender, arrived)

    def make_bundle() -> Payload:
        nonlocal bundle
        if rank in route.bundled:
            if rank in route.bundled[rank]:
                blaming(rank, phase, bundler.add)(rank, payload)
            bundle = bundler.encode()
        return bundle

    def accept_bundle(leader: int, arrived: Payload) -> None:
        messages.update(unbundler.messages(arrived, leader, route.bundled[leader]))

    verdicts = running.deliver(
        route.first, lambda _: payload, blaming(rank, phase, accept_message), announce=make_bundle
    )
    running.deliver(route.second(verdicts), lambda _: bundle, blaming(rank, phase, accept_bundle))
    return messages


def blaming(rank: int, phase: str, accept: Callable[[int, Payload], None]) -> Accept:
    """``accept``, as ``rank`` is to call it in ``phase``: what cannot be used is blamed on its sender.

    It is to decode what arrives at once, so that nothing encoded is held longer than on its way.
    """

    def accept_or_blame(sender: int, payload: Payload) -> None:
        try:
            accept(sender, payload)
        except ExchangeError as error:
            message = f"rank {rank} cannot use what rank {sender} sent in {phase!r}: {error.message}"
            raise ExchangeError(message, phase=phase, ranks=[sender]) from None

    return accept_or_blame
