"""Channel: what the ranks of a group say to each other during a save or load, one verb for each way to say it.

It owns the verbs, and leaves to the exchange how ranks stay in step and to the registry which connection is used.
Called by ``api``, the planner, the writer and the Megatron integration; one for each thread that works on its own.
"""

from __future__ import annotations

import math
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch.distributed as dist

from robust_dcp.comm import process_group as groups
from robust_dcp.comm import wire
from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.deliveries import Delivery
from robust_dcp.comm.exchange import Accept, Contribution, Exchange, exchange
from robust_dcp.comm.failures import Stopped
from robust_dcp.comm.frames import NO_PLAN_ID, NO_SIGNATURE, Frame
from robust_dcp.comm.gathering import blaming, deliver_to_coordinator
from robust_dcp.comm.link import Link
from robust_dcp.comm.nodes import check_environment
from robust_dcp.comm.registry import link_for, local_link
from robust_dcp.comm.relay import Relay, carry, refuse_damage
from robust_dcp.comm.routes import route_of
from robust_dcp.comm.stats import ExchangeStats
from robust_dcp.comm.transport import Payload

__all__ = ["MAX_ALL_GATHER_NBYTES", "Channel", "Offer"]

M = TypeVar("M", bound=msgspec.Struct)

MAX_ALL_GATHER_NBYTES = 1 << 20
"""What goes from everyone to everyone has to be small."""

_POLL_SECONDS = 0.25
_TABLE_ROW = struct.Struct("<QI")


@dataclass(frozen=True)
class Offer:
    """What a rank says of itself in a header, without any payload.

    Attributes:
        signature: 16 bytes, of the structure that the rank holds.
        plan_id: 8 bytes, the cached plan that it could use; zeros for none.
        value: 64 bits, free for the phase.
        flags: 8 bits, free for the phase.
    """

    signature: bytes = NO_SIGNATURE
    plan_id: bytes = NO_PLAN_ID
    value: int = 0
    flags: int = 0


