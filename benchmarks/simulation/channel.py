"""The coordinator's ``Channel`` over a simulated operation. Files take the place of other ranks.

Only the coordinator's own part of an exchange is measured: its own message, the frames and payloads of its children in
the tree, and what it sends down to each child. Waiting and the network itself are left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import msgspec

from benchmarks.measuring import Stopwatch
from benchmarks.simulation.mailbox import COORDINATOR, Mailbox, SimulatedOperation
from benchmarks.simulation.others import OtherRanks, SaveName
from benchmarks.simulation.payloads import Payloads
from robust_dcp.comm import Agreement, Channel, Offer
from robust_dcp.comm.frames import FRAME_NBYTES, Frame, Kind, operation_id, phase_id
from robust_dcp.comm.messages import Payload
from robust_dcp.comm.operation import Operation, Work

__all__ = ["SimulatedChannel"]

M = TypeVar("M", bound=msgspec.Struct)

_LAPS = {
    "agree": "headers",
    "kind": "kind",
    "kind found": "kind",
    "agree on kind": "kind",
    "structures": "structures",
    "plan": "replies",
    "write": "places",
    "commit": "commit",
}
"""The names in the rows for the coordinator's part of an exchange, by the end of the exchange's name."""


class _OnTheCoordinator(SimulatedOperation):
    """Every exchange of one save, on the coordinator."""

    def __init__(self, payloads: Payloads, others: OtherRanks, save: SaveName, watch: Stopwatch) -> None:
        super().__init__(COORDINATOR, payloads.ranks)
        self.sent_nbytes = self.arrived_nbytes = self.returned_nbytes = 0
        self.merging_seconds = 0.0
        self._payloads = payloads
        self._others = others
        self._save = save
        self._watch = watch

    def run(self, verb: str, phase: str, root: int, work: Work) -> tuple[Agreement, Payload]:
        name = phase.rpartition(": ")[2]
        offer, own_payload = work.contribute()
        if name == "agree":
            self._watch.lap("own offer")
        with self._watch.paused():
            arrived = self._arrived(name, phase)
        own = Agreement.of(COORDINATOR, offer)
        total = own.with_children([Agreement.decode(Frame.decode(frame).body) for frame, _ in arrived])
        below: list[Payload] = []
        for _, received in arrived:
            zlib.crc32(received)
            if received:
                below.append(received)
        payload = work.reply(total, own_payload, below)
        for child in reversed(self.tree.children):
            share = work.share(payload, child) if payload else b""
            zlib.crc32(share)
            self.returned_nbytes += len(share)
        if name in _LAPS:
            self._watch.lap(_LAPS[name])
        return total, payload

    def _arrived(self, name: str, phase: str) -> list[tuple[bytes, bytes]]:
        """The frame and the payload of each child."""
        n_ranks, mailbox, offers = self.link.size, self._mailbox(name), None
        if name == "agree":
            offers = self._others.offers(self._save)
        elif name == "write":
            offers = self._others.written
        payloads = {} if mailbox is None else mailbox.arriving()
        found = []
        for child in self.tree.children:
            agreement = _agreement(child, offers or [Offer()] * n_ranks)
            frame = Frame(Kind.UP, operation_id("simulated"), phase=phase_id(phase), body=agreement.encode())
            found.append((frame.encode(), payloads.get(child, b"")))
        self.sent_nbytes += FRAME_NBYTES * (n_ranks - 1)
        self.arrived_nbytes += sum(len(frame) + len(payload) for frame, payload in found)
        if mailbox is not None:
            self.sent_nbytes += mailbox.said_nbytes
            self.merging_seconds += mailbox.merging_seconds
        return found

    def _mailbox(self, name: str) -> Mailbox | None:
        if name == "structures":
            return self._payloads.mailbox("change" if self._save == "change" else "first")
        if name == "compare":
            return self._others.compare()
        return self._others.write(self._save) if name == "write" else None


def _agreement(rank: int, offers: Sequence[Offer]) -> Agreement:
    """What ``rank`` and all ranks below it offer."""
    children = SimulatedOperation(rank, len(offers)).tree.children
    return Agreement.of(rank, offers[rank]).with_children([_agreement(child, offers) for child in children])


class SimulatedChannel(Channel):
    """``Channel`` on the coordinator, for one save."""

    def __init__(self, payloads: Payloads, others: OtherRanks, save: SaveName, watch: Stopwatch) -> None:
        self._simulated = _OnTheCoordinator(payloads, others, save, watch)
        self._others = others
        self._watch = watch
        super().__init__(cast(Operation, self._simulated), COORDINATOR)

    @property
    def sent_nbytes(self) -> int:
        """The bytes that all other ranks send: a frame for each exchange, and their messages before any merge."""
        return self._simulated.sent_nbytes

    @property
    def arrived_nbytes(self) -> int:
        """The bytes that reach the coordinator from its children in the tree."""
        return self._simulated.arrived_nbytes

    @property
    def returned_nbytes(self) -> int:
        """The bytes of the payloads that the coordinator sends down."""
        return self._simulated.returned_nbytes

    @property
    def merging_seconds(self) -> float:
        """The CPU time of other ranks for which the coordinator waits: the merges on the longest path up the tree."""
        return self._simulated.merging_seconds

    def scatter(self, phase: str, produce: Callable[[], Sequence[M | None]], message_type: type[M]) -> M | None:
        made: list[M | None] = []

        def plan() -> Sequence[M | None]:
            made.extend(produce())
            self._watch.lap("plan")
            return made

        own = super().scatter(phase, plan, message_type)
        with self._watch.paused():
            self._others.take_replies(made)
        return own
