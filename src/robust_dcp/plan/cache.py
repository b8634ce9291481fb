"""The plans that this process has saved by, kept for the next save, and those of the checkpoints that it has loaded.

A plan counts only after the save that made it has been committed. Inside stock ``save`` only the coordinator learns of
the commit. The other ranks keep the plan before, but no save uses it unless the coordinator offers the same plan. A
plan in a loaded checkpoint is only advice too: it is used only if every rank offers the same decisions in the next
save. An index that is damaged or belongs to another group is skipped.

A changed structure is compared with the last one of its *kind*. Example: a job saves a model and a data loader in turn.
They are two kinds. The model has not changed just because the loader was saved in between. Plans are of one kind if the
caller gave them one name (``kind=``), or if one was made after the other and has most names in common with it. Only the
coordinator knows kinds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.items import Items
from robust_dcp.plan.plan import LocalStructure, Plan, Share, stored_plan
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME
from robust_dcp.storage.index.stored_index import open_index
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.structure_cache import Cache

logger = logging.getLogger(__name__)

NAMED: Final = "="
"""A kind that the caller has named begins with this. Others are named after the identity of their first plan."""

GroupKey = tuple[int, ...]
"""The global ranks of a process group, in group order. A plan depends on nothing else of its group."""


class LastSave(msgspec.Struct, frozen=True):
    """What a rank has written in the last save by a plan.

    Attributes:
        checkpoint, mark: the save.
        parameters, others: what the rank has written, as in ``WrittenFiles``.
        is_told: whether the log has said that parameters stay as they are.
    """

    checkpoint: str
    mark: int
    parameters: bytes
    others: bytes
    is_told: bool


class KeptPlan(msgspec.Struct, frozen=True, eq=False):
    """What a rank keeps of a plan.

    Attributes:
        share: what this rank writes. ``placements``: where.
        signature: the signature of this rank's structure.
        plan: the plan of all ranks, on the coordinator.
        variable_places: int64 ``[v, 2]``, offset and length of this rank's items of variable size in the last save.
            ``None`` if this rank does not know that a save by this plan was committed.
        loaded_from: the checkpoint in which the plan was found; empty if this process made it.
        kind: on the coordinator, the kind of what is saved: the caller's name for it, or the identity of the first plan
            of this kind.
        last: the last save by this plan, which is known to be committed only if all ranks name the same one.
    """

    share: Share
    placements: Placements
    signature: bytes
    plan: Plan | None = None
    variable_places: npt.NDArray[np.int64] | None = None
    loaded_from: str = ""
    kind: str = ""
    last: LastSave | None = None


PLANS: Final[Cache[tuple[GroupKey, bytes, str], KeptPlan]] = Cache(max_nbytes=2 << 30)
"""The plans that this process used last, over all groups. The kind is part of the key, because two kinds may hold the
same and still change independently."""

LOADED: Final[Cache[str, None]] = Cache(max_nbytes=1 << 20, max_entries=4)
"""The directories of checkpoints that this process loaded last. They may hold plans for what it will save."""


def plans_of(group: GroupKey) -> list[KeptPlan]:
    """The plans of a group, the latest first.

    A search is no use of a plan. A plan counts as used when its save is committed and it is put in again."""
    return [kept for key, kept in PLANS.latest_first() if key[0] == group]


def keep_plan(group: GroupKey, kept: KeptPlan) -> None:
    """Keep a plan as the latest of its group. Of each kind there are two at most, because all ranks' items take memory:
    a job may save two structures in turn, and a hundred changes take no more memory than one."""
    nbytes = 0 if kept.plan is None else kept.plan.memory_nbytes
    # Placements have 20 bytes for each item at most.
    PLANS.put((group, kept.share.plan_id, kept.kind), kept, nbytes + 20 * kept.share.n_items)
    of_kind = [key for key, each in PLANS.latest_first() if each.plan and (key[0], key[2]) == (group, kept.kind)]
    for key in of_kind[2:]:
        PLANS.forget(key)


def forget_plan(group: GroupKey, plan_id: bytes) -> None:
    """Drop a plan, whatever its kind is, if it is there."""
    for key, _ in PLANS.latest_first():
        if key[:2] == (group, plan_id):
            PLANS.forget(key)


def plan_of(group: GroupKey, rank: int, local: LocalStructure, *, leads: bool) -> KeptPlan | None:
    """The plan to offer: that of this rank's structure, or else that of a loaded checkpoint, or else the latest."""
    plans = plans_of(group)
    fitting = next((each for each in plans if each.signature == local.signature.value), None)
    return fitting or _plan_of_loaded(group, rank, local, leads=leads) or next(iter(plans), None)


def last_of_kind(group: GroupKey, named: str | None, ranks: Sequence[Items]) -> KeptPlan | None:
    """On the coordinator, the last plan of the kind of these items of all ranks; ``None`` for a new kind.

    Without a name from the caller, it is the plan that has most names in common with the items. They must be half of
    the names of the larger of the two, or nearly all of the smaller. So a structure that grew is still of its kind, and
    one that shares only a step counter is not. A name counts once for each rank that holds it.

    Args:
        named: the caller's name of the kind.
    """
    last: dict[str, KeptPlan] = {}
    for kept in plans_of(group):
        if kept.plan is not None:
            last.setdefault(kept.kind, kept)
    if named is not None and NAMED + named in last:
        return last[NAMED + named]
    n_now = sum(len(items.names) for items in ranks)
    best, most = None, 0
    for kind, kept in last.items():
        if kept.plan is None or kind.startswith(NAMED):
            continue
        before = kept.plan.items
        n_shared = sum(
            len(one.names) if one.names is other.names else len(set(one.names).intersection(other.names))
            for one, other in zip(before, ranks, strict=True)
        )
        n_before = sum(len(items.names) for items in before)
        is_alike = 2 * n_shared >= max(n_before, n_now) or 10 * n_shared >= 9 * min(n_before, n_now)
        if n_shared > most and is_alike:
            best, most = kept, n_shared
    return best


def _plan_of_loaded(group: GroupKey, rank: int, local: LocalStructure, *, leads: bool) -> KeptPlan | None:
    """A plan for this rank's structure in the checkpoints that were loaded, the latest first. Each is used once."""
    for directory, _ in LOADED.latest_first():
        try:
            index = open_index(Disk(), directory)
            stored = None if index is None else stored_plan(index.file, group, rank, local, leads=leads)
            if stored is None:
                continue
            share, plan = stored
            placements = local.place(share)
        except Exception as error:  # the plan is only advice: whatever is wrong with it must not fail the save
            logger.warning("planning anew, without the plan in %s: %s", os.path.join(directory, INDEX_NAME), error)
            LOADED.forget(directory)
            continue
        LOADED.forget(directory)
        signature, kind = local.signature.value, share.plan_id.hex()
        kept = KeptPlan(share, placements, signature, plan, loaded_from=directory, kind=kind)
        keep_plan(group, kept)
        return kept
    return None
