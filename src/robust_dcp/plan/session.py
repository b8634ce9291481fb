"""One save on one rank, from agreement to commit: the order of exchanges, and what is kept for the next save.

Owns the protocol of a save, whoever calls it: ``api.save`` phase by phase, or stock DCP through the hooks of
``RobustPlanner`` and ``RobustWriter``. Knows nothing of tensors or files; writing and committing are passed in.
"""

from __future__ import annotations

import io
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from robust_dcp.comm import Agreement, Channel, Offer
from robust_dcp.errors import ExchangeError, RobustCheckpointError
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
from robust_dcp.plan.clean_up import Undo, clean_up, failed_in_step, nothing_is_committed
from robust_dcp.plan.kinds import ChosenBase, KindVote, choose_base, kind_of, vote
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.planning import apply_plan, plan_for_all
from robust_dcp.plan.rank_plan import RankPlan, RankPlanMessage
from robust_dcp.plan.replica_checks import Differing, DigestItems, VerifyReplicas, compare, digest_columns
from robust_dcp.plan.replica_checks import report as report_replicas
from robust_dcp.plan.replicated_objects import ObjectDigests, report_differing
from robust_dcp.plan.stored_plan import LOADED, plan_sections
from robust_dcp.plan.structure import StructureDiff, StructureMessage
from robust_dcp.plan.unloadable import UnloadableObjects, report_unloadable
from robust_dcp.plan.written import (
    FileNamesMessage,
    WrittenMessage,
    digest_of,
    digest_offer,
    news_of,
    written_by_all,
    written_offer,
)
from robust_dcp.storage.files.paths import mark_of
from robust_dcp.storage.index import Section
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.writer import MetadataToPublish
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
        kind: the caller's word for what is saved, where a job saves several state dicts in turn; the same on all ranks.
        unloadable: what this rank finds that a load would refuse, and what is to be done about it.
        commits_together: whether all ranks call ``commit``. Inside stock ``save`` with collectives only the
            coordinator's does, and stock tells the others.
        verify_replicas: which replicas are compared with those of other ranks.
        digest_items: gives the digests of this rank's items; ``None`` if nothing can be compared.
        save_id: of the save, on the rank that leads. The others know its mark after :meth:`agree`, and that is theirs.
    """

    channel: Channel
    checkpoint: str
    on_structure_change: OnStructureChange = "rebuild"
    on_object_mismatch: OnObjectMismatch = "warn"
    unloadable: UnloadableObjects = field(default_factory=UnloadableObjects)
    commits_together: bool = False
    verify_replicas: VerifyReplicas = "off"
    digest_items: DigestItems | None = None
    kind: str | None = None
    save_id: str = field(default_factory=lambda: str(uuid.uuid4()))

    undo: Callable[[], Undo] | None = field(default=None, init=False)
    """What can take back what this save makes, on each rank. Set before :meth:`agree`, on all ranks or on none."""
    leads: bool = field(default=True, init=False)
    n_leaders: int = field(default=0, init=False)
    outcome: PlanOutcome = field(default="built", init=False)
    reason: str = field(default="", init=False)
    changes: StructureDiff | None = field(default=None, init=False)
    differing_objects: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False)
    differing_replicas: tuple[Differing, ...] = field(default=(), init=False)
    local: LocalStructure = field(init=False)
    rank_plan: RankPlan = field(init=False)
    coordinator: CoordinatorPlan | None = field(default=None, init=False)
    written: WrittenFiles | None = field(default=None, init=False)
    unloadable_objects: dict[str, str] = field(default_factory=dict, init=False)
    digest: str | None = field(default=None, init=False)
    _plan_id: bytes = field(default=b"", init=False)
    _cached: CachedPlan | None = field(default=None, init=False)
    _base_kind: str = field(default="", init=False)
    _messages: Sequence[WrittenMessage | None] = field(default=(), init=False)
    _are_plain: Sequence[bool] = field(default=(), init=False)
    _written_agreement: Agreement | None = field(default=None, init=False)
    _may_be_writing: bool = field(default=False, init=False)
    """Whether some rank may have got so far, wherever the others are."""
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
        self.leads = leads

        def offer_own() -> Offer:
            self.local = describe()
            self._look_into_loaded_checkpoints(leads=leads)
            offer, self._cached = make_offer(PLANS, self.channel.ranks, self.local, leads=leads)
            self._may_be_writing = self._cached is not None
            return replace(offer, told=int(mark_of(self.save_id), 16)) if leads else offer

        try:
            return self._agree(offer_own)
        except BaseException as error:
            self._clean_up(error)
            if isinstance(error, RobustCheckpointError) and self._others_tell(error):
                raise error.in_brief() from error
            raise

    def _agree(self, offer_own: Callable[[], Offer]) -> RankPlan:
        agreement, own = self._offers_of_all("agree", offer_own)
        self._plan_id = agreement.signature
        if mark_of(self.save_id) != f"{agreement.told:016x}":
            self.save_id = f"{agreement.told:016x}"
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
        return self.rank_plan

    def _decide_by_kind(self) -> Decision:
        """Agree once more, on the last plan of the kind that is saved now."""
        ranks = self.channel.ranks
        votes = self.channel.gather(
            self._named("kind"), lambda: vote(PLANS, ranks, self.kind, self.local.table), KindVote
        )
        base = self.channel.broadcast(
            self._named("kind found"),
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
        """What all ranks agree on, under the tree whose hash is the identity of a plan, and what this one offers."""
        own: list[Offer] = []

        def contribute() -> Offer:
            own.append(offer())
            return own[0]

        return self.channel.led_by(0).agree(self._named(phase), contribute), own[0]

    def _look_into_loaded_checkpoints(self, *, leads: bool) -> None:
        """Without a plan of this process for what there is to save, one may lie in the checkpoint that was loaded."""
        ranks, rank = self.channel.ranks, self.channel.rank
        if self.local.files is None or PLANS.find(ranks, self.local.signature.value) is not None:
            return
        plan = LOADED.find_plan(ranks, rank, self.local, leads=leads)
        if plan is not None:
            PLANS.put(ranks, replace(plan, kind=kind_of(None, plan.plan_id, "")))

    def _make_plan(self, decision: Decision, agreement: Agreement) -> None:
        structures = self.channel.gather(
            self._named("structures"),
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

        self._may_be_writing = True
        reply = self.channel.scatter(self._named("plan"), reply_to_all, RankPlanMessage)
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
        """Name the replicated objects that differ: only digests of the common ones travel, and only if some differ."""
        digests = self.local.digests_of(cached.rank_plan.common_objects)
        found = self.channel.combine(
            self._named("objects"), lambda: ObjectDigests.of(digests), ObjectDigests.with_other, ObjectDigests
        )
        names = [self.local.table.names[self.local.table.name_ids[i]] for i in cached.rank_plan.common_objects]
        self.differing_objects = found.differing(names, self.channel.size)

    def settle(self, write: Callable[[], WrittenFiles]) -> None:
        """Write this rank's files, and learn whether all ranks have written theirs, and what a load would refuse.

        Args:
            write: writes and makes durable; a failure in it is announced to the other ranks while they still write
                (:meth:`check_stop`), and raised on all of them.
        """

        def write_own() -> WrittenMessage | None:
            self.written = write()
            self.unloadable.raise_if_forbidden(self.checkpoint)
            return news_of(
                self.written.variable_places, self.known_places, self._replica_digests(), self.unloadable.found
            )

        try:
            messages = self.channel.gather(
                self._named("write"), write_own, WrittenMessage, offer=lambda _: written_offer(self.written)
            )
        except BaseException as error:
            self._clean_up(error)
            if isinstance(error, RobustCheckpointError) and self._others_tell(error):
                raise error.in_brief() from error
            raise
        self._messages = messages or []
        if self.channel.is_coordinator:
            told = [(rank, message.unloadable) for rank, message in enumerate(self._messages) if message is not None]
            self.unloadable_objects = report_unloadable(self.checkpoint, told)
        self._written_agreement = self.channel.last_agreement
        self._are_plain = self._have_plain_names(self._written_agreement)

    def _have_plain_names(self, agreement: Agreement) -> Sequence[bool]:
        """Of each rank, on the coordinator, whether its files are called as stock would call them. Ranks differ where
        a save was killed, say."""
        if agreement.same_value:
            return [agreement.lowest == 2] * self.channel.size

        def tell() -> FileNamesMessage:
            return FileNamesMessage(self.written is not None and self.written.are_plain)

        told = self.channel.gather(self._named("file names"), tell, FileNamesMessage)
        return [each is not None and each.are_plain for each in told or []]

    def _replica_digests(self) -> bytes:
        """What this rank holds of the chunks that this save compares; no bytes if it compares none of them."""
        checks = self.rank_plan.checks
        if self.digest_items is None or self.channel.size == 1:
            return b""
        return digest_columns(
            *(self.local.table, checks, self.verify_replicas, self.checkpoint, self.digest_items),
            is_new=self.outcome != "reused",
        )

    def _compare_replicas(self) -> None:
        sent = [b"" if message is None else message.replicas for message in self._messages]
        if self.coordinator is None or not any(sent):
            return
        try:
            self.differing_replicas = compare(sent, self.coordinator.tables, contested=False)
            contested = compare(sent, self.coordinator.tables, contested=True)
            report_replicas(self.differing_replicas, contested, self.checkpoint)
        except Exception as error:  # the checkpoint is committed: whatever this is, the save has succeeded
            logger.warning("%s: its replicas could not be compared: %s", self.checkpoint, error)

    def _others_tell(self, error: RobustCheckpointError) -> bool:
        """Whether stock prints this error once for each rank: within its ``save`` with collectives, the coordinator's
        has all that they know together."""
        return not self.leads and not self.commits_together and not isinstance(error, ExchangeError)

    def _clean_up(self, error: BaseException) -> None:
        """Remove what this save has made. Not when the ranks fell out of step and some may write: the coordinator may
        have heard from all of them, and be committing; if it is not, the next save into the directory removes what
        they wrote."""
        if self.undo is None:
            return
        if failed_in_step(error):
            clean_up(self.channel, self._named("clean up"), self.undo(), error)
        elif self._may_be_writing:
            self.undo().let_go()
        else:
            self.undo().take_back(error)

    def watched(self, resolve: Callable[[WriteItem], Data]) -> Callable[[WriteItem], Data]:
        """A planner's ``resolve_data``, with a look at each object on its way to the writer: would a load take it?"""

        def resolved(write_item: WriteItem) -> Data:
            data = resolve(write_item)
            if isinstance(data, io.BytesIO):
                self.unloadable.look_at(write_item.index.fqn, data)
            return data

        return resolved

    def check_stop(self, done_nbytes: int, total_nbytes: int) -> None:
        """Between blocks of data: say how far this rank is, and raise if another has said that this save failed."""
        self.channel.note_progress(done_nbytes, total_nbytes)
        self.channel.stop_if_announced()

    def encoded_metadata(self, storage_meta: StorageMeta) -> MetadataToPublish:
        """On the coordinator, after :meth:`settle`: the bytes of ``.metadata`` of this checkpoint."""
        if self.coordinator is None or self.coordinator.metadata is None:
            raise ValueError("only the coordinator has the metadata, of a plan for RobustWriter")
        if self._written_agreement is None:
            raise ValueError("settle comes before the metadata")
        self._written_by_all = written_by_all(
            self._are_plain,
            self._messages,
            self.coordinator.variable_places,
            self._written_agreement.signature,
            self.channel.combined_signature,
        )
        return self.coordinator.metadata.encode(self._written_by_all, storage_meta, self._kept_plan(self.coordinator))

    def _kept_plan(self, plan: CoordinatorPlan) -> Mapping[str, Section]:
        """What a job that resumes needs to plan no more: it goes into the index."""
        # A resumed job shall plan anew, and warn again, where several ranks claim to hold the main replica.
        if plan.is_contested:
            return {}
        try:
            return plan_sections(self.channel.ranks, plan)
        except Exception as error:  # a checkpoint without it is complete
            logger.warning("%s: a job that resumes from it plans anew: %s", self.checkpoint, error)
            return {}

    def commit(
        self, publish: Callable[[], None], clean_up: Callable[[], None], check: Callable[[], None] = lambda: None
    ) -> None:
        """Make the checkpoint visible, on the coordinator, and keep the plan for the next save.

        Args:
            publish: writes ``.metadata``; called on the coordinator only, once ``check`` has returned on all ranks.
            clean_up: removes what the new checkpoint replaces; called on the coordinator only, once all ranks know that
                the checkpoint is committed, so that nobody waits for it. It must not raise.
            check: makes sure that what this rank has written is still as it was; called on every rank that commits.
        """
        try:
            if self.commits_together:
                self.channel.barrier(
                    self._named("commit"), check, then=publish, offer=lambda: digest_offer(self.written)
                )
                self.digest = digest_of(self.channel.last_agreement)
            elif self.channel.is_coordinator:  # `publish` looks at the files of all
                publish()
        except BaseException as error:
            # Ranks may have learnt of the commit or not: with the plan gone they agree on what they know again.
            PLANS.forget(self.channel.ranks, self._plan_id)
            self._clean_up_commit(error)
            raise
        self._keep_plan(confirmed=self.commits_together)
        if self.channel.is_coordinator:  # all ranks know by now: nobody waits for what follows
            clean_up()
            self._compare_replicas()

    def _clean_up_commit(self, error: BaseException) -> None:
        """As :meth:`_clean_up`, if the coordinator knows that nothing was committed."""
        if self.undo is None:
            return
        undo = self.undo()
        if not self.commits_together:  # the coordinator is alone here, and knows the files of all
            undo.take_back(error)
        elif failed_in_step(error) and nothing_is_committed(self.channel, self._named("clean up"), undo, error):
            clean_up(self.channel, self._named("clean up"), undo, error)
        else:
            undo.let_go()

    def leave_commit_to_stock(self) -> None:
        """After :meth:`settle` on a rank whose ``commit`` stock will not call: it commits on the coordinator alone.

        This rank's plan is kept, but counts only together with the coordinator's, which is kept after the commit.
        """
        if not self.channel.is_coordinator and not self.commits_together:
            self._keep_plan(confirmed=False)

    def _keep_plan(self, *, confirmed: bool) -> None:
        """Put the plan into the cache; ``confirmed`` says that this rank knows that the checkpoint was committed."""
        places = None if self.written is None else self.written.variable_places
        plan_id = self._plan_id
        coordinator = self.coordinator
        if coordinator is not None:
            places_of_all = tuple(files.variable_places for files in self._written_by_all)
            coordinator = replace(coordinator, variable_places=places_of_all)
        PLANS.put(
            self.channel.ranks,
            CachedPlan(
                plan_id=plan_id,
                signature=self.local.signature.value,
                table=self.local.table,
                rank_plan=self.rank_plan,
                variable_places=places if confirmed else None,
                coordinator=coordinator,
                kind=kind_of(self.kind, plan_id, self._base_kind),
            ),
        )

    def _named(self, phase: str) -> str:
        return f"save {self.checkpoint}: {phase}"
