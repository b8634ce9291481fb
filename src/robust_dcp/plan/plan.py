"""The plan of one save, as its coordinator makes it from the structures of all ranks.

A plan follows from the structures alone: every coordinator makes the same plan of the same structures, also after a
restart. So each change makes a whole new plan.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import Metadata

from robust_dcp.comm.messages import Bundler
from robust_dcp.errors import ExchangeError, PlanConflict, StructureChanged, ranks_in_words
from robust_dcp.plan.global_plan import GlobalPlan, by_rank, make_global_plan
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.metadata import MetadataTemplate, stock_metadata
from robust_dcp.plan.share import pack_places, place_items_of_all, plan_id_of
from robust_dcp.plan.structure import (
    StructureDiff,
    StructureMessage,
    StructureTable,
    TableDecoder,
    diff_tables,
    merge_diffs,
)
from robust_dcp.storage.index import Section

__all__ = ["Gathered", "Plan", "PlanOutcome", "PlanReply", "make_plan"]

logger = logging.getLogger(__name__)

Places = npt.NDArray[np.intp]

PlanOutcome = Literal["built", "reused", "rebuilt"]

_MAX_KEYS = 200
"""How many keys of each kind a reply has at most. This bounds the message if everything has changed."""


class PlanReply(msgspec.Struct, frozen=True):
    """What the coordinator tells one rank about a new plan.

    Attributes:
        plan_id: the identity of the plan.
        kept: bits over the rank's items: those that it writes.
        compared: bits over the rank's items: those whose contents are compared with those of other ranks.
        is_compared: whether anything is compared on any rank.
        outcome: ``built`` (the coordinator had no plan of this kind), ``rebuilt`` (it no longer fits), or ``reused``
            (the coordinator has a plan for these structures, though not all ranks have offered it).
        reason: why, in words.
        total_nbytes: as in :class:`~robust_dcp.plan.share.Share`.
        added, removed, changed: the keys of all ranks that differ from the last plan (bounded).
    """

    plan_id: bytes
    kept: bytes
    compared: bytes
    is_compared: bool
    outcome: PlanOutcome
    reason: str
    total_nbytes: int
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: dict[str, str] = {}


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of all ranks, which only the coordinator has.

    Attributes:
        plan_id: the identity of the plan.
        ranks: the global ranks of the group.
        tables, signatures: the structure of each rank, and its signature.
        kept: for each rank the places in its table of the items that it writes, ascending.
        nbytes: bytes of tensor data that all ranks write together.
        total_nbytes: bytes of the files of all ranks, without items of variable size.
        context: :meth:`PlanContext.encode`, which is the same on all ranks.
        metadata: makes ``.metadata``; ``None`` if another writer than ours places the items.
        stock_metadata: DCP's own object for such a writer.
        is_contested: whether several ranks claim the main replica of some chunk.
    """

    plan_id: bytes
    ranks: tuple[int, ...]
    tables: tuple[StructureTable, ...]
    signatures: tuple[bytes, ...]
    kept: tuple[Places, ...]
    nbytes: int
    total_nbytes: int
    context: bytes
    metadata: MetadataTemplate | None
    stock_metadata: Metadata | None
    is_contested: bool

    @classmethod
    def of(cls, decided: GlobalPlan, signatures: Sequence[bytes], local: LocalStructure) -> Plan:
        """The plan of these decisions, with the places of all items.

        Args:
            decided: which rank writes what.
            signatures: the signature of each rank's structure.
            local: the coordinator's own structure, for the options that all ranks share.
        """
        tables = decided.columns.tables
        placements = (
            None if local.files is None else place_items_of_all(decided, files=local.files, layout=local.layout)
        )
        bits = [pack_places(kept, len(table)) for kept, table in zip(decided.kept, tables, strict=True)]
        return cls(
            plan_id=plan_id_of(signatures, bits, placements),
            ranks=local.context.ranks,
            tables=tables,
            signatures=tuple(signatures),
            kept=decided.kept,
            nbytes=decided.nbytes,
            total_nbytes=sum(sum(each.file_nbytes) for each in placements or ()),
            context=local.context.encode(),
            metadata=None if placements is None else MetadataTemplate(decided, placements, local.layout),
            stock_metadata=stock_metadata(decided) if placements is None else None,
            is_contested=bool(len(decided.contested)),
        )

    def replies_for_reuse(self) -> list[PlanReply]:
        """The reply for each rank, if this plan is used once more though not all ranks have offered it."""
        reason = "the structures are those of an earlier save, which some ranks had not offered"
        return [
            PlanReply(self.plan_id, pack_places(kept, len(table)), b"", False, "reused", reason, self.total_nbytes)
            for kept, table in zip(self.kept, self.tables, strict=True)
        ]

    @cached_property
    def sections(self) -> Mapping[str, Section]:
        """The sections that hold this plan in the index of each checkpoint that is saved by it."""
        bundler = Bundler(StructureMessage)
        for rank, table in enumerate(self.tables):
            bundler.add(rank, StructureMessage.of(table, self.context, signature=b""))
        shares = [pack_places(kept, len(table)) for kept, table in zip(self.kept, self.tables, strict=True)]
        values: dict[str, Any] = {
            "plan_id": self.plan_id,
            "ranks": np.array(self.ranks, dtype=np.int64),
            "signatures": b"".join(self.signatures),
            "shares": b"".join(shares),
            "share_ends": np.cumsum(list(map(len, shares)), dtype=np.int64),
            "structures": bundler.encode(),
        }
        return {name: Section.of(name, each) for name, each in values.items()}

    @property
    def memory_nbytes(self) -> int:
        """Roughly how much memory this takes. Columns that ranks share count once."""
        columns = {id(column): column.nbytes for table in self.tables for column in table.columns}
        columns |= {id(kept): kept.nbytes for kept in self.kept}
        emitted = 0 if self.metadata is None else self.metadata.nbytes
        stored = sum(len(section.data) for section in vars(self).get("sections", {}).values())
        return sum(columns.values()) + emitted + stored