class Channel:
    """Exchanges among the ranks of a process group, over connections that nothing else uses.

    Every rank calls the same verbs with the same ``phase`` in the same order. ``produce`` is the rank's own work: it
    runs first, and if it raises on any rank, all ranks raise the same exception, and go on in step. A rank that does
    not come within ``timeout_seconds``, has ended, or is in another phase, is named in an ``ExchangeTimeout`` or
    ``ExchangeError`` on all; the next exchange then starts on new connections.

        channel = Channel.for_group(timeout_seconds=60)
        sizes = channel.gather("save 3: sizes", measure, Sizes)

    Attributes:
        rank: of this process in the group.
        size: of the group.
        ranks: the global rank of each rank of the group.
        coordinator_rank: the rank of the group that gathers and decides.
        timeout_seconds: how long to wait for others in each exchange, from when this rank's own work is done.
        last_values: the ``value`` of every rank in the last exchange of this object, in rank order.
    """

    def __init__(self, link: Link, *, timeout_seconds: float, coordinator_rank: int) -> None:
        if not 0 < timeout_seconds < math.inf:
            raise ValueError(f"timeout_seconds is {timeout_seconds}: it has to be positive and finite")
        if not 0 <= coordinator_rank < link.size:
            raise ValueError(f"coordinator_rank is {coordinator_rank} in a group of {link.size} ranks")
        self._link = link
        self._polled: tuple[float, tuple[int, int], str | None] | None = None
        self.timeout_seconds = timeout_seconds
        self.coordinator_rank = coordinator_rank
        self.last_values: tuple[int, ...] = ()

    @classmethod
    def for_group(
        cls,
        process_group: dist.ProcessGroup | None = None,
        *,
        purpose: str = "checkpoint",
        timeout_seconds: float = 300.0,
        coordinator_rank: int = 0,
        no_dist: bool = False,
    ) -> Channel:
        """The channel among the members of ``process_group``. Not a collective: it connects when it is first used.

        Args:
            process_group: ``None`` for the default group. Its backend does not matter.
            purpose: channels of one group and one purpose share connections and the order of exchanges; a thread that
                works on its own needs a purpose of its own.
            timeout_seconds: of this object's exchanges.
            coordinator_rank: a rank of the group, not a global one.
            no_dist: talk to nobody. So it is also without ``torch.distributed``, and in a group of one.

        Raises:
            ValueError: an argument is out of range, or this process is not a member of the group.
        """
        if no_dist or not groups.is_initialised():
            link = local_link()
        else:
            link = link_for(groups.parent_of(process_group), purpose)
        return cls(link, timeout_seconds=timeout_seconds, coordinator_rank=coordinator_rank)

    def led_by(self, coordinator_rank: int) -> Channel:
        """This channel with another coordinator; the same connections and the same order of exchanges."""
        if coordinator_rank == self.coordinator_rank:
            return self
        return Channel(self._link, timeout_seconds=self.timeout_seconds, coordinator_rank=coordinator_rank)

    @property
    def rank(self) -> int:
        return self._link.rank

    @property
    def size(self) -> int:
        return self._link.size

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._link.ranks

    @property
    def is_coordinator(self) -> bool:
        return self.rank == self.coordinator_rank

    @property
    def stats(self) -> ExchangeStats:
        """What all exchanges over these connections have cost this rank so far."""
        return self._link.stats

    def recording(self) -> AbstractContextManager[ExchangeStats]:
        """``with channel.recording() as stats:`` counts the exchanges within the block."""
        return self._link.recording()

    def agree(self, phase: str, produce: Callable[[], Offer]) -> list[Offer]:
        """Every rank's offer, in rank order, on every rank: 128 bytes from each, whatever they are about.

        Raises:
            RobustCheckpointError: see the class.
        """

        def contribute() -> Contribution:
            offer = produce()
            return Contribution(signature=offer.signature, plan_id=offer.plan_id, value=offer.value, flags=offer.flags)

        with self._exchange("agree", phase) as running:
            headers = self._join(running, contribute)
        return [Offer(each.signature, each.plan_id, each.value, each.flags) for each in headers]

    def barrier(self, phase: str, produce: Callable[[], None] = lambda: None) -> None:
        """Wait for all ranks, and for the work of all ranks to have succeeded.

        Raises:
            RobustCheckpointError: see the class.
        """

        def contribute() -> Contribution:
            produce()
            return Contribution()

        with self._exchange("barrier", phase) as running:
            self._join(running, contribute)

    def gather(
        self,
        phase: str,
        produce: Callable[[], M | None],
        message_type: type[M],
        *,
        value: Callable[[M | None], int] | int = 0,
    ) -> list[M | None] | None:
        """Every rank's message, in rank order, on the coordinator; ``None`` on the others.

        In large groups by way of node leaders (:mod:`robust_dcp.comm.nodes` says when). Messages with equal fields may
        then hold the very same objects: nobody should modify them.

        Args:
            phase: the name of the exchange, the same on all ranks.
            produce: makes this rank's message; ``None`` if it has nothing to say, which costs nothing.
            message_type: what the messages are decoded as, and checked against.
            value: 64 bits that go to all ranks (``last_values``), or what computes them from the message.

        Raises:
            RobustCheckpointError: see the class.
        """
        own: M | None = None
        payload = b""

        def contribute() -> Contribution:
            nonlocal own, payload
            if self.size > 1:
                check_environment()
            own = produce()
            if own is not None and not self.is_coordinator:
                payload = wire.encode(own)
            return Contribution(payload=payload, value=value(own) if callable(value) else value)

        with self._exchange("gather", phase) as running:
            headers = self._join(running, contribute)
            route = route_of(headers, self._link.nodes(running.deadline), self.coordinator_rank)
            received = deliver_to_coordinator(running, route, self.rank, payload, phase, message_type)
        if not self.is_coordinator:
            return None
        return [own if rank == self.rank else received.get(rank) for rank in range(self.size)]

    def broadcast(self, phase: str, produce: Callable[[], M], message_type: type[M]) -> M:
        """The coordinator's message, on every rank. ``produce`` runs on the coordinator only.

        Raises:
            RobustCheckpointError: see the class.
        """
        messages: dict[int, M] = {}
        payload = b""

        def contribute() -> Contribution:
            nonlocal payload
            if self.is_coordinator:
                messages[self.rank] = message = produce()
                payload = self._encoded(message)
            return Contribution(payload=payload)

        with self._exchange("broadcast", phase) as running:
            header = self._join(running, contribute)[self.coordinator_rank]
            deliveries = _from(self.coordinator_rank, header)
            running.deliver(deliveries, lambda _: payload, self._decoding(messages, phase, message_type))
        return messages[self.coordinator_rank]

    def scatter(self, phase: str, produce: Callable[[], Sequence[M | None]], message_type: type[M]) -> M | None:
        """This rank's message out of those that the coordinator made; ``produce`` runs on the coordinator only.

        Args:
            phase: the name of the exchange, the same on all ranks.
            produce: makes one message for each rank, in rank order; ``None`` for nothing.
            message_type: what the messages are decoded as, and checked against.

        Raises:
            RobustCheckpointError: see the class.
        """
        own: M | None = None
        payloads = [b""] * self.size
        table = b""

        def contribute() -> Contribution:
            nonlocal own, table
            if self.is_coordinator:
                made = produce()
                if len(made) != self.size:
                    raise ValueError(f"{phase!r} has {len(made)} messages for {self.size} ranks")
                own = made[self.rank]
                for rank, message in enumerate(made):
                    if message is not None and rank != self.rank:
                        payloads[rank] = wire.encode(message)
                if any(payloads):
                    table = b"".join(_TABLE_ROW.pack(len(each), zlib.crc32(each)) for each in payloads)
            return Contribution(payload=table)

        def take_table(_: int, payload: Payload) -> None:
            nonlocal table
            table = bytes(payload)

        with self._exchange("scatter", phase) as running:
            header = self._join(running, contribute)[self.coordinator_rank]
            # A header has room for one length: first everyone gets those of all messages.
            running.deliver(_from(self.coordinator_rank, header), lambda _: table, take_table)
            deliveries = [
                Delivery(self.coordinator_rank, rank, nbytes, crc32)
                for rank, (nbytes, crc32) in enumerate(_TABLE_ROW.iter_unpack(table))
                if nbytes
            ]
            received: dict[int, M] = {}
            running.deliver(
                deliveries,
                lambda delivery: payloads[delivery.receiver or 0],
                self._decoding(received, phase, message_type),
            )
        return own if self.is_coordinator else received.get(self.coordinator_rank)

    def all_gather(self, phase: str, produce: Callable[[], M], message_type: type[M]) -> list[M]:
        """Every rank's message, in rank order, on every rank. At most ``MAX_ALL_GATHER_NBYTES`` from each.

        Raises:
            RobustCheckpointError: see the class.
        """
        messages: dict[int, M] = {}
        payload = b""

        def contribute() -> Contribution:
            nonlocal payload
            messages[self.rank] = message = produce()
            payload = self._encoded(message)
            if len(payload) > MAX_ALL_GATHER_NBYTES:
                raise ValueError(
                    f"{len(payload)} bytes are more than {MAX_ALL_GATHER_NBYTES}: gather and broadcast them"
                )
            return Contribution(payload=payload)

        with self._exchange("all_gather", phase) as running:
            headers = self._join(running, contribute)
            deliveries = [delivery for rank, header in enumerate(headers) for delivery in _from(rank, header)]
            running.deliver(deliveries, lambda _: payload, self._decoding(messages, phase, message_type))
        return [messages[rank] for rank in range(self.size)]

    def relay(self, phase: str, relayed: Relay) -> None:
        """Pass tensors from the ranks that have them to those that need them; what arrived was sent, or it raises.

        Raises:
            RobustCheckpointError: see the class.
        """
        with self._exchange("relay", phase) as running:
            self._join(running, Contribution)
            damaged = carry(self._link, relayed, self.timeout_seconds, running.cost)
        self.barrier(f"{phase}: arrived", lambda: refuse_damage(damaged, self.rank, phase))

    @property
    def nodes(self) -> tuple[int, ...]:
        """For each rank the number of its node, the same on all ranks. To be asked after an exchange."""
        return self._link.nodes(Deadline(self.timeout_seconds)).node_of

    def announce_failure(self, error: BaseException) -> None:
        """Tell the ranks that still work towards the next exchange, or within the present one, that it will fail.

        Join that exchange afterwards, and let its ``produce`` raise ``error``. What ``produce`` raises is announced
        anyway; this is for work between exchanges.
        """
        link = self._link
        text = str(error).partition("\n")[0][:500]
        link.roll_call.announce(link.generation, link.sequence, f"rank {link.rank}: {type(error).__name__}: {text}")

    def failure_announced(self) -> str | None:
        """What another rank announced of the next exchange, or of the present one; ``None`` if nothing.

        Cheap enough for a loop over items: the store is asked a few times a second at most. From any thread.
        """
        link = self._link
        now, place = time.monotonic(), (link.generation, link.sequence)
        polled = self._polled
        if polled is None or polled[1] != place or now - polled[0] >= _POLL_SECONDS:
            polled = (now, place, link.roll_call.announced(*place))
            self._polled = polled
        return polled[2]

    def stop_if_announced(self) -> None:
        """Leave the work of this rank if another has announced a failure.

        Raises:
            Stopped: to be raised through ``produce``; the exchange makes it the failure that was announced.
        """
        announced = self.failure_announced()
        if announced is not None:
            raise Stopped(announced)

    @contextmanager
    def _exchange(self, verb: str, phase: str) -> Iterator[Exchange]:
        operation = f"{verb} {phase!r}"
        if self.coordinator_rank:
            operation += f" with coordinator {self.coordinator_rank}"
        with exchange(self._link, operation, phase, self.timeout_seconds) as running:
            yield running

    def _join(self, running: Exchange, contribute: Callable[[], Contribution]) -> list[Frame]:
        headers = running.join(contribute)
        self.last_values = tuple(header.value for header in headers)
        return headers

    def _decoding(self, messages: dict[int, M], phase: str, message_type: type[M]) -> Accept:
        def accept(sender: int, payload: Payload) -> None:
            messages[sender] = wire.decode(payload, message_type)

        return blaming(self.rank, phase, accept)

    def _encoded(self, message: msgspec.Struct) -> bytes:
        """A rank's own message is handed to it as it is: alone, nothing is encoded."""
        return wire.encode(message) if self.size > 1 else b""


def _from(rank: int, header: Frame) -> list[Delivery]:
    """What ``rank`` announced, to everyone."""
    return [Delivery(rank, None, header.payload_nbytes, header.payload_crc32)] if header.payload_nbytes else []
