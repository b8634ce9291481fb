"""Reads the plan from the index of a checkpoint, so that a resumed job need not plan again.

``Plan.sections`` writes it. This module remembers which checkpoints this process has loaded. A stored plan is only
advice: it is used only if every rank offers the same decisions in the next save. An index that is damaged or belongs to
another group is skipped.
"""

from __future__ import annotations

import logging
import os

from robust_dcp.comm.messages import open_bundles
from robust_dcp.comm.wire import body_of
from robust_dcp.errors import ExchangeError
from robust_dcp.plan.cache import CachedPlan, GroupKey
from robust_dcp.plan.global_plan import plan_of_kept
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.plan import Plan
from robust_dcp.plan.share import Places, Share, place_items, unpack_places
from robust_dcp.plan.structure import StructureMessage, TableDecoder
from robust_dcp.plan.structure.signature import SIGNATURE_NBYTES
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME, is_url
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.index import IndexFile, fitting_index
from robust_dcp.structure_cache import CACHE, StructureCache, Table

__all__ = ["LOADED", "LoadedCheckpoints", "read_plan"]

logger = logging.getLogger(__name__)

_ITEM_NBYTES = 512  # an upper bound for one item in a structure; real items take much less
_FACTOR = 64  # structures usually compress less than this


def read_plan(
    directory: str, group: GroupKey, rank: int, local: LocalStructure, *, leads: bool, disk: Disk | None = None
) -> CachedPlan | None:
    """Read the plan from a checkpoint if it is for this group and this rank's structure.

    Args:
        directory: the directory of the checkpoint.
        rank: this process's rank in ``group``.
        local: this rank's structure.
        leads: whether this rank is the coordinator, which needs the structures of all ranks.

    Returns:
        ``None`` if there is no plan, or it is for another group or structure.

    Raises:
        RobustCheckpointError: the index cannot be read or is damaged.
    """
    index = None if local.files is None else fitting_index(PosixDisk() if disk is None else disk, directory)
    if local.files is None or index is None:
        return None
    file = index.file
    n_ranks = file.nbytes("signatures") // SIGNATURE_NBYTES
    if n_ranks != len(group) or tuple(file.column("ranks").rows(0, n_ranks).tolist()) != group:
        return None
    if file.read("signatures", rank * SIGNATURE_NBYTES, (rank + 1) * SIGNATURE_NBYTES) != local.signature.value:
        return None
    plan_id = file.read("plan_id", 0, SIGNATURE_NBYTES)
    kept = _kept_of(file, rank, len(local.table))
    placements = place_items(local.table, kept, files=local.files, layout=local.layout)
    plan = _plan_of_all(file, local, n_ranks) if leads else None
    if plan is not None and plan.plan_id != plan_id:
        raise ExchangeError("what it says of the ranks is not what was decided")
    share = Share(plan_id, kept, placements, None if plan is None else plan.total_nbytes)
    return CachedPlan(share, local.signature.value, local.table, plan, loaded_from=directory)


def _kept_of(file: IndexFile, rank: int, n_items: int) -> Places:
    """What ``rank`` writes of its ``n_items`` items."""
    ends = file.column("share_ends")
    begin, end = ends[rank - 1] if rank else 0, ends[rank]
    if end - begin > n_items:  # it has a bit for each item; do not read what cannot be that
        raise ExchangeError(f"it has {end - begin} bytes of bits for the {n_items} items of rank {rank}")
    return unpack_places(file.read("shares", begin, end), n_items)


def _plan_of_all(file: IndexFile, local: LocalStructure, n_ranks: int) -> Plan:
    bundle = file.read("structures", 0, file.nbytes("structures"))
    # Compressed data may be a bomb. So first check that it announces no more than this many ranks can need.
    body_of(bundle, max_nbytes=max(_FACTOR * len(bundle), n_ranks * _ITEM_NBYTES * (len(local.table) + 1_000)))
    messages = open_bundles([bundle], StructureMessage)
    if sorted(messages) != list(range(n_ranks)):
        raise ExchangeError(f"it has the structures of ranks {sorted(messages)[:16]}, not of {n_ranks} ranks")
    decoder = TableDecoder()
    tables = [decoder.decode(messages[rank]) for rank in range(n_ranks)]
    kept = [_kept_of(file, rank, len(table)) for rank, table in enumerate(tables)]
    of_all = file.read("signatures", 0, n_ranks * SIGNATURE_NBYTES)
    signatures = [of_all[at : at + SIGNATURE_NBYTES] for at in range(0, len(of_all), SIGNATURE_NBYTES)]
    return Plan.of(plan_of_kept(tables, kept), signatures, local)


class LoadedCheckpoints:
    """The checkpoints that this process loaded last. They may hold plans for what it will save.

    Args:
        cache: the cache that holds them in a table; ``None`` for a cache of its own.
        max_entries: how many checkpoints to remember.
    """

    def __init__(self, cache: StructureCache | None = None, *, max_entries: int = 4) -> None:
        self._directories: Table[str, None] = (cache or StructureCache()).table(
            "loaded checkpoints", lambda directory, _: len(directory), max_nbytes=1 << 20, max_entries=max_entries
        )

    def add(self, directory: str) -> None:
        """Remember that a checkpoint was loaded from ``directory``."""
        if not is_url(directory):
            self._directories.put(directory, None)

    def clear(self) -> None:
        self._directories.clear()

    def find_plan(self, group: GroupKey, rank: int, local: LocalStructure, *, leads: bool) -> CachedPlan | None:
        """Find a plan for this rank's structure in these checkpoints, the latest first. Each checkpoint is used
        once."""
        for directory, _ in self._directories.latest_first():
            try:
                plan = read_plan(directory, group, rank, local, leads=leads)
            except Exception as error:  # the plan is only advice: whatever is wrong with it must not fail the save
                logger.warning("planning anew, without the plan in %s: %s", os.path.join(directory, INDEX_NAME), error)
                self._directories.forget(directory)
                continue
            if plan is not None:
                self._directories.forget(directory)
                return plan
        return None


LOADED = LoadedCheckpoints(CACHE)
"""The checkpoints that this process has loaded."""