class Gathered(NamedTuple):
    """The structures of all ranks, as the coordinator has them.

    Attributes:
        tables, signatures: the structure of each rank, and its signature.
        senders: the ranks that have sent theirs. Of the others it is that of the plan that all of them have offered.
    """

    tables: list[StructureTable]
    signatures: list[bytes]
    senders: list[int]

    @classmethod
    def of(cls, messages: Sequence[StructureMessage | None], offered: Plan | None, local: LocalStructure) -> Gathered:
        """Decode what ranks have sent, and check that all save with the coordinator's options and versions.

        Args:
            messages: what each rank sent; ``None`` from ranks that have the structure in ``offered``.
            offered: the plan that the coordinator has offered.
            local: the coordinator's own structure.

        Raises:
            ExchangeError: a message is malformed, or missing.
            PlanConflict: ranks have other options or versions.
        """
        silent = [rank for rank, message in enumerate(messages) if message is None]
        if silent and offered is None:
            raise ExchangeError(
                f"{ranks_in_words(silent)} did not send the structure, and the coordinator has no plan that holds it; "
                "save again",
                phase="structures",
                ranks=silent,
            )
        _refuse_other_contexts(messages, offered, local)
        known_tables, known_signatures = ((), ()) if offered is None else (offered.tables, offered.signatures)
        decoder = TableDecoder()
        return cls(
            [known_tables[rank] if each is None else decoder.decode(each) for rank, each in enumerate(messages)],
            [known_signatures[rank] if each is None else each.signature for rank, each in enumerate(messages)],
            [rank for rank, message in enumerate(messages) if message is not None],
        )


