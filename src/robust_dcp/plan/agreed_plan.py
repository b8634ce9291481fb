"""The plan of one save on one rank: how all ranks agree on it, and what is kept of it for the next save.

This module owns the exchanges from structures to plan, and every use of the plan cache. ``session`` calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.comm import Agreement, Channel, Offer
from robust_dcp.errors import ExchangeError, PlanConflict
from robust_dcp.plan.cache import PLANS, CachedPlan, kind_called
from robust_dcp.plan.global_plan import Differing, GlobalPlan, find_differing
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.plan import Gathered, Plan, PlanOutcome, PlanReply, make_plan
from robust_dcp.plan.share import Share, place_items, unpack_places
from robust_dcp.plan.stored_plan import LOADED
from robust_dcp.plan.structure import StructureDiff, StructureMessage

__all__ = ["AgreedPlan", "OnReplicaMismatch", "OnStructureChange", "may_reuse", "offer_of", "sends_structure"]

OnStructureChange = Literal["rebuild", "error", "quiet"]
OnReplicaMismatch = Literal["warn", "error", "ignore"]

Places = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)

MATCHES = 1
"""Flag of an offer: the rank's structure is the one that the offered plan was made for."""

HAS_PLAN = 2
"""Flag of an offer: this rank was the coordinator of the offered plan, and has the plan of all ranks."""

LEADS = 4
"""Flag of an offer: the caller of the save made this rank the coordinator."""

NEEDS_ROOM = 8
"""Flag of an offer: this rank is not sure that its disks have room for the files of all ranks."""

_NO_PLAN = Offer().plan_id

_SHOWN = 8
_MAX_DIFFERING = 200
"""How many differing values the coordinator tells the other ranks."""


class Digests(msgspec.Struct, frozen=True):
    """uint64 digests of a rank's values that are compared, in the order of its items. Copies have the same bytes."""

    digests: bytes


class _Differing(msgspec.Struct, frozen=True):
    """The values that differ between ranks, by key (bounded), with all ranks that hold them; and what to say."""

    ranks: dict[str, tuple[int, ...]] = {}
    words: str = ""


def offer_of(plan: CachedPlan | None, local: LocalStructure, *, leads: bool, mark: int = 0) -> Offer:
    """A rank's offer: the plan that it would use, which need not fit the structure."""
    flags, told = (LEADS, mark) if leads else (0, 0)
    if plan is None:
        return Offer(flags=flags, told=told)
    if plan.signature == local.signature.value:
        flags |= MATCHES
    if plan.plan is not None:
        flags |= HAS_PLAN
    return Offer(plan_id=plan.plan_id, flags=flags, told=told)


def may_reuse(agreement: Agreement, coordinator_rank: int) -> bool:
    """Whether the plan still holds on every rank. Each rank decides alone, from the same bytes, so all agree.

    It holds if every rank offers the same decisions, says that its structure is the one that they were made for, and
    the coordinator has the plan of all ranks.
    """
    return (
        agreement.same_plan_id
        and agreement.plan_id != _NO_PLAN
        and agreement.all_have(MATCHES)
        and agreement.first_rank(HAS_PLAN) == coordinator_rank
    )


def sends_structure(agreement: Agreement, own: Offer, coordinator_rank: int) -> bool:
    """Whether a rank has to send its structure. It need not if the coordinator has offered a plan that holds it."""
    is_known = agreement.same_plan_id or coordinator_rank == 0  # what rank 0 has offered is known to all
    if not is_known or agreement.plan_id == _NO_PLAN or agreement.first_rank(HAS_PLAN) != coordinator_rank:
        return True
    return own.plan_id != agreement.plan_id or not own.flags & MATCHES


