"""Stands in for the coordinator's ``Channel``: the other ranks are files, and only the coordinator's part is measured.

Owns which part of an exchange is the coordinator's work: headers and payloads are checked and decoded, replies encoded.
Rounds that confirm an exchange, and the network itself, are left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from benchmarks.simulation.mailbox import COORDINATOR
from benchmarks.simulation.others import OtherRanks, SaveName
from benchmarks.simulation.payloads import Payloads
from benchmarks.simulation.stopwatch import Stopwatch
from robust_dcp.comm import Offer, encode
from robust_dcp.comm.frames import FRAME_NBYTES, Frame
from robust_dcp.plan.kinds import KindVote
from robust_dcp.plan.structure import StructureMessage

__all__ = ["SimulatedChannel"]

M = TypeVar("M", bound=msgspec.Struct)


class SimulatedChannel:
    """The verbs of ``Channel`` that ``SaveSession`` uses, on the coordinator, for one save.

    Attributes:
        sent_nbytes: headers and payloads of the other ranks, of all gathers.
        arrived_nbytes: what of that reached the coordinator, equal columns of a node once.
        returned_nbytes: payloads that the coordinator sent.
    """

    def __init__(self, payloads: Payloads, others: OtherRanks, save: SaveName, watch: Stopwatch) -> None:
        self.rank = self.coordinator_rank = COORDINATOR
        self.is_coordinator = True
        self.size = payloads.ranks
        self.ranks = tuple(range(payloads.ranks))
        self.last_values: tuple[int, ...] = ()
        self.sent_nbytes = self.arrived_nbytes = self.returned_nbytes = 0
        self._payloads = payloads
        self._others = others
        self._save = save
        self._watch = watch

    def led_by(self, rank: int) -> SimulatedChannel:
        """This one: rank 0 leads every simulated save."""
        return self

    def agree(self, phase: str, produce: Callable[[], Offer]) -> list[Offer]:
        own = produce()
        self._watch.lap("own offer")
        with self._watch.paused():
            headers = self._others.offers(self._save)
            self._count_headers()
        frames = [Frame.decode(headers[at : at + FRAME_NBYTES]) for at in range(0, len(headers), FRAME_NBYTES)]
        offers = [Offer(frame.signature, frame.plan_id, frame.value, frame.flags) for frame in frames]
        self._watch.lap("headers")
        return [own, *offers[1:]]

    def gather(
        self,
        phase: str,
        produce: Callable[[], M | None],
        message_type: type[M],
        *,
        value: Callable[[M | None], int] | int = 0,
    ) -> list[M | None]:
        own = produce()
        if message_type is KindVote:  # the others hold what this rank holds, or nearly so
            self._count_headers()
            return [own] * self.size
        own_value = value(own) if callable(value) else value
        with self._watch.paused():
            if message_type is StructureMessage:
                mailbox = self._payloads.mailbox("patch" if self._save == "patch" else "first")
            else:
                mailbox = self._others.write(self._save)
            headers = mailbox.headers()
            self._count_headers()
            self.sent_nbytes += mailbox.sent_nbytes
            self.arrived_nbytes += mailbox.arriving_nbytes
        messages, values = mailbox.collect(headers, message_type)
        self.last_values = (own_value, *values[1:])
        self._watch.lap("structures" if message_type is StructureMessage else "places")
        return [own, *messages[1:]]

    def broadcast(self, phase: str, produce: Callable[[], M], message_type: type[M]) -> M:
        return produce()

    def scatter(self, phase: str, produce: Callable[[], Sequence[M]], message_type: type[M]) -> M:
        made = produce()
        self._watch.lap("plan")
        payloads = [b"" if rank == COORDINATOR else encode(message) for rank, message in enumerate(made)]
        for payload in payloads:
            zlib.crc32(payload)
        self._watch.lap("replies")
        with self._watch.paused():
            self.returned_nbytes += sum(map(len, payloads))
            self._others.take_replies(payloads)
        return made[COORDINATOR]

    def barrier(self, phase: str, produce: Callable[[], None]) -> None:
        produce()

    def stop_if_announced(self) -> None:
        """Nobody fails here."""

    def _count_headers(self) -> None:
        self.sent_nbytes += FRAME_NBYTES * (self.size - 1)
        self.arrived_nbytes += FRAME_NBYTES * (self.size - 1)
