"""Makes a new plan: the coordinator's part, and how a rank takes its share from the reply.

This module turns the gathered structures into one reply for each rank. ``agreed_plan`` exchanges both.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import Metadata

from robust_dcp.comm import combined_signature
from robust_dcp.errors import ExchangeError, PlanConflict, StructureChanged, ranks_in_words
from robust_dcp.plan.cache import CachedPlan, CoordinatorPlan, nbytes_of_columns
from robust_dcp.plan.global_plan import (
    GlobalPlan,
    Shares,
    differing_objects,
    make_global_plan,
    merge_tables,
    patch_plan,
    shares_of,
)
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.metadata import MetadataTemplate, stock_metadata
from robust_dcp.plan.rank_plan import (
    RankPlan,
    RankPlanMessage,
    checks_of,
    pack_places,
    pack_some,
    place_items,
    place_items_of_all,
    unpack_places,
)
from robust_dcp.plan.replica_checks import VerifyReplicas, n_classes_of
from robust_dcp.plan.structure import (
    ItemKind,
    StructureDiff,
    StructureMessage,
    StructureTable,
    TableDecoder,
    diff_tables,
    merge_diffs,
)
from robust_dcp.storage.layouts import TORCH, Layout

__all__ = ["apply_plan", "coordinator_plan_of", "plan_for_all"]

logger = logging.getLogger(__name__)

_NO_PLACES: Final[npt.NDArray[np.intp]] = np.empty(0, dtype=np.intp)

_MAX_KEYS = 200
"""How many keys of each kind a reply has at most. This bounds the message if everything has changed."""


def plan_for_all(
    structures: Sequence[StructureMessage | None],
    agreed_signature: bytes,
    base: CachedPlan | None,
    local: LocalStructure,
    *,
    refuse_change: bool,
) -> tuple[CoordinatorPlan, list[RankPlanMessage]]:
    """Make the global plan. Only the coordinator calls this.

    Args:
        structures: what each rank sent; ``None`` from ranks that have the structure in ``base``.
        agreed_signature: the combined signatures of all ranks from the agreement.
        base: the coordinator's cached plan that the decision refers to, if there is one.
        local: the coordinator's own structure, for the options that all ranks share.
        refuse_change: whether a structure that differs from ``base`` is an error.

    Raises:
        PlanConflict: the ranks contradict each other.
        StructureChanged: the structure changed and ``refuse_change`` is true.
    """
    _refuse_other_contexts(structures, base, local)
    known = None if base is None else base.coordinator
    signatures = _signatures(structures, known, agreed_signature)
    senders = [rank for rank, message in enumerate(structures) if message is not None]
    decoder = TableDecoder()
    tables = [_table(rank, message, known, decoder) for rank, message in enumerate(structures)]
    changes = _changes(tables, senders, known)
    if refuse_change and changes:
        raise StructureChanged(
            f"the structure of the state dict is not that of the last committed save: {changes}; "
            'on_structure_change="error" forbids that',
            added=list(changes.added[:_MAX_KEYS]),
            removed=list(changes.removed[:_MAX_KEYS]),
            changed=list(changes.changed)[:_MAX_KEYS],
        )
    patched = None if known is None else _patched(known, tables, changes, local)
    if patched is None:
        plan = make_global_plan(tables, lowest_rank=local.lowest_rank)
        _warn_of_unclaimed(plan)
        shares, contested = _shares_of(plan, local.verify_replicas), plan.contested
        metadata, stock = _metadata_of(plan, local.files, local.layout)
    else:
        shares, metadata = patched
        contested, stock = (_NO_PLACES,) * len(tables), None
    shared = {
        "outcome": "built" if known is None else "patched" if len(senders) < len(tables) else "rebuilt",
        "reason": _reason(senders, changes, is_first=known is None),
        "added": changes.added[:_MAX_KEYS],
        "removed": changes.removed[:_MAX_KEYS],
        "changed": dict(list(changes.changed.items())[:_MAX_KEYS]),
        "n_classes": n_classes_of(shares.n_replicated, local.verify_replicas),
        "differing_objects": dict(list(_differing_objects(tables, structures).items())[:_MAX_KEYS]),
    }
    replies = [
        RankPlanMessage(
            kept=_unless_known(
                shares.kept[rank], len(table), None if message is not None or known is None else known.kept[rank]
            ),
            common_objects=pack_places(shares.common_objects[rank], len(table)),
            replicated=pack_some(shares.replicated[rank], len(table)) if shares.replicated else b"",
            contested=pack_some(contested[rank], len(table)),
            **shared,  # type: ignore[arg-type]
        )
        for rank, (table, message) in enumerate(zip(tables, structures, strict=True))
    ]
    made = _coordinator_plan(shares, signatures, local.context.encode(), metadata, stock, local.verify_replicas)
    made = replace(made, is_contested=any(map(len, contested)))
    return made if known is None or patched is None else _with_stored(made, known), replies


def coordinator_plan_of(
    plan: GlobalPlan,
    signatures: tuple[bytes, ...],
    context: bytes,
    *,
    files: int | None,
    layout: Layout = TORCH,
    verify_replicas: VerifyReplicas = "off",
) -> CoordinatorPlan:
    """What the coordinator keeps of a plan, with the places of all items.

    Args:
        signatures: the signature of each rank's structure.
        files: how many files each rank has; ``None`` if another writer than ours places items.
        layout: the layout of these files.
        verify_replicas: which replicas all ranks compare.
    """
    metadata, stock = _metadata_of(plan, files, layout)
    return _coordinator_plan(_shares_of(plan, verify_replicas), signatures, context, metadata, stock, verify_replicas)


def _coordinator_plan(
    shares: Shares,
    signatures: tuple[bytes, ...],
    context: bytes,
    metadata: MetadataTemplate | None,
    stock: Metadata | None,
    verify_replicas: VerifyReplicas,
) -> CoordinatorPlan:
    return CoordinatorPlan(
        tables=shares.tables,
        signatures=signatures,
        kept=shares.kept,
        common_objects=shares.common_objects,
        nbytes=shares.nbytes,
        context=context,
        metadata=metadata,
        stock_metadata=stock,
        columns_nbytes=nbytes_of_columns(shares.tables, shares.kept, shares.common_objects, shares.names),
        replicated=shares.replicated,
        n_classes=n_classes_of(shares.n_replicated, verify_replicas),
        shares=shares,
    )


def _with_stored(plan: CoordinatorPlan, known: CoordinatorPlan) -> CoordinatorPlan:
    """``plan``, which was made from ``known``. It reuses what ``known`` has encoded, so only changes are encoded."""
    if plan.n_classes != known.n_classes:
        return plan
    columns = [(each.tables, each.kept, each.common_objects, each.replicated) for each in (plan, known)]
    changed = {
        rank
        for now, before in zip(*columns, strict=True)
        for rank, (one, other) in enumerate(zip(now, before, strict=True))
        if one is not other
    }
    return replace(plan, stored_before=known.stored, changed_ranks=tuple(sorted(changed)))


def _shares_of(plan: GlobalPlan, verify_replicas: VerifyReplicas) -> Shares:
    shares = shares_of(plan)
    return replace(shares, replicated=()) if verify_replicas == "off" else shares


def _metadata_of(
    plan: GlobalPlan, files: int | None, layout: Layout
) -> tuple[MetadataTemplate | None, Metadata | None]:
    """The metadata for our writer, and the metadata for another writer. One of them is ``None``."""
    if files is None:
        return None, stock_metadata(plan)
    return MetadataTemplate(plan, place_items_of_all(plan, files=files, layout=layout), layout), None


def _patched(
    known: CoordinatorPlan, tables: Sequence[StructureTable], changes: StructureDiff, local: LocalStructure
) -> tuple[Shares, MetadataTemplate] | None:
    """A plan made from the previous one; ``None`` if that is not possible (see :func:`patch_plan`)."""
    if known.shares is None or known.metadata is None or local.files is None or known.is_contested:
        return None
    if known.context != local.context.encode() or bool(known.replicated) == (local.verify_replicas == "off"):
        return None
    names = frozenset((*changes.added, *changes.removed, *changes.changed))
    patch = patch_plan(known.shares, tables, names, lowest_rank=local.lowest_rank)
    if patch is None:
        return None
    placements = {
        rank: place_items(tables[rank], patch.shares.kept[rank], files=local.files, layout=local.layout)
        for rank in patch.moved
    }
    metadata = known.metadata.patched(patch, placements)
    return None if metadata is None else (patch.shares, metadata)


def _differing_objects(
    tables: Sequence[StructureTable], structures: Sequence[StructureMessage | None]
) -> dict[str, tuple[int, ...]]:
    """Objects with contents that differ, among the ranks that sent digests. One such rank alone has nothing to
    compare."""
    if sum(message is not None for message in structures) < 2:
        return {}
    objects = merge_tables([table.taken(np.flatnonzero(table.kinds == ItemKind.BYTES)) for table in tables])
    return differing_objects(objects, [_digests(*each) for each in zip(tables, structures, strict=True)])


def _warn_of_unclaimed(plan: GlobalPlan) -> None:
    if plan.unclaimed:
        logger.warning(
            "%d tensor(s) have shards without a main replica (replica_id 0) on any rank: %s%s. One copy of each "
            "is saved; stock Megatron leaves them out. validate_access_integrity=True refuses such a state dict",
            len(plan.unclaimed),
            ", ".join(map(repr, plan.unclaimed[:8])),
            f" and {len(plan.unclaimed) - 8} more" if len(plan.unclaimed) > 8 else "",
        )


def apply_plan(reply: RankPlanMessage, local: LocalStructure, cached: CachedPlan | None) -> RankPlan:
    """Take this rank's share from the coordinator's reply."""
    table = local.table
    if reply.kept is None:
        if cached is None:
            raise ValueError("the coordinator refers to a plan that this rank does not have")
        kept = cached.rank_plan.kept
    else:
        kept = unpack_places(reply.kept, len(table))
    return RankPlan(
        kept=kept,
        common_objects=unpack_places(reply.common_objects, len(table)),
        checks=checks_of(reply.replicated, reply.n_classes, reply.contested, len(table)),
        placements=None if local.files is None else place_items(table, kept, files=local.files, layout=local.layout),
    )


def _refuse_other_contexts(
    structures: Sequence[StructureMessage | None], base: CachedPlan | None, local: LocalStructure
) -> None:
    """Check that all ranks save with the same options and versions, since the coordinator plans with its own."""
    own = local.context.encode()
    known = own if base is None or base.coordinator is None else base.coordinator.context
    differences: dict[str, list[int]] = defaultdict(list)
    for rank, message in enumerate(structures):
        theirs = known if message is None else message.context
        if theirs != own:
            differences[local.context.difference(theirs)].append(rank)
    if differences:
        words = "; ".join(f"on {ranks_in_words(ranks)}: {what}" for what, ranks in differences.items())
        raise PlanConflict(
            f"ranks save with other options or versions than the coordinator, {words}. Pass the same to all ranks",
            ranks=sorted(rank for ranks in differences.values() for rank in ranks),
        )


def _signatures(
    structures: Sequence[StructureMessage | None], known: CoordinatorPlan | None, agreed: bytes
) -> tuple[bytes, ...]:
    """The signature of each rank's structure. A rank that sent nothing must have the structure that is known of it."""
    found = tuple(
        message.signature if message is not None else b"" if known is None else known.signatures[rank]
        for rank, message in enumerate(structures)
    )
    if combined_signature(found) != agreed:
        silent = [rank for rank, message in enumerate(structures) if message is None]
        raise ExchangeError(
            f"the structures that the coordinator has are not those that the ranks hold; {len(silent)} ranks did not "
            f"send theirs: {silent[:16]}; save again",
            phase="structures",
            ranks=silent,
        )
    return found