@dataclass(eq=False)
class AgreedPlan:
    """The plan of one save, from :meth:`agree` to :meth:`keep` or :meth:`forget`.

    Args:
        channel: the channel to the other ranks. After :meth:`agree` its coordinator is the rank that plans and commits.
        checkpoint, on_structure_change, on_replica_mismatch, kind: as in the planner and the session.

    Attributes:
        leads: whether the caller made this rank the coordinator. ``n_leaders`` says how many ranks were made it.
        checks_room: whether ranks have to find out together if there is room for the save. A save by a known plan does
            so only if room is short.
        may_be_writing: whether some rank may have the plan already, even if others are not there yet.
        local: what this rank holds. ``share``: what it writes of that. ``plan``: the plan of all ranks, on the
            coordinator only.
        outcome, reason, changes: how the plan was made.
        differing_replicas: values with contents that differ between ranks, and the ranks that hold them. They are
            compared only when a plan is made.
    """

    channel: Channel
    checkpoint: str
    on_structure_change: OnStructureChange = "rebuild"
    on_replica_mismatch: OnReplicaMismatch = "warn"
    kind: str | None = None

    leads: bool = field(default=True, init=False)
    n_leaders: int = field(default=0, init=False)
    checks_room: bool = field(default=True, init=False)
    may_be_writing: bool = field(default=False, init=False)
    local: LocalStructure = field(init=False)
    share: Share = field(init=False)
    plan: Plan | None = field(default=None, init=False)
    outcome: PlanOutcome = field(default="built", init=False)
    reason: str = field(default="", init=False)
    changes: StructureDiff | None = field(default=None, init=False)
    differing_replicas: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False)
    _cached: CachedPlan | None = field(default=None, init=False)
    _kind: str = field(default="", init=False)

    @property
    def known_places(self) -> Places | None:
        """Where this rank's items of variable size were in the last save with this plan, if the coordinator knows."""
        return self._cached.variable_places if self.outcome == "reused" and self._cached is not None else None

    @property
    def places_of_all(self) -> tuple[Places, ...] | None:
        """On the coordinator, the same of every rank."""
        return self._cached.places_of_all if self.outcome == "reused" and self._cached is not None else None

    def agree(
        self,
        describe: Callable[[], LocalStructure],
        *,
        leads: bool,
        mark: int = 0,
        has_ample_room: Callable[[int], bool] = lambda nbytes: False,
    ) -> int:
        """Agree with all ranks. The arguments and errors are those of ``SaveSession.agree``.

        Args:
            mark: the mark that this rank proposes for the save.
            has_ample_room: whether this rank's disks have room for that many bytes, and a good deal more.

        Returns:
            The mark of the rank that leads.
        """
        self.leads = leads

        own: list[Offer] = []

        def offer_own() -> Offer:
            self.local = describe()
            self._look_into_loaded_checkpoints()
            if self.local.files is not None:
                # Another storage writer does not tell whether its checkpoint was committed, so its plans are not kept.
                ranks = self.channel.ranks
                self._cached = PLANS.find(ranks, self.local.signature.value) or PLANS.latest(ranks)
            self.may_be_writing = self._cached is not None
            offer = offer_of(self._cached, self.local, leads=leads, mark=mark)
            total_nbytes = None if self._cached is None else self._cached.share.total_nbytes
            if total_nbytes is None or not has_ample_room(total_nbytes):
                offer = replace(offer, flags=offer.flags | NEEDS_ROOM)
            own.append(offer)
            return offer

        # Under rank 0, because which rank leads is not known yet.
        agreement = self.channel.led_by(0).agree(self.phase("agree"), offer_own)
        self.n_leaders = agreement.count(LEADS)
        leader = agreement.first_rank(LEADS)
        # Stock ``save`` makes one rank the coordinator, not always rank 0. With ``no_dist=True`` each rank is one.
        if leader is not None and self.n_leaders == 1:
            self.channel = self.channel.led_by(leader)
        if self._cached is not None and may_reuse(agreement, self.channel.coordinator_rank):
            self.outcome = "reused"
            self.checks_room = agreement.count(NEEDS_ROOM) > 0
            self.share = self._cached.share
            self.plan = self._cached.plan
            self._kind = self._cached.kind
            self.reason = "no rank's structure has changed"
            if self._cached.loaded_from:
                self.reason += f" since {self._cached.loaded_from}"
        else:
            self._make_plan(sends_structure(agreement, own[0], self.channel.coordinator_rank))
        return agreement.told

    def _look_into_loaded_checkpoints(self) -> None:
        """If this process has no plan for this structure, look for one in the checkpoints that it has loaded."""
        ranks, rank = self.channel.ranks, self.channel.rank
        if self.local.files is None or PLANS.find(ranks, self.local.signature.value) is not None:
            return
        plan = LOADED.find_plan(ranks, rank, self.local, leads=self.leads)
        if plan is not None:
            PLANS.put(ranks, replace(plan, kind=plan.plan_id.hex()))

    def _make_plan(self, sends: bool) -> None:
        structures = self.channel.gather(
            self.phase("structures"),
            lambda: self.local.to_message() if sends else None,
            StructureMessage,
        )
        decided: list[GlobalPlan] = []

        def reply_to_all() -> list[PlanReply]:
            ranks, offered = self.channel.ranks, None if self._cached is None else self._cached.plan
            gathered = Gathered.of(structures or [], offered, self.local)
            again = None if self.local.files is None else PLANS.of_signatures(ranks, gathered.signatures)
            if again is not None and again.plan is not None:
                self.plan, self._kind = again.plan, again.kind
                return again.plan.replies_for_reuse()
            base = None if self.local.files is None else PLANS.last_of_kind(ranks, self.kind, gathered.tables)
            self._kind = "" if base is None else base.kind
            self.plan, made, replies = make_plan(
                gathered,
                None if base is None else base.plan,
                self.local,
                refuse_change=self.on_structure_change == "error",
                compares=self.on_replica_mismatch != "ignore",
            )
            decided.append(made)
            return replies

        self.may_be_writing = True
        reply = self.channel.scatter(self.phase("plan"), reply_to_all, PlanReply)
        if reply is None:
            raise ExchangeError(f"{self.checkpoint}: the coordinator sent this rank no plan", phase="plan")
        self._cached = PLANS.get(self.channel.ranks, reply.plan_id)
        table, files = self.local.table, self.local.files
        kept = unpack_places(reply.kept, len(table))
        placements = None if files is None else place_items(table, kept, files=files, layout=self.local.layout)
        self.share = Share(reply.plan_id, kept, placements, reply.total_nbytes)
        self.outcome, self.reason = reply.outcome, reply.reason
        if reply.outcome == "rebuilt":
            self.changes = StructureDiff(reply.added, reply.removed, reply.changed)
            if self.channel.is_coordinator and self.on_structure_change != "quiet":
                logger.warning("%s: plan %s, %s", self.checkpoint, reply.outcome, reply.reason)
        if reply.is_compared:
            self._compare(unpack_places(reply.compared, len(table)) if reply.compared else kept[:0], decided)

    def _compare(self, compared: npt.NDArray[np.intp], decided: Sequence[GlobalPlan]) -> None:
        """Compare what several ranks hold, since only one copy of it is saved.

        Args:
            compared: the places in this rank's table of what is compared.
            decided: on the coordinator, the plan.

        Raises:
            PlanConflict: something differs, with ``on_replica_mismatch="error"``; on every rank.
        """
        digests = self.channel.gather(
            self.phase("compare"),
            lambda: Digests(self.local.digests_of(compared).astype("<u8").tobytes()),
            Digests,
        )

        def told_by_coordinator() -> _Differing:
            (plan,) = decided
            sent = [np.frombuffer(b"" if each is None else each.digests, dtype="<u8") for each in digests or ()]
            found = find_differing(plan.columns, plan.order, plan.compared, plan.contested, sent)
            differing = [each for each in found if not each.is_contested]
            _warn_of_contested(self.checkpoint, [each for each in found if each.is_contested])
            ranks = {each.key: tuple(sorted(sum(each.ranks, ()))) for each in differing[:_MAX_DIFFERING]}
            return _Differing(ranks, _in_words(differing) if differing else "")

        told = self.channel.broadcast(self.phase("compared"), told_by_coordinator, _Differing)
        self.differing_replicas = told.ranks
        if told.words and self.on_replica_mismatch == "error":
            key, ranks = next(iter(told.ranks.items()))
            raise PlanConflict(f'{told.words}; on_replica_mismatch="error" forbids that', key=key, ranks=list(ranks))
        if told.words and self.channel.is_coordinator:
            logger.warning("%s: %s", self.checkpoint, told.words)

    def keep(self, places: Places, places_of_all: tuple[Places, ...], *, confirmed: bool) -> None:
        """Put the plan into the cache for the next save.

        Args:
            places: the places of this rank's items of variable size. ``places_of_all``: on the coordinator, those of
                each rank.
            confirmed: whether this rank knows that the checkpoint was committed.
        """
        cached = CachedPlan(
            share=self.share,
            signature=self.local.signature.value,
            table=self.local.table,
            plan=self.plan,
            variable_places=places if confirmed else None,
            places_of_all=places_of_all if self.plan is not None else None,
            kind=kind_called(self.kind) if self.kind is not None else self._kind or self.share.plan_id.hex(),
        )
        PLANS.put(self.channel.ranks, cached)

    def forget(self) -> None:
        """Drop the plan after a failed commit, because only some ranks may know how the commit ended."""
        PLANS.forget(self.channel.ranks, self.share.plan_id)

    def phase(self, name: str) -> str:
        """The name of a phase of this save in exchanges and errors."""
        return f"save {self.checkpoint}: {name}"


def _in_words(differing: Sequence[Differing]) -> str:
    return (
        f"{len(differing)} value(s) of one name differ between ranks (ranks that hold the same are named together): "
        f"{_listed(differing)}. Only the copy of the lowest rank is saved, and all ranks will load that one. If your "
        "program makes this state dict, and each rank needs its own value, name it for each rank (f'rng_state.{rank}')"
    )


def _warn_of_contested(checkpoint: str, contested: Sequence[Differing]) -> None:
    if contested:
        logger.warning(
            "%s: %d shard(s) have more than one main replica (replica_id 0), and the contents of %d of them differ: "
            "%s. That of the lowest rank is saved. validate_access_integrity=True refuses such a state dict: "
            "give all but one of them another replica_id",
            checkpoint,
            len(contested),
            sum(len(each.ranks) > 1 for each in contested),
            _listed(contested),
        )


def _listed(found: Sequence[Differing]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(map(str, found[:_SHOWN])) + more
