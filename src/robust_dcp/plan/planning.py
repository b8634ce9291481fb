"""The coordinator's part of a plan that is made anew, and how a rank takes its share from the reply.

Owns the step from gathered structures to one reply for each rank; the exchanges around it are ``session``'s.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from robust_dcp.comm import combined_signature
from robust_dcp.errors import ExchangeError, PlanConflict, StructureChanged, ranks_in_words
from robust_dcp.plan.cache import CachedPlan, CoordinatorPlan, nbytes_of_columns
from robust_dcp.plan.global_plan import GlobalPlan, differing_objects, make_global_plan
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

_MAX_KEYS = 200
"""Keys of each kind that a reply spells out: a bound on what travels when everything has changed."""


def plan_for_all(
    structures: Sequence[StructureMessage | None],
    agreed_signature: bytes,
    base: CachedPlan | None,
    local: LocalStructure,
    *,
    refuse_change: bool,
) -> tuple[CoordinatorPlan, list[RankPlanMessage]]:
    """Make the global plan; on the coordinator only.

    Args:
        structures: what each rank sent; ``None`` from ranks whose structure is the one in ``base``.
        agreed_signature: what the signatures of all ranks combined to in the agreement.
        base: the coordinator's cached plan that the decision refers to, if any.
        local: the coordinator's own structure, for the options that all ranks share.
        refuse_change: whether a structure other than that of ``base`` is an error.

    Raises:
        PlanConflict, StructureChanged.
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
    plan = make_global_plan(tables, lowest_rank=local.lowest_rank)
    _warn_of_unclaimed(plan)
    verifies = local.verify_replicas != "off"
    digests = [_digests(table, message) for table, message in zip(tables, structures, strict=True)]
    shared = {
        "outcome": "built" if known is None else "patched" if len(senders) < len(tables) else "rebuilt",
        "reason": _reason(senders, changes, is_first=known is None),
        "added": changes.added[:_MAX_KEYS],
        "removed": changes.removed[:_MAX_KEYS],
        "changed": dict(list(changes.changed.items())[:_MAX_KEYS]),
        "n_classes": n_classes_of(plan.n_replicated, local.verify_replicas),
        "differing_objects": dict(list(differing_objects(plan.columns, digests).items())[:_MAX_KEYS]),
    }
    replies = [
        RankPlanMessage(
            kept=_unless_known(
                plan.kept[rank], len(table), None if message is not None or known is None else known.kept[rank]
            ),
            common_objects=pack_places(plan.common_objects[rank], len(table)),
            replicated=pack_some(plan.replicated[rank], len(table)) if verifies else b"",
            contested=pack_some(plan.contested[rank], len(table)),
            **shared,  # type: ignore[arg-type]
        )
        for rank, (table, message) in enumerate(zip(tables, structures, strict=True))
    ]
    made = coordinator_plan_of(
        plan,
        signatures,
        local.context.encode(),
        files=local.files,
        layout=local.layout,
        verify_replicas=local.verify_replicas,
    )
    return made, replies


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
        signatures: of each rank's structure.
        files: number of files of each rank; ``None`` where another writer than ours places items.
        layout: of these files.
        verify_replicas: what all ranks compare.
    """
    metadata = None
    if files is not None:
        metadata = MetadataTemplate(plan, place_items_of_all(plan, files=files, layout=layout), layout)
    return CoordinatorPlan(
        tables=plan.columns.tables,
        signatures=signatures,
        kept=plan.kept,
        common_objects=plan.common_objects,
        nbytes=plan.nbytes,
        context=context,
        metadata=metadata,
        stock_metadata=stock_metadata(plan) if metadata is None else None,
        columns_nbytes=nbytes_of_columns(plan.columns.tables, plan.kept, plan.common_objects),
        replicated=() if verify_replicas == "off" else plan.replicated,
        n_classes=n_classes_of(plan.n_replicated, verify_replicas),
        is_contested=any(map(len, plan.contested)),
    )


def _warn_of_unclaimed(plan: GlobalPlan) -> None:
    if plan.unclaimed:
        logger.warning(
            "%d tensor(s) have shards of which no rank holds the main replica (replica_id 0): %s%s. One copy of each "
            "is saved; stock Megatron leaves them out. validate_access_integrity=True refuses such a state dict",
            len(plan.unclaimed),
            ", ".join(map(repr, plan.unclaimed[:8])),
            f" and {len(plan.unclaimed) - 8} more" if len(plan.unclaimed) > 8 else "",
        )


def apply_plan(reply: RankPlanMessage, local: LocalStructure, cached: CachedPlan | None) -> RankPlan:
    """This rank's share, from the coordinator's reply."""
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
    """All ranks must save with the same options and versions: the coordinator plans for them by its own."""
    known = local.context.encode() if base is None or base.coordinator is None else base.coordinator.context
    differences: dict[str, list[int]] = defaultdict(list)
    for rank, message in enumerate(structures):
        difference = local.context.difference(known if message is None else message.context)
        if difference:
            differences[difference].append(rank)
    if differences:
        words = "; ".join(f"on {ranks_in_words(ranks)}: {what}" for what, ranks in differences.items())
        raise PlanConflict(
            f"ranks save with other options or versions than the coordinator, {words}. Pass the same to all ranks",
            ranks=sorted(rank for ranks in differences.values() for rank in ranks),
        )


def _signatures(
    structures: Sequence[StructureMessage | None], known: CoordinatorPlan | None, agreed: bytes
) -> tuple[bytes, ...]:
    """The signature of each rank's structure: a rank that sent nothing must have shown the one that is known of it."""
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
    """The bits of ``kept``, or ``None`` where the rank has them already."""
    if known is not None and np.array_equal(known, kept):
        return None
    return pack_places(kept, n_items)
