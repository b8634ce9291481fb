"""Keeps a plan in the index of the checkpoint that it saved, so that a resumed job need not plan again.

This module owns the sections that hold the plan (docs/formats.md), and remembers which checkpoints this process has
loaded. A stored plan is only advice: it is used only if every rank shows the stored signature in the next save. An
index that is damaged or belongs to another group is skipped.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from robust_dcp.comm import combined_signature, decode, encode
from robust_dcp.comm.bundle import Bundler, open_bundles
from robust_dcp.comm.wire import body_of
from robust_dcp.errors import ExchangeError
from robust_dcp.plan.cache import CachedPlan, CoordinatorPlan, GroupKey, StoredPlan
from robust_dcp.plan.global_plan import plan_of_kept
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.planning import coordinator_plan_of
from robust_dcp.plan.rank_plan import RankPlan, checks_of, pack_places, pack_some, place_items, unpack_places
from robust_dcp.plan.structure import ItemKind, StructureMessage, TableDecoder
from robust_dcp.plan.structure.signature import SIGNATURE_NBYTES
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME, is_url
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.index import IndexFile, Section, fitting_index
from robust_dcp.structure_cache import CACHE, StructureCache, Table

__all__ = ["LOADED", "LoadedCheckpoints", "plan_sections", "read_plan"]

logger = logging.getLogger(__name__)

_ITEM_NBYTES = 512  # an upper bound for one item in a structure; real items take much less
_FACTOR = 64  # structures usually compress less than this with zstandard


class _Share(msgspec.Struct, frozen=True):
    """What one rank writes and compares: bits over its items, as in ``RankPlanMessage``."""

    kept: bytes
    common_objects: bytes
    replicated: bytes = b""
    n_classes: int = 1


def plan_sections(group: GroupKey, plan: CoordinatorPlan) -> Mapping[str, Section]:
    """The sections that hold a plan, on the coordinator. This is cheap for a plan that was encoded before or
    patched."""
    return plan.stored.get(lambda: _stored(group, plan)).sections


def _stored(group: GroupKey, plan: CoordinatorPlan) -> StoredPlan:
    before = None if plan.stored_before is None else plan.stored_before.value
    ranks = range(len(plan.tables)) if before is None else plan.changed_ranks
    shares = [b""] * len(plan.tables) if before is None else list(before.shares)
    bundler = Bundler(StructureMessage)
    for rank in ranks:
        table = plan.tables[rank]
        unknown = np.zeros(int((table.kinds == ItemKind.BYTES).sum()), dtype=np.uint64)
        bundler.add(rank, StructureMessage.of(table, unknown, plan.context))
        shares[rank] = encode(
            _Share(
                kept=pack_places(plan.kept[rank], len(table)),
                common_objects=pack_places(plan.common_objects[rank], len(table)),
                replicated=pack_some(plan.replicated[rank], len(table)) if plan.replicated else b"",
                n_classes=plan.n_classes,
            )
        )
    structures = (*(() if before is None else before.structures), bundler.encode())
    values: dict[str, Any] = {
        "ranks": np.array(group, dtype=np.int64),
        "signatures": b"".join(plan.signatures),
        "shares": b"".join(shares),
        "share_ends": np.cumsum(list(map(len, shares)), dtype=np.int64),
        "structures": b"".join(structures),
        "structure_ends": np.cumsum(list(map(len, structures)), dtype=np.int64),
    }
    sections = {name: Section.of(name, each) for name, each in values.items()}
    return StoredPlan(tuple(shares), structures, sections)


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
    of_all = file.read("signatures", 0, n_ranks * SIGNATURE_NBYTES)
    signatures = tuple(of_all[at : at + SIGNATURE_NBYTES] for at in range(0, len(of_all), SIGNATURE_NBYTES))
    coordinator = _coordinator_plan(file, local, signatures) if leads else None
    share = _share_of(file, rank, len(local.table))
    kept = unpack_places(share.kept, len(local.table))
    return CachedPlan(
        plan_id=combined_signature(signatures),
        signature=local.signature.value,
        table=local.table,
        rank_plan=RankPlan(
            kept=kept,
            common_objects=unpack_places(share.common_objects, len(local.table)),
            placements=place_items(local.table, kept, files=local.files, layout=local.layout),
            checks=checks_of(share.replicated, share.n_classes, b"", len(local.table)),
        ),
        variable_places=None,
        coordinator=coordinator,
        loaded_from=directory,
    )


def _share_of(file: IndexFile, rank: int, n_items: int) -> _Share:
    """What ``rank`` writes of its ``n_items`` items."""
    ends = file.column("share_ends")
    data = file.read("shares", ends[rank - 1] if rank else 0, ends[rank])
    return decode(data, _Share, max_nbytes=n_items // 4 + 1_000)  # at most two bits for each item, and some room


def _coordinator_plan(file: IndexFile, local: LocalStructure, signatures: tuple[bytes, ...]) -> CoordinatorPlan:
    n_ranks = len(signatures)
    data = file.read("structures", 0, file.nbytes("structures"))
    messages: dict[int, StructureMessage] = {}
    begin = 0
    ends = file.column("structure_ends")
    for number in range(file.nbytes("structure_ends") // 8):
        bundle, begin = data[begin : ends[number]], ends[number]
        # Compressed data may be a bomb. So first check that it announces no more than this many ranks can need.
        body_of(bundle, max_nbytes=max(_FACTOR * len(bundle), n_ranks * _ITEM_NBYTES * (len(local.table) + 1_000)))
        messages |= open_bundles([bundle], StructureMessage)
    if sorted(messages) != list(range(n_ranks)):
        raise ExchangeError(f"it has the structures of ranks {sorted(messages)[:16]}, not of {n_ranks} ranks")
    decoder = TableDecoder()
    tables = [decoder.decode(messages[rank]) for rank in range(n_ranks)]
    shares = [_share_of(file, rank, len(table)) for rank, table in enumerate(tables)]
    kept = [unpack_places(share.kept, len(table)) for share, table in zip(shares, tables, strict=True)]
    return coordinator_plan_of(
        plan_of_kept(tables, kept),
        signatures,
        local.context.encode(),
        files=local.files,
        layout=local.layout,
        verify_replicas=local.verify_replicas,
    )


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