def _table(
    rank: int, message: StructureMessage | None, known: CoordinatorPlan | None, decoder: TableDecoder
) -> StructureTable:
    if message is not None:
        return decoder.decode(message)
    if known is None:
        raise ValueError(f"rank {rank} did not send its structure and there is no plan that has it")
    return known.tables[rank]


def _digests(table: StructureTable, message: StructureMessage | None) -> npt.NDArray[np.uint64]:
    if message is not None:
        return message.digests()
    return np.zeros(int((table.kinds == ItemKind.BYTES).sum()), dtype=np.uint64)


def _changes(tables: Sequence[StructureTable], senders: Sequence[int], known: CoordinatorPlan | None) -> StructureDiff:
    if known is None:
        return StructureDiff()
    return merge_diffs(diff_tables(known.tables[rank], tables[rank]) for rank in senders)


def _reason(senders: Sequence[int], changes: StructureDiff, *, is_first: bool) -> str:
    if is_first:
        return "the coordinator has no plan of a committed save of this kind by this group"
    if not changes:
        return "options, versions or the group have changed"
    return f"on {ranks_in_words(list(senders))}: {changes}"


def _unless_known(kept: npt.NDArray[np.intp], n_items: int, known: npt.NDArray[np.intp] | None) -> bytes | None:
    """The bits of ``kept``; ``None`` if the rank already has them."""
    if known is not None and np.array_equal(known, kept):
        return None
    return pack_places(kept, n_items)