def make_plan(
    gathered: Gathered,
    known: Plan | None,
    local: LocalStructure,
    *,
    refuse_change: bool = False,
    compares: bool = True,
) -> tuple[Plan, GlobalPlan, list[PlanReply]]:
    """Make the plan of all ranks, and the reply for each. Only the coordinator calls this.

    Args:
        gathered: the structures of all ranks.
        known: the last plan of this kind, which the new structures are compared with; ``None`` if there is none.
        local: the coordinator's own structure, for the options that all ranks share.
        refuse_change: whether a structure that differs from ``known`` is an error.
        compares: whether all replicas of objects and small tensors are compared, and not only contested ones.

    Raises:
        PlanConflict: the ranks contradict each other.
        StructureChanged: the structure changed and ``refuse_change`` is true.
    """
    tables = gathered.tables
    changes = StructureDiff()
    if known is not None:
        changes = merge_diffs(
            diff_tables(*each) for each in zip(known.tables, tables, strict=True) if each[0] is not each[1]
        )
    if refuse_change and changes:
        raise StructureChanged(
            f"the structure of the state dict is not that of the last committed save: {changes}; "
            'on_structure_change="error" forbids that',
            added=list(changes.added[:_MAX_KEYS]),
            removed=list(changes.removed[:_MAX_KEYS]),
            changed=list(changes.changed)[:_MAX_KEYS],
        )
    decided = make_global_plan(tables, lowest_rank=local.lowest_rank)
    if not compares:
        decided = replace(decided, compared=decided.contested)
    _warn_of_unclaimed(decided)
    plan = Plan.of(decided, gathered.signatures, local)
    compared = by_rank(decided.columns, decided.compared)
    replies = [
        PlanReply(
            plan_id=plan.plan_id,
            kept=pack_places(kept, len(table)),
            compared=pack_places(own, len(table)) if len(own) else b"",
            is_compared=bool(len(decided.compared)),
            outcome="built" if known is None else "rebuilt",
            reason=_reason(gathered.senders, changes, is_first=known is None),
            total_nbytes=plan.total_nbytes,
            added=changes.added[:_MAX_KEYS],
            removed=changes.removed[:_MAX_KEYS],
            changed=dict(list(changes.changed.items())[:_MAX_KEYS]),
        )
        for table, kept, own in zip(tables, decided.kept, compared, strict=True)
    ]
    return plan, decided, replies


def _warn_of_unclaimed(plan: GlobalPlan) -> None:
    if plan.unclaimed:
        logger.warning(
            "%d tensor(s) have shards without a main replica (replica_id 0) on any rank: %s%s. One copy of each "
            "is saved; stock Megatron leaves them out. validate_access_integrity=True refuses such a state dict",
            len(plan.unclaimed),
            ", ".join(map(repr, plan.unclaimed[:8])),
            f" and {len(plan.unclaimed) - 8} more" if len(plan.unclaimed) > 8 else "",
        )


def _refuse_other_contexts(
    messages: Sequence[StructureMessage | None], offered: Plan | None, local: LocalStructure
) -> None:
    """Check that all ranks save with the same options and versions, since the coordinator plans with its own."""
    own = local.context.encode()
    differences: dict[str, list[int]] = defaultdict(list)
    for rank, message in enumerate(messages):
        theirs = message.context if message is not None else own if offered is None else offered.context
        if theirs != own:
            differences[local.context.difference(theirs)].append(rank)
    if differences:
        words = "; ".join(f"on {ranks_in_words(ranks)}: {what}" for what, ranks in differences.items())
        raise PlanConflict(
            f"ranks save with other options or versions than the coordinator, {words}. Pass the same to all ranks",
            ranks=sorted(rank for ranks in differences.values() for rank in ranks),
        )


def _reason(senders: Sequence[int], changes: StructureDiff, *, is_first: bool) -> str:
    if is_first:
        return "the coordinator has no plan of a committed save of this kind by this group"
    if not changes:
        return f"no key has changed; {ranks_in_words(list(senders))} did not have the plan, or options have changed"
    return f"on {ranks_in_words(list(senders))}: {changes}"
