"""Our coordinator in a save of virtual ranks: the real ``SaveSession`` over a simulated channel.

Owns the steps that count. In order, with their names in the rows:

* ``own offer``, ``headers``: the coordinator looks into the plan cache, combines the offers of its children in the
  tree, and decides.
* ``kind``: it finds the earlier plan to compare the structure with. Only if no plan holds.
* ``structures``: it checks the CRC-32 of the children's merged messages, decompresses and decodes them. Only for a new
  plan.
* ``plan``: it runs ``plan_for_all`` (tables, duplicates, coverage, who writes what and where). ``replies``: it encodes
  the replies for all ranks.
* ``own share``: it handles its own reply, as every rank does.
* ``places``: it reads what the ranks send after writing. Writing itself is not the coordinator's work.
* ``metadata``: it runs ``written_by_all``, and makes the bytes of ``.metadata`` and of the index with the plan.
  ``commit``: it writes, fsyncs, renames, and fsyncs the directory. ``cache``: it keeps the plan for the next save.
* ``report``: it makes and writes the report of the save.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import Stopwatch
from benchmarks.simulation.channel import SimulatedChannel
from benchmarks.simulation.others import OtherRanks, SaveName, written_files
from benchmarks.simulation.payloads import Payloads, coordinators_local
from robust_dcp.plan.cache import PLANS
from robust_dcp.plan.items import Items
from robust_dcp.plan.plan import Plan, Rows
from robust_dcp.plan.session import SaveSession
from robust_dcp.report_file import SavedReport
from robust_dcp.storage.committing.save import MetadataToPublish
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.writer import RobustWriter
from robust_dcp.storage.writing.engine import WrittenFiles
from robust_dcp.storage.writing.item_source import WriteItemSource

__all__ = ["OurCoordinator", "SimulatedSave"]


@dataclass
class SimulatedSave:
    """The figures of one simulated save by one coordinator, ours or stock's.

    Attributes:
        watch: CPU and wall seconds by step, and memory.
        sent_nbytes: the bytes that the other ranks sent. ``arrived_nbytes``: those that reached the coordinator.
        returned_nbytes: the bytes of the payloads that the coordinator sent.
        merging_seconds: the CPU time of other ranks that merge while the coordinator waits. It is not in ``watch``.
        metadata_nbytes: the size of ``.metadata``. ``index_nbytes``: the size of the index beside it.
        n_written: the number of written items. Each counts once.
        outcome: what happened to the plan.
    """

    watch: Stopwatch = field(default_factory=Stopwatch)
    sent_nbytes: int = 0
    arrived_nbytes: int = 0
    returned_nbytes: int = 0
    merging_seconds: float = 0.0
    metadata_nbytes: int = 0
    index_nbytes: int = 0
    n_written: int = 0
    outcome: str = ""


class _Writer(RobustWriter):
    """Writes no data. Its commits are real, into a directory that nobody else uses."""

    def __init__(self, directory: str, items: Items, watch: Stopwatch) -> None:
        super().__init__(directory)
        self._items, self._watch = items, watch
        self.kept: Rows = np.empty(0, dtype=np.intp)

    def begin(self, *, is_coordinator: bool, announces: bool = True) -> None:
        pass

    def announce(self) -> None:
        pass

    def join(self) -> bool:
        return False  # all ranks see the coordinator's directory

    def write(self, rank: int, *args: Any, **kwargs: Any) -> WrittenFiles:
        with self._watch.paused():
            self.directory.begin(announces=True)
            publish = self.directory.publish

            def timed(metadata: MetadataToPublish, *, are_checked: bool = False) -> None:
                self._watch.lap("metadata")
                publish(metadata, are_checked=are_checked)
                self._watch.lap("commit")

            self.directory.check_own = lambda names=None: None  # type: ignore[method-assign]  # nothing is written
            self.directory.publish = timed  # type: ignore[method-assign]
            return written_files(self._items, self.kept, rank)

    def leave_report(self, make: Callable[[str, tuple[str, ...]], SavedReport]) -> None:
        self._watch.lap("cache")
        super().leave_report(make)
        self._watch.lap("report")


def _no_data() -> WriteItemSource:
    return WriteItemSource([], lambda item: torch.empty(0))


class OurCoordinator:
    """Rank 0 of virtual ranks, from its first save on.

    Attributes:
        plan: the plan of the last save.
        others: the other ranks.
    """

    def __init__(self, payloads: Payloads) -> None:
        PLANS.clear()
        self._payloads = payloads
        self._local = coordinators_local(payloads)
        self.plan: Plan | None = None
        self.others = OtherRanks(payloads, self._items_of_ranks)

    def _items_of_ranks(self) -> Sequence[Items]:
        return () if self.plan is None else self.plan.items

    def save(self, name: SaveName, directory: str) -> SimulatedSave:
        """Make one save into ``directory``, which must exist and be empty."""
        made = SimulatedSave()
        watch = made.watch
        channel = SimulatedChannel(self._payloads, self.others, name, watch)
        writer = _Writer(directory, self._local.items, watch)
        session = SaveSession(channel, directory, writer, on_structure_change="quiet", commits_together=True)

        watch.start()
        session.agree(lambda: self._local, leads=True)
        watch.lap("own share")
        writer.kept = session.share.kept
        self.plan = session.plan
        session.write(_no_data)
        session.commit()
        watch.lap("cache")
        made.sent_nbytes, made.arrived_nbytes = channel.sent_nbytes, channel.arrived_nbytes
        made.returned_nbytes, made.outcome = channel.returned_nbytes, session.outcome
        made.merging_seconds = channel.merging_seconds
        made.metadata_nbytes = os.path.getsize(os.path.join(directory, METADATA_NAME))
        made.index_nbytes = os.path.getsize(os.path.join(directory, INDEX_NAME))
        made.n_written = 0 if session.plan is None else sum(len(share.kept) for share in session.plan.shares)
        return made
