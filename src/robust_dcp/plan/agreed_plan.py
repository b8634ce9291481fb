"""The plan of one save on one rank: how all ranks agree on it, and what is kept of it for the next save.

This module owns the exchanges from structures to plan, and every use of the plan cache. ``session`` calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from robust_dcp.comm import Agreement, Channel, Offer
from robust_dcp.errors import ExchangeError
from robust_dcp.plan.agreement import (
    LEADS,
    Decision,
    PlanOutcome,
    coordinator_of,
    decide,
    is_settled,
    make_offer,
    offer_of,
)
from robust_dcp.plan.cache import PLANS, CachedPlan, CoordinatorPlan
from robust_dcp.plan.kinds import ChosenBase, KindVote, choose_base, kind_of, vote
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.planning import apply_plan, plan_for_all
from robust_dcp.plan.rank_plan import RankPlan, RankPlanMessage
from robust_dcp.plan.replicated_objects import ObjectDigests, report_differing
from robust_dcp.plan.stored_plan import LOADED
from robust_dcp.plan.structure import StructureDiff, StructureMessage

__all__ = ["AgreedPlan", "OnObjectMismatch", "OnStructureChange"]

OnStructureChange = Literal["rebuild", "error", "quiet"]
OnObjectMismatch = Literal["warn", "error", "ignore"]

Places = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class AgreedPlan:
    """The plan of one save, from :meth:`agree` to :meth:`keep` or :meth:`forget`.

    Args:
        channel: the channel to the other ranks. After :meth:`agree` its coordinator is the rank that plans and commits.
        checkpoint, on_structure_change, on_object_mismatch, kind: as in the planner and the session.

    Attributes:
        leads: whether the caller made this rank the coordinator. ``n_leaders`` says how many ranks were made it.
        may_be_writing: whether some rank may have the plan already, even if others are not there yet.
        local: what this rank holds. ``rank_plan``: what it writes of that. ``coordinator``: the plan of all ranks, on
            the coordinator only.
        outcome, reason, changes: how the plan was made.
        differing_objects: replicated objects with contents that differ, and the ranks that hold them.
    """

    channel: Channel
    checkpoint: str
    on_structure_change: OnStructureChange = "rebuild"
    on_object_mismatch: OnObjectMismatch = "warn"
    kind: str | None = None

    leads: bool = field(default=True, init=False)
    n_leaders: int = field(default=0, init=False)
    may_be_writing: bool = field(default=False, init=False)
    local: LocalStructure = field(init=False)
    rank_plan: RankPlan = field(init=False)
    coordinator: CoordinatorPlan | None = field(default=None, init=False)
    outcome: PlanOutcome = field(default="built", init=False)
    reason: str = field(default="", init=False)
    changes: StructureDiff | None = field(default=None, init=False)
    differing_objects: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False)
    _plan_id: bytes = field(default=b"", init=False)
    _cached: CachedPlan | None = field(default=None, init=False)
    _base_kind: str = field(default="", init=False)

    @property
    def known_places(self) -> npt.NDArray[np.int64] | None:
        """Where this rank's items of variable size were in the last save with this plan, if the coordinator knows."""
        return self._cached.variable_places if self.outcome == "reused" and self._cached is not None else None

    def agree(self, describe: Callable[[], LocalStructure], *, leads: bool, mark: int = 0) -> int:
        """Agree with all ranks. The arguments and errors are those of ``SaveSession.agree``.

        Args:
            mark: the mark that this rank proposes for the save.

        Returns:
            The mark of the rank that leads.
        """
        self.leads = leads

        def offer_own() -> Offer:
            self.local = describe()
            self._look_into_loaded_checkpoints()
            offer, self._cached = make_offer(PLANS, self.channel.ranks, self.local, leads=leads)
            self.may_be_writing = self._cached is not None
            return replace(offer, told=mark) if leads else offer

        agreement, own = self._offers_of_all("agree", offer_own)
        self._plan_id = agreement.signature
        self.n_leaders = agreement.count(LEADS)
        self.channel = self.channel.led_by(coordinator_of(agreement, self.channel.coordinator_rank))
        decision = decide(agreement, own, self.channel.coordinator_rank)
        if not is_settled(decision, agreement):
            decision = self._decide_by_kind()
        elif self._cached is not None:
            self._base_kind = self._cached.kind
        if decision.reuse and self._cached is not None:
            self.outcome = "reused"
            self.rank_plan = self._cached.rank_plan
            self.coordinator = self._cached.coordinator
            self.reason = "no rank's structure has changed"
            if self._cached.loaded_from:
                self.reason += f" since {self._cached.loaded_from}"
            if decision.objects_differ and self.on_object_mismatch != "ignore":
                self._compare_objects(self._cached)
        else:
            self._make_plan(decision, agreement)
        report_differing(self.differing_objects, self.on_object_mismatch, is_reporter=self.channel.is_coordinator)
        return agreement.told

    def _decide_by_kind(self) -> Decision:
        """Agree once more, this time on the last plan of the kind that is saved now."""
        ranks = self.channel.ranks
        votes = self.channel.gather(
            self.phase("kind"), lambda: vote(PLANS, ranks, self.kind, self.local.table), KindVote
        )
        base = self.channel.broadcast(
            self.phase("kind found"),
            lambda: choose_base(PLANS, ranks, self.kind, votes or []) or ChosenBase(),
            ChosenBase,
        )
        self._base_kind = base.kind
        self._cached = PLANS.get(ranks, base.plan_id)

        def offer_again() -> Offer:
            return offer_of(self._cached, self.local, leads=self.leads)

        agreement, own = self._offers_of_all("agree on kind", offer_again)
        return decide(agreement, own, self.channel.coordinator_rank)

    def _offers_of_all(self, phase: str, offer: Callable[[], Offer]) -> tuple[Agreement, Offer]:
        """Combine the offers of all ranks under rank 0, because a plan's identity is the hash of that tree. Also return
        this rank's offer."""
        own: list[Offer] = []

        def contribute() -> Offer:
            own.append(offer())
            return own[0]

        return self.channel.led_by(0).agree(self.phase(phase), contribute), own[0]

    def _look_into_loaded_checkpoints(self) -> None:
        """If this process has no plan for this structure, look for one in the checkpoints that it has loaded."""
        ranks, rank = self.channel.ranks, self.channel.rank
        if self.local.files is None or PLANS.find(ranks, self.local.signature.value) is not None:
            return
        plan = LOADED.find_plan(ranks, rank, self.local, leads=self.leads)
        if plan is not None:
            PLANS.put(ranks, replace(plan, kind=kind_of(None, plan.plan_id, "")))

    def _make_plan(self, decision: Decision, agreement: Agreement) -> None:
        structures = self.channel.gather(
            self.phase("structures"),
            lambda: self.local.to_message() if decision.sends else None,
            StructureMessage,
        )

        def reply_to_all() -> list[RankPlanMessage]:
            base = None if decision.base is None else self._cached
            refuse = self.on_structure_change == "error"
            self.coordinator, replies = plan_for_all(
                structures or [], agreement.signature, base, self.local, refuse_change=refuse
            )
            return replies

        self.may_be_writing = True
        reply = self.channel.scatter(self.phase("plan"), reply_to_all, RankPlanMessage)
        if reply is None:
            raise ExchangeError(f"{self.checkpoint}: the coordinator sent this rank no plan", phase="plan")
        self.rank_plan = apply_plan(reply, self.local, self._cached)
        self.outcome, self.reason = reply.outcome, reply.reason
        self.differing_objects = reply.differing_objects
        if decision.base is not None:
            self.changes = StructureDiff(reply.added, reply.removed, reply.changed)
            if self.channel.is_coordinator and self.on_structure_change != "quiet":
                logger.warning("%s: plan %s, %s", self.checkpoint, reply.outcome, reply.reason)

    def _compare_objects(self, cached: CachedPlan) -> None:
        """Name the replicated objects that differ. Only digests of common objects are sent, and only if some differ."""
        digests = self.local.digests_of(cached.rank_plan.common_objects)
        found = self.channel.combine(
            self.phase("objects"), lambda: ObjectDigests.of(digests), ObjectDigests.with_other, ObjectDigests
        )
        names = [self.local.table.names[self.local.table.name_ids[i]] for i in cached.rank_plan.common_objects]
        self.differing_objects = found.differing(names, self.channel.size)

    def keep(self, places: Places, places_of_all: tuple[Places, ...], *, confirmed: bool) -> None:
        """Put the plan into the cache for the next save.

        Args:
            places: the places of this rank's items of variable size. ``places_of_all``: on the coordinator, those of
                each rank.
            confirmed: whether this rank knows that the checkpoint was committed.
        """
        coordinator = self.coordinator
        if coordinator is not None:
            coordinator = replace(coordinator, variable_places=places_of_all)
        PLANS.put(
            self.channel.ranks,
            CachedPlan(
                plan_id=self._plan_id,
                signature=self.local.signature.value,
                table=self.local.table,
                rank_plan=self.rank_plan,
                variable_places=places if confirmed else None,
                coordinator=coordinator,
                kind=kind_of(self.kind, self._plan_id, self._base_kind),
            ),
        )

    def forget(self) -> None:
        """Drop the plan after a failed commit, because only some ranks may know how the commit ended."""
        PLANS.forget(self.channel.ranks, self._plan_id)

    def phase(self, name: str) -> str:
        """The name of a phase of this save in exchanges and errors."""
        return f"save {self.checkpoint}: {name}"
