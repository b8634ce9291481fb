"""The other ranks of a simulated save, as our coordinator sees them.

Owns what they keep from save to save: their signatures, the plan in their cache, and their parts of it. Their work is
not measured.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from benchmarks.simulation.mailbox import COORDINATOR, Mailbox
from benchmarks.simulation.payloads import Payloads
from robust_dcp.comm import Offer
from robust_dcp.plan.items import Form, Items
from robust_dcp.plan.plan import PlanReply, Rows, unpack_places
from robust_dcp.plan.session import MATCHES, Digests
from robust_dcp.plan.written import Written, written_message, written_offer
from robust_dcp.report import PhaseReport
from robust_dcp.report_rows import PhaseClock, said_of_rank
from robust_dcp.storage.writing.engine import WrittenFiles

__all__ = ["OtherRanks", "SaveName", "written_files"]

SaveName = Literal["first", "repeated", "change"]


class OtherRanks:
    """All ranks but the coordinator.

    Args:
        payloads: the messages that they send before there is a plan.
        items: the structure of every rank, after the coordinator has planned.

    Attributes:
        kept: for each rank the places of the items that it writes, from the coordinator's reply. Empty for the
            coordinator itself.
        written: what each rank offers after it has written. Nothing for the coordinator itself.
    """

    def __init__(self, payloads: Payloads, items: Callable[[], Sequence[Items]]) -> None:
        self._payloads = payloads
        self._items = items
        self._plan_id = Offer().plan_id
        self._n_compared = [0] * payloads.ranks
        self.kept: list[Rows] = [np.empty(0, dtype=np.intp)] * payloads.ranks
        self.written: list[Offer] = []

    def offers(self, save: SaveName) -> list[Offer]:
        """What the ranks offer. After the first save they know a plan, which does not fit a change."""
        changed = self._payloads.ranks - 1 if save == "change" else None
        return [
            Offer(plan_id=self._plan_id, flags=0 if save == "first" or rank == changed else MATCHES)
            for rank in range(self._payloads.ranks)
        ]

    def take_replies(self, replies: Sequence[object]) -> None:
        """Give each rank its reply from the coordinator."""
        for rank, reply in enumerate(replies):
            if isinstance(reply, PlanReply):
                self._plan_id = reply.share.plan_id
                n_items = reply.share.n_items
                self._n_compared[rank] = len(unpack_places(reply.compared, n_items)) if reply.compared else 0
                if rank != COORDINATOR:
                    self.kept[rank] = reply.share.kept

    def compare(self) -> Mailbox:
        """A gather of digests, of ranks that cannot read their data."""
        mailbox = self._mailbox("compared-")
        for rank in range(1, self._payloads.ranks):
            mailbox.post(rank, Digests(bytes(8 * self._n_compared[rank])))
        mailbox.merge(Digests)
        return mailbox

    def _mailbox(self, prefix: str) -> Mailbox:
        return Mailbox(Path(tempfile.mkdtemp(prefix=prefix, dir=self._payloads.directory)), self._payloads.ranks)

    def write(self, save: SaveName) -> Mailbox:
        """The gather after writing, in which the ranks send the places of their objects."""
        mailbox = self._mailbox("written-")
        self.written = [Offer()]
        for rank in range(1, self._payloads.ranks):
            written = written_files(self._items()[rank], self.kept[rank], rank)
            places = written.variable_places
            self.written.append(written_offer(places))
            said = said_of_rank(rank, _clock(rank), written.nbytes, len(written.names), written.how)
            message = written_message(places, places if save == "repeated" else None, said=said)
            if message is not None:
                mailbox.post(rank, message)
        mailbox.merge(Written)
        return mailbox


def written_files(items: Items, kept: Rows, rank: int) -> WrittenFiles:
    """A rank's description of its files. The lengths of objects differ from rank to rank."""
    n_objects = int((items.form[kept] == Form.VARIABLE).sum())
    lengths = np.array([_length(rank, number) for number in range(n_objects)], dtype=np.int64)
    offsets = np.cumsum(lengths) - lengths
    places: npt.NDArray[np.int64] = np.column_stack([offsets, lengths]).reshape(n_objects, 2)
    return WrittenFiles(variable_places=places, names=(), nbytes=0)


def _clock(rank: int) -> PhaseClock:
    """Times that differ from rank to rank, so that their rows cannot be merged."""
    draw = random.Random(rank)
    return PhaseClock(records=[PhaseReport("plan", draw.random())], own_write_seconds=10 + draw.random())


def _length(rank: int, number: int) -> int:
    return 500 + hashlib.blake2b(f"{rank} {number}".encode(), digest_size=1).digest()[0]
