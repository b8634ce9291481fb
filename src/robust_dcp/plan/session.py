"""One save on one rank, from agreement to commit: the order of exchanges, and what is kept for the next save.

Owns the protocol of a save, whoever calls it: ``api.save`` phase by phase, or stock DCP through the hooks of
``RobustPlanner`` and ``RobustWriter``. Knows nothing of tensors or files; writing and committing are passed in.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from robust_dcp.comm import Channel, Offer
from robust_dcp.errors import ExchangeError, RobustCheckpointError, StorageError
from robust_dcp.plan.agreement import Decision, PlanOutcome, decide, leaders_among, make_offer
from robust_dcp.plan.cache import PLANS, CachedPlan, CoordinatorPlan
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.planning import apply_plan, plan_for_all
from robust_dcp.plan.rank_plan import RankPlan, RankPlanMessage
from robust_dcp.plan.replicated_objects import ObjectDigests, differing_digests, report_differing
from robust_dcp.plan.stored_plan import LOADED, encode_plan
from robust_dcp.plan.structure import StructureDiff, StructureMessage, plan_id_of
from robust_dcp.plan.unloadable import UnloadableObjects, report_unloadable
from robust_dcp.plan.written import WrittenMessage, news_of, word_of, written_by_all
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.writer import MetadataToPublish
from robust_dcp.storage.writing.commit import BEFORE_RENAME
from robust_dcp.storage.writing.engine import WrittenFiles

__all__ = ["OnObjectMismatch", "OnStructureChange", "SaveSession"]

OnStructureChange = Literal["rebuild", "error", "quiet"]
OnObjectMismatch = Literal["warn", "error", "ignore"]

Data = torch.Tensor | io.BytesIO

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SaveSession:
    """The state of one save on one rank. Calls come in this order: ``agree``, ``settle``, ``commit``.

    Args:
        channel: to the other ranks of the group.
        checkpoint: what is saved where; part of every phase's name, so ranks that save to different places are told.
        on_structure_change: what to do when the structure is not that of the last committed save.
        on_object_mismatch: what to do when an object that several ranks hold differs between them.
        unloadable: what this rank finds that a load would refuse, and what is to be done about it.
        commits_together: whether all ranks call ``commit``. Inside stock ``save`` with collectives only the
            coordinator's does, and stock tells the others.
    """

    channel: Channel
    checkpoint: str
    on_structure_change: OnStructureChange = "rebuild"
    on_object_mismatch: OnObjectMismatch = "warn"
    unloadable: UnloadableObjects = field(default_factory=UnloadableObjects)
    commits_together: bool = False

    n_leaders: int = field(default=0, init=False)
    outcome: PlanOutcome = field(default="built", init=False)
    reason: str = field(default="", init=False)
    changes: StructureDiff | None = field(default=None, init=False)
    differing_objects: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False)
    local: LocalStructure = field(init=False)
    rank_plan: RankPlan = field(init=False)
    coordinator: CoordinatorPlan | None = field(default=None, init=False)
    written: WrittenFiles | None = field(default=None, init=False)
    unloadable_objects: dict[str, str] = field(default_factory=dict, init=False)
    _signatures: tuple[bytes, ...] = field(default=(), init=False)
    _cached: CachedPlan | None = field(default=None, init=False)
    _messages: Sequence[WrittenMessage | None] = field(default=(), init=False)
    _words: Sequence[int] = field(default=(), init=False)
    _written_by_all: tuple[WrittenFiles, ...] = field(default=(), init=False)

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self.channel.rank

    @property
    def known_places(self) -> npt.NDArray[np.int64] | None:
        """Where this rank's items of variable size lay in the last save by this plan, if the coordinator knows."""
        return self._cached.variable_places if self.outcome == "reused" and self._cached is not None else None

    @property
    def placements(self) -> Placements | None:
        """Where this rank's items lie; ``None`` where another writer than ours decides that."""
        return self.rank_plan.placements

    def agree(self, describe: Callable[[], LocalStructure], *, leads: bool) -> RankPlan:
        """Agree with all ranks on the plan of this save, and return this rank's share.

        Args:
            describe: gives this rank's structure; an exception in it is raised on every rank.
            leads: whether the caller takes this rank for the coordinator. If just one rank leads, it plans and commits.

        Raises:
            PlanConflict: the ranks contradict each other.
            StructureChanged: with ``on_structure_change="error"``.
            ExchangeError: a rank is missing, late, or in another operation.
        """

        def offer_own() -> Offer:
            self.local = describe()
            self._look_into_loaded_checkpoints(leads=leads)
            offer, self._cached = make_offer(PLANS, self.channel.ranks, self.channel.rank, self.local, leads=leads)
            return offer

        offers = self.channel.agree(self._named("agree"), offer_own)
        self._signatures = tuple(offer.signature for offer in offers)
        leaders = leaders_among(offers)
        self.n_leaders = len(leaders)
        if self.n_leaders == 1:
            self.channel = self.channel.led_by(leaders[0])
        decision = decide(offers, self.channel.coordinator_rank)
        self.outcome = decision.outcome
        if decision.outcome == "reused" and self._cached is not None:
            self.rank_plan = self._cached.rank_plan
            self.coordinator = self._cached.coordinator
            self.reason = "no rank's structure has changed"
            if self._cached.loaded_from:
                self.reason += f" since {self._cached.loaded_from}"
            if decision.objects_differ and self.on_object_mismatch != "ignore":
                self._compare_objects(self._cached)
        else:
            self._make_plan(decision)
        report_differing(self.differing_objects, self.on_object_mismatch, is_reporter=self.channel.is_coordinator)
        return self.rank_plan

    def _look_into_loaded_checkpoints(self, *, leads: bool) -> None:
        """Without a plan of this process for what there is to save, one may lie in the checkpoint that was loaded."""
        ranks, rank = self.channel.ranks, self.channel.rank
        if self.local.files is None or PLANS.find(ranks, self.local.signature.value, rank) is not None:
            return
        plan = LOADED.find_plan(ranks, rank, self.local, leads=leads)
        if plan is not None:
            PLANS.put(ranks, plan)

    def _make_plan(self, decision: Decision) -> None:
        is_sender = self.channel.rank in decision.senders
        structures = self.channel.gather(
            self._named("structures"),
            lambda: self.local.to_message() if is_sender else None,
            StructureMessage,
        )

        def reply_to_all() -> list[RankPlanMessage]:
            base = None if decision.base is None else self._cached
            refuse = self.on_structure_change == "error"
            self.coordinator, replies = plan_for_all(
                structures or [], self._signatures, decision, base, self.local, refuse_change=refuse
            )
            return replies

        reply = self.channel.scatter(self._named("plan"), reply_to_all, RankPlanMessage)
        if reply is None:
            raise ExchangeError(f"{self.checkpoint}: the coordinator sent this rank no plan", phase="plan")
        self.rank_plan = apply_plan(reply, self.local, self._cached)
        self.reason = reply.reason
        self.differing_objects = reply.differing_objects
        if decision.base is not None:
            self.changes = StructureDiff(reply.added, reply.removed, reply.changed)
            if self.channel.is_coordinator and self.on_structure_change != "quiet":
                logger.warning("%s: plan %s, %s", self.checkpoint, decision.outcome, reply.reason)

    def _compare_objects(self, cached: CachedPlan) -> None:
        """Name the replicated objects that differ: only digests of the common ones travel, and only if some differ."""
        digests = self.local.digests_of(cached.rank_plan.common_objects)
        gathered = self.channel.all_gather(
            self._named("objects"), lambda: ObjectDigests(digests.tobytes()), ObjectDigests
        )
        names = [self.local.table.names[self.local.table.name_ids[i]] for i in cached.rank_plan.common_objects]
        self.differing_objects = differing_digests(names, gathered)

    def settle(self, write: Callable[[], WrittenFiles], discard: Callable[[WrittenFiles], None]) -> None:
        """Write this rank's files, and learn whether all ranks have written theirs, and what a load would refuse.

        Args:
            write: writes and makes durable; a failure in it is announced to the other ranks while they still write
                (:meth:`check_stop`), and raised on all of them.
            discard: undoes ``write`` when another rank failed. Not when the ranks fell out of step: the coordinator may
                have heard from all of them, and be committing what this rank wrote.
        """

        def write_own() -> WrittenMessage | None:
            self.written = write()
            self.unloadable.raise_if_forbidden(self.checkpoint)
            return news_of(self.written.variable_places, self.known_places, self.unloadable.found)

        def word(_: WrittenMessage | None) -> int:
            return 0 if self.written is None else word_of(self.written)

        try:
            messages = self.channel.gather(self._named("write"), write_own, WrittenMessage, value=word)
        except RobustCheckpointError as error:
            if self.written is not None and not isinstance(error, ExchangeError):
                discard(self.written)
            raise
        self._words = self.channel.last_values
        self._messages = messages or []
        if self.channel.is_coordinator:
            told = [(rank, message.unloadable) for rank, message in enumerate(self._messages) if message is not None]
            self.unloadable_objects = report_unloadable(self.checkpoint, told)

    def watched(self, resolve: Callable[[WriteItem], Data]) -> Callable[[WriteItem], Data]:
        """A planner's ``resolve_data``, with a look at each object on its way to the writer: would a load take it?"""

        def resolved(write_item: WriteItem) -> Data:
            data = resolve(write_item)
            if isinstance(data, io.BytesIO):
                self.unloadable.look_at(write_item.index.fqn, data)
            return data

        return resolved

    def check_stop(self) -> None:
        """Raise if another rank has announced that this save failed; cheap, for calls between blocks of data."""
        self.channel.stop_if_announced()

    def encoded_metadata(self, storage_meta: StorageMeta) -> MetadataToPublish:
        """On the coordinator, after :meth:`settle`: the bytes of ``.metadata`` of this checkpoint."""
        if self.coordinator is None or self.coordinator.metadata is None:
            raise ValueError("only the coordinator has the metadata, of a plan for RobustWriter")
        self._written_by_all = written_by_all(self._words, self._messages, self.coordinator.variable_places)
        return self.coordinator.metadata.encode(self._written_by_all, storage_meta)

    def commit(
        self,
        publish: Callable[[], None],
        discard: Callable[[WrittenFiles], None],
        keep_plan: Callable[[bytes], None],
    ) -> None:
        """Make the checkpoint visible, on the coordinator, and keep the plan for the next save.

        Args:
            publish: writes ``.metadata``; called on the coordinator only.
            discard: undoes what :meth:`settle` wrote; called when it is certain that nothing was committed.
            keep_plan: puts the plan beside the checkpoint, for a job that resumes from it; called on the coordinator
                only, once the checkpoint is committed. If it fails, nothing is lost.
        """

        def publish_and_keep() -> None:
            if self.channel.is_coordinator:
                publish()
                self._keep_beside(keep_plan)

        try:
            if self.commits_together:
                self.channel.barrier(self._named("commit"), publish_and_keep)
            else:
                publish_and_keep()
        except BaseException as error:
            # Ranks may have learnt of the commit or not: with the plan gone they agree on what they know again.
            PLANS.forget(self.channel.ranks, plan_id_of(self._signatures))
            if self.written is not None and isinstance(error, StorageError) and error.operation in BEFORE_RENAME:
                discard(self.written)
            raise
        self._keep_plan(confirmed=self.commits_together)

    def _keep_beside(self, keep_plan: Callable[[bytes], None]) -> None:
        try:
            if self.coordinator is not None:
                keep_plan(self._stored_plan(self.coordinator))
        except Exception as error:  # the checkpoint is committed: whatever this is, the save has succeeded
            logger.warning("%s: a job that resumes from it plans anew: %s", self.checkpoint, error)

    def _stored_plan(self, plan: CoordinatorPlan) -> bytes:
        return plan.stored.get(lambda: encode_plan(self.channel.ranks, self._signatures, plan))

    def leave_commit_to_stock(self) -> None:
        """After :meth:`settle` on a rank whose ``commit`` stock will not call: it commits on the coordinator alone.

        This rank's plan is kept, but counts only together with the coordinator's, which is kept after the commit.
        """
        if not self.channel.is_coordinator and not self.commits_together:
            self._keep_plan(confirmed=False)

    def _keep_plan(self, *, confirmed: bool) -> None:
        """Put the plan into the cache; ``confirmed`` says that this rank knows that the checkpoint was committed."""
        places = None if self.written is None else self.written.variable_places
        coordinator = self.coordinator
        if coordinator is not None:
            places_of_all = tuple(files.variable_places for files in self._written_by_all)
            coordinator = replace(coordinator, variable_places=places_of_all)
        PLANS.put(
            self.channel.ranks,
            CachedPlan(
                plan_id=plan_id_of(self._signatures),
                signatures=self._signatures,
                table=self.local.table,
                rank_plan=self.rank_plan,
                variable_places=places if confirmed else None,
                coordinator=coordinator,
            ),
        )

    def _named(self, phase: str) -> str:
        return f"save {self.checkpoint}: {phase}"
