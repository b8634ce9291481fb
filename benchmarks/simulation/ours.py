"""Our coordinator in a save of virtual ranks: the real ``SaveSession`` over a simulated channel.

Owns which steps count. In order, named as in the rows:

* ``own offer``, ``headers``: looks into the plan cache, combines what its children in the tree have combined, and
  decides.
* ``kind``, where no plan holds: which earlier plan the structure is compared with.
* ``structures``, only of a plan that is made anew: takes what its children have merged, checks their CRC-32, inflates
  and decodes it.
* ``plan``: ``plan_for_all``: tables, duplicates, coverage, who writes what and where. ``replies``: encoded, for all.
* ``own share``: what every rank does with its reply, the coordinator too.
* ``places``: what the ranks tell after writing. The writing itself is no work of the coordinator's.
* ``metadata``: ``written_by_all``, and the bytes of ``.metadata`` and of the index, with the plan in it. ``commit``:
  written, fsynced, renamed, fsynced. ``cache``: the plan is kept for the next save.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.simulation.channel import SimulatedChannel
from benchmarks.simulation.others import OtherRanks, SaveName, written_files
from benchmarks.simulation.payloads import Payloads, coordinators_local
from benchmarks.simulation.stopwatch import Stopwatch
from benchmarks.virtual_ranks import FILES_PER_RANK
from robust_dcp.plan.cache import PLANS
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.session import SaveSession
from robust_dcp.plan.structure import StructureTable
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.writer import RobustWriter
from robust_dcp.storage.writing.engine import WrittenFiles

__all__ = ["OurCoordinator", "SimulatedSave"]


@dataclass
class SimulatedSave:
    """What one simulated save of one coordinator, ours or stock's, took.

    Attributes:
        watch: CPU and wall seconds by step, and memory.
        sent_nbytes: by the other ranks; ``arrived_nbytes``: what of that reached the coordinator.
        returned_nbytes: payloads that the coordinator sent.
        merging_seconds: CPU time of other ranks on the way up to the coordinator, which waits for it. Not in ``watch``.
        metadata_nbytes: of ``.metadata``; ``index_nbytes``: of the index beside it.
        n_written: items that are written, each once.
        outcome: what was done about the plan.
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


class OurCoordinator:
    """Rank 0 of virtual ranks, from its first save on.

    Attributes:
        session: the last save.
        others: the other ranks.
    """

    def __init__(self, payloads: Payloads) -> None:
        PLANS.clear()
        self._payloads = payloads
        self._local = coordinators_local(payloads)
        self.session: SaveSession | None = None
        self.others = OtherRanks(payloads, self._tables)

    def _tables(self) -> Sequence[StructureTable]:
        plan = None if self.session is None else self.session.coordinator
        return () if plan is None else plan.tables

    def save(self, name: SaveName, directory: str) -> SimulatedSave:
        """One save into ``directory``, which is there and empty."""
        made = SimulatedSave()
        watch, writer = made.watch, RobustWriter(directory, threads=FILES_PER_RANK)
        channel = SimulatedChannel(self._payloads, self.others, name, watch)
        session = self.session = SaveSession(channel, directory, on_structure_change="quiet", commits_together=True)

        def describe() -> LocalStructure:
            return self._local

        def write() -> WrittenFiles:
            with watch.paused():
                return written_files(self._local.table, session.rank_plan.kept, session.rank)

        def publish() -> None:
            metadata = session.encoded_metadata(writer.plain_meta())
            watch.lap("metadata")
            writer.directory.publish(metadata, is_checked=lambda: True)  # nobody has written data
            watch.lap("commit")

        watch.start()
        session.agree(describe, leads=True)
        watch.lap("own share")
        session.settle(write)
        session.commit(publish, writer.clean_up)
        watch.lap("cache")
        made.sent_nbytes, made.arrived_nbytes = channel.sent_nbytes, channel.arrived_nbytes
        made.returned_nbytes, made.outcome = channel.returned_nbytes, session.outcome
        made.merging_seconds = channel.merging_seconds
        made.metadata_nbytes = os.path.getsize(os.path.join(directory, METADATA_NAME))
        made.index_nbytes = os.path.getsize(os.path.join(directory, INDEX_NAME))
        made.n_written = 0 if session.coordinator is None else sum(map(len, session.coordinator.kept))
        return made
