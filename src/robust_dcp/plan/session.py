"""One save on one rank, in stages.

Each stage is an object that has what is known by then, and makes the next one:

    agreed = session.agree(describe)    # which plan: what each rank writes, and where
    written = agreed.write(source)      # the files of all ranks are durable
    committed = written.commit()        # the checkpoint is visible

This module owns the order of exchanges in a save, and what is kept for the next save. Where stock DCP saves, the hooks
of ``RobustPlanner`` and ``RobustWriter`` go from stage to stage. How values are described and digested, and how bytes
get to a disk, is handed to it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

import msgspec
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from robust_dcp.comm import Agreement, Channel, Offer
from robust_dcp.drain.delivery import Delivery
from robust_dcp.errors import (
    ExchangeError,
    PlanConflict,
    RobustCheckpointError,
    StructureChanged,
    ranks_in_words,
)
from robust_dcp.items import ItemsMessage
from robust_dcp.nodes.commit import commit_on_nodes
from robust_dcp.nodes.protect import Protection, log_no_parity
from robust_dcp.phases import PhaseClock
from robust_dcp.plan.cache import NAMED, KeptPlan, LastSave, forget_plan, keep_plan, last_of_kind, plan_of, plans_of
from robust_dcp.plan.clean_up import clean_up, failed_in_step, nothing_is_committed
from robust_dcp.plan.conflicts import Differing, find_differing
from robust_dcp.plan.diff import bounded, diff_items
from robust_dcp.plan.global_plan import GlobalPlan, make_global_plan
from robust_dcp.plan.plan import LocalStructure, Plan, PlanReply, structures_of_all
from robust_dcp.plan.save_report import LOADS, Written, make_report, tell_again, with_row
from robust_dcp.plan.unloadable import OnUnloadableObject, UnloadableObjects, report_unloadable
from robust_dcp.report import LoadBefore, PlanReport, SaveReport, listed
from robust_dcp.save_queue import SaveFuture, queue_of
from robust_dcp.storage.committing.save import MetadataToPublish, not_one_directory
from robust_dcp.storage.files.paths import mark_of
from robust_dcp.storage.index.form import Section
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.writer import RobustWriter, RoomOfRank, refuse_without_room
from robust_dcp.storage.writing.engine import WrittenFiles
from robust_dcp.storage.writing.item_source import ItemSource, WriteItemSource

OnStructureChange = Literal["rebuild", "error", "quiet"]
OnReplicaMismatch = Literal["warn", "error", "ignore"]

logger = logging.getLogger(__name__)

MATCHES: Final = 1
"""Flag of an offer: the rank's structure is the one that the offered plan was made for."""

_HAS_PLAN: Final = 2
"""Flag of an offer: this rank was the coordinator of the offered plan, and has the plan of all ranks."""

_LEADS: Final = 4
"""Flag of an offer: the caller of the save made this rank the coordinator."""

_NEEDS_ROOM: Final = 8
"""Flag of an offer: this rank is not sure that its disks have room for the files of all ranks."""

_LEADS_DIRECTORY: Final = 1
"""Flag of the offer after writing: this rank does not see the coordinator's directory, and is the first of those that
see its own."""

_HAS_PARAMETERS: Final = 2
"""Flag of the same offer: this rank has written parameters."""

_SAME_PARAMETERS: Final = 4
"""Flag of the same offer: they are those of the last save by this plan."""

_OTHERS_DIFFER: Final = 8
"""Flag of the same offer: something else that this rank has written is not that of the last save by this plan."""

_NO_PLAN: Final = Offer().same
_MAX_DIFFERING: Final = 200
"""How many differing values the coordinator tells the other ranks."""


class SaveOptions(msgspec.Struct, frozen=True):
    """How a save is planned, and with whom; as in ``RobustPlanner`` and ``robust_dcp.save``."""

    process_group: dist.ProcessGroup | None = None
    no_dist: bool = False
    timeout_seconds: float = 300.0
    deadline_seconds: float | None = None
    on_structure_change: OnStructureChange = "rebuild"
    on_replica_mismatch: OnReplicaMismatch = "warn"
    on_unloadable_object: OnUnloadableObject = "warn"
    kind: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, (str, type(None))):
            raise ValueError(f"kind is {self.kind!r}: it has to be a word, or None")


# The plan.


class AgreedPlan(msgspec.Struct, frozen=True, eq=False):
    """The plan of one save, on which all ranks have agreed.

    Attributes:
        channel: its coordinator is the rank that plans and commits.
        local: what this rank holds.
        kept: what this rank writes, where, and how it was the last time.
        how: how the plan was made.
        differing_replicas: values with contents that differ between ranks, and the ranks that hold them. They are
            compared only when a plan is made.
        n_leaders: how many ranks the caller has made the coordinator. With ``no_dist=True`` stock makes each rank one.
        was_offered: whether all ranks have offered this plan, and hold what it was made for.
    """

    channel: Channel
    local: LocalStructure
    kept: KeptPlan
    how: PlanReport
    differing_replicas: dict[str, tuple[int, ...]]
    n_leaders: int
    was_offered: bool


class _Decision(NamedTuple):
    """What the coordinator keeps of a new plan, and what it sends to each rank."""

    kept: KeptPlan
    replies: list[PlanReply]


class Planning(msgspec.Struct, frozen=True, eq=False):
    """How the ranks of a save agree on its plan.

    Attributes:
        channel: the channel to the other ranks.
        checkpoint: the checkpoint's name. It is part of every phase's name, so saves to different places are noticed.
        options: as given.
        leads: whether the caller made this rank the coordinator. If exactly one rank leads, it plans and commits.
    """

    channel: Channel
    checkpoint: str
    options: SaveOptions
    leads: bool

    def phase(self, name: str) -> str:
        """The name of a phase of the save in exchanges and errors."""
        return f"save {self.checkpoint}: {name}"

    def agree(self, describe: Callable[[], LocalStructure]) -> AgreedPlan:
        """Agree on a new plan, for another storage writer than ours: it does not tell whether a checkpoint was
        committed, so no earlier plan counts.

        Raises:
            PlanConflict: the ranks contradict each other.
            ExchangeError: a rank is missing, late, or in another operation.
        """
        local, agreement = self.channel.agree(self.phase("agree"), describe, lambda local: self.offer(local, None))
        return self.settle(local, None, agreement, ())

    def offer(self, local: LocalStructure, kept: KeptPlan | None) -> Offer:
        """What this rank says at first: the plan that it would use, which need not fit the structure."""
        flags = _LEADS if self.leads else 0
        if kept is None:
            return Offer(flags=flags)
        flags |= MATCHES if kept.signature == local.signature.value else 0
        flags |= _HAS_PLAN if kept.plan is not None else 0
        return Offer(same=kept.share.plan_id, flags=flags)

    def settle(
        self, local: LocalStructure, kept: KeptPlan | None, agreement: Agreement, earlier: Sequence[KeptPlan]
    ) -> AgreedPlan:
        """Use the plan that all ranks have offered, if each still holds what it was made for. Otherwise let the
        coordinator make one.

        Args:
            kept: the plan that this rank has offered.
            agreement: what all ranks have offered. Each rank decides alone, from the same bytes, so all decide alike.
            earlier: the plans of earlier saves, the latest first.

        Raises:
            PlanConflict: the ranks contradict each other.
            StructureChanged: the structure changed, with ``on_structure_change="error"``.
            ExchangeError: a rank is missing, late, or in another operation.
        """
        n_leaders, leader, channel = agreement.count(_LEADS), agreement.first_rank(_LEADS), self.channel
        if leader is not None and n_leaders == 1:  # not always rank 0
            channel = channel.led_by(leader)
        coordinator_rank = channel.coordinator_rank
        has_plan = agreement.first_rank(_HAS_PLAN) == coordinator_rank and agreement.same != _NO_PLAN
        how, differing = PlanReport(), dict[str, tuple[int, ...]]()
        was_offered = has_plan and agreement.is_same and agreement.count(MATCHES) == agreement.n_ranks
        if kept is not None and was_offered:
            since = kept.loaded_from and f" since {kept.loaded_from}"
            how = PlanReport("reused", f"no rank's structure has changed{since}")
        else:
            # A rank need not send its structure if the coordinator has offered a plan that holds it. What rank 0 has
            # offered is known to all.
            is_held = (
                (agreement.is_same or coordinator_rank == 0)
                and has_plan
                and kept is not None
                and (kept.share.plan_id, kept.signature) == (agreement.same, local.signature.value)
            )
            _, structures = channel.gather(
                self.phase("structures"), lambda: None if is_held else local.to_message(), ItemsMessage
            )
            decision, reply = channel.scatter(
                self.phase("plan"),
                lambda: self._decide(channel, local, kept, structures or [], earlier),
                PlanReply,
                messages=attrgetter("replies"),
            )
            if reply is None:
                raise ExchangeError(f"{self.checkpoint}: the coordinator sent this rank no plan", phase="plan")
            how, differing = reply.how, reply.differing
            if decision is not None:
                kept = decision.kept
            else:
                kept = KeptPlan(reply.share, local.place(reply.share), local.signature.value)
        local = replace(local, digests_of=None)  # or the planner and the save hold each other
        return AgreedPlan(channel, local, kept, how, differing, n_leaders, was_offered)

    def _decide(
        self,
        channel: Channel,
        local: LocalStructure,
        offered: KeptPlan | None,
        messages: Sequence[ItemsMessage | None],
        earlier: Sequence[KeptPlan],
    ) -> _Decision:
        """On the coordinator: take an earlier plan for these structures, or make a plan."""
        items, signatures = structures_of_all(messages, None if offered is None else offered.plan, local)
        for kept in earlier:
            if kept.plan is not None and kept.plan.signatures == tuple(signatures):
                how = PlanReport(
                    "reused", "the structures are those of an earlier save, which some ranks had not offered"
                )
                return _Decision(kept, [PlanReply(share, how) for share in kept.plan.shares])
        last = last_of_kind(channel.ranks, self.options.kind, items) if earlier else None
        how = PlanReport("built", "the coordinator has no plan of a committed save of this kind by this group")
        if last is not None and last.plan is not None:
            senders = ranks_in_words([rank for rank, message in enumerate(messages) if message is not None])
            changes = diff_items(last.plan.items, items)
            first = bounded(changes)
            if changes and self.options.on_structure_change == "error":
                raise StructureChanged(
                    f"the structure of the state dict is not that of the last committed save: {changes}; "
                    'on_structure_change="error" forbids that',
                    added=list(first.added),
                    removed=list(first.removed),
                    changed=list(first.changed),
                )
            unchanged = f"no key has changed; {senders} did not have the plan, or options have changed"
            how = PlanReport("rebuilt", f"on {senders}: {changes}" if changes else unchanged, first)
            if self.options.on_structure_change != "quiet":
                logger.warning("%s: plan %s, %s", self.checkpoint, how.outcome, how.reason)
        decided = make_global_plan(items, lowest_rank=local.lowest_rank)
        differing = self._compare(decided, [b"" if each is None else each.digests for each in messages])
        plan = Plan.of(decided, channel.ranks, signatures, local)
        share = plan.shares[channel.rank]
        kind = share.plan_id.hex() if last is None else last.kind
        kept = KeptPlan(share, local.place(share), local.signature.value, plan, kind=kind)
        return _Decision(kept, [PlanReply(each, how, differing) for each in plan.shares])

    def _compare(self, plan: GlobalPlan, digests: Sequence[bytes]) -> dict[str, tuple[int, ...]]:
        """On the coordinator: compare what several ranks hold, since only one copy of it is saved.

        Returns:
            The values that differ, by key (bounded), with all ranks that hold them.

        Raises:
            PlanConflict: something differs, with ``on_replica_mismatch="error"``.
        """
        compared = find_differing(plan.items, plan.contested, digests)
        differing = [each for each in compared if not each.is_contested]
        ranks = {each.key: tuple(sorted(sum(each.ranks, ()))) for each in differing[:_MAX_DIFFERING]}
        if differing and self.options.on_replica_mismatch == "error":
            key = differing[0].key
            raise PlanConflict(
                f'{_in_words(differing)}; on_replica_mismatch="error" forbids that', key=key, ranks=list(ranks[key])
            )
        if differing:
            logger.warning("%s: %s", self.checkpoint, _in_words(differing))
        _warn_of_replicas(self.checkpoint, plan.unclaimed, [each for each in compared if each.is_contested])
        return ranks


# The stages.


class SaveSession(msgspec.Struct, frozen=True, eq=False):
    """One save on one rank, before its ranks have agreed.

    Attributes:
        planning: with whom it is planned, and how.
        writer: writes and commits.
        clock: how long the phases of this save took on this rank, with the wait for other ranks.
        unloadable: the objects on this rank that a load would refuse, and what to do about them.
        needs_one_directory: what kind of save this is, if it cannot be made on nodes that do not share the directory,
            for example because one rank writes more files into it.
        delivery: what follows the commit. ``None`` inside stock's ``save``, which knows nothing of it.
    """

    planning: Planning
    writer: RobustWriter
    clock: PhaseClock
    unloadable: UnloadableObjects
    needs_one_directory: str
    delivery: Delivery | None

    def agree(self, describe: Callable[[], LocalStructure]) -> AgreedSave:
        """Let the writer begin, and agree with all ranks on the plan.

        Args:
            describe: describes this rank's structure. If it raises, every rank raises.

        Raises:
            PlanConflict: the ranks contradict each other.
            StructureChanged: the structure changed, with ``on_structure_change="error"``.
            ExchangeError: a rank is missing, late, or in another operation.
        """
        planning, writer = self.planning, self.writer
        channel, ranks = planning.channel, planning.channel.ranks

        def look() -> tuple[LocalStructure, KeptPlan | None]:
            if planning.leads and channel.rank == 0:
                # If stock makes every rank the coordinator (no_dist=True), rank 0 counts as the coordinator.
                writer.directory.announce()
            local = describe()
            return local, plan_of(ranks, channel.rank, local, leads=planning.leads)

        with self.clock.phase("plan"):
            # Before all ranks are there, some may write if all have a plan: if this one has none, nobody writes.
            with self.undone_after_failure(channel, may_be_writing=lambda: bool(plans_of(ranks))):
                (local, kept), agreement = channel.agree(planning.phase("agree"), look, self._offer)
            with self.undone_after_failure(channel, may_be_writing=lambda: False):  # all have heard the same
                if not agreement.same_value:  # some ranks would come to one exchange more than others
                    message = (
                        f"{planning.checkpoint}: on_commit was given on rank {agreement.lowest_rank}, and not on rank "
                        f"{agreement.highest_rank}: give it on all ranks, although only the coordinator calls it"
                    )
                    if agreement.lowest >> 2 != agreement.highest >> 2:
                        message = (
                            f"{planning.checkpoint}: parity_nodes is {agreement.lowest >> 2 or None} on rank "
                            f"{agreement.lowest_rank}, and {agreement.highest >> 2} on rank {agreement.highest_rank}: "
                            "give the same on all ranks"
                        )
                    raise ExchangeError(
                        message,
                        phase=planning.phase("agree"),
                        ranks=sorted((agreement.lowest_rank, agreement.highest_rank)),
                    )
            with self.undone_after_failure(channel):
                plan = planning.settle(local, kept, agreement, plans_of(ranks))
        with self.undone_after_failure(plan.channel):
            writer.adopt(agreement.notice)
            # Rank 0 has announced the save before it agreed. If another rank is the coordinator, all ranks wait for it,
            # because they look for the announcement before they write.
            if plan.channel.coordinator_rank != 0:
                plan.channel.barrier(planning.phase("announce"), then=writer.directory.announce)
            elif plan.channel.is_coordinator:
                writer.directory.announce()
        return AgreedSave(
            self,
            plan,
            commits_together=self.delivery is not None or plan.n_leaders > 1,
            checks_room=not plan.was_offered or agreement.count(_NEEDS_ROOM) > 0,  # ask only if room is short
        )

    def _offer(self, looked: tuple[LocalStructure, KeptPlan | None]) -> Offer:
        local, kept = looked
        offer, delivery = self.planning.offer(local, kept), self.delivery
        has_room = kept is not None and self.writer.has_ample_room(kept.share.total_nbytes)
        return replace(
            offer,
            flags=offer.flags | (0 if has_room else _NEEDS_ROOM),
            value=(0 if delivery is None else 1 if delivery.on_commit is not None else 2)
            + ((self.writer.options.parity_nodes or 0) << 2),
            notice=self.writer.mark if self.planning.leads else 0,
        )

    @contextmanager
    def undone_after_failure(
        self, channel: Channel, may_be_writing: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Remove what this save has made if the block fails.

        If the ranks are out of step and some may be writing, nothing is removed. The coordinator may have heard from
        all ranks and be committing. If it is not, the next save into the directory removes what is left."""
        try:
            yield
        except BaseException as error:
            directory = self.writer.directory
            if failed_in_step(error):
                clean_up(channel, self.planning.phase("clean up"), directory, error)
            elif channel.size > 1 and may_be_writing():
                directory.release()
            else:
                directory.roll_back(error)
            # Inside stock `save` with collectives the coordinator's error says everything, and stock prints all errors.
            is_in_stock = not self.planning.leads and self.delivery is None
            if is_in_stock and isinstance(error, RobustCheckpointError) and not isinstance(error, ExchangeError):
                raise error.in_brief() from error
            raise


class _FilesOfRank(NamedTuple):
    """What a rank has written; its piece of ``.metadata``, and its block of the index, which is empty if it could not
    be written; whether it leads in a directory that the coordinator does not see; and the last save by this plan."""

    files: WrittenFiles
    piece: bytes
    block: bytes
    leads_directory: bool
    last: LastSave | None

    @property
    def offer(self) -> Offer:
        flags = _LEADS_DIRECTORY if self.leads_directory else 0
        flags |= _HAS_PARAMETERS if self.files.parameters else 0
        if self.last is None:
            return Offer(flags=flags)
        flags |= _SAME_PARAMETERS if self.files.parameters == self.last.parameters else 0
        flags |= _OTHERS_DIFFER if self.files.others != self.last.others else 0
        return Offer(same=self.last.mark.to_bytes(len(_NO_PLAN), "big"), flags=flags)


class AgreedSave(msgspec.Struct, frozen=True, eq=False):
    """A save whose ranks have agreed on a plan.

    Attributes:
        session: the save.
        plan: the plan.
        commits_together: whether all ranks call ``commit``. Inside stock ``save`` with collectives only the
            coordinator does, and stock tells the others.
        checks_room: whether the ranks add up before they write whether there is room.
    """

    session: SaveSession
    plan: AgreedPlan
    commits_together: bool
    checks_room: bool

    def write(self, source: Callable[[], ItemSource]) -> WrittenSave:
        """Let the writer write this rank's files. Learn whether all ranks have written, and what a load would refuse.

        Args:
            source: gives the data of this rank's share, in plan order. If it fails, or if writing fails, the other
                ranks hear of it while they still write (:meth:`Channel.check_stop`), and all ranks raise.
        """
        session, channel, checkpoint = self.session, self.plan.channel, self.session.planning.checkpoint
        phase, leads_directory = session.planning.phase, None
        with session.undone_after_failure(channel), session.clock.phase("write"):
            if self.checks_room:
                leads_directory, _ = channel.gather(
                    phase("room"),
                    self._join,
                    RoomOfRank,
                    message=self._room,
                    then=partial(refuse_without_room, checkpoint),
                )
            here, messages = channel.gather(
                phase("write"),
                partial(self._write, source, leads_directory),
                Written,
                message=self._message,
                offer=attrgetter("offer"),
            )
            agreement = channel.last_agreement
            what = session.needs_one_directory
            if not self.commits_together:
                what = "A save by torch.distributed.checkpoint"
            elif not self.plan.local.layout.may_share_directory:
                what = f"A save with layout={self.plan.local.layout.name!r}"
            is_on_nodes = agreement.count(_LEADS_DIRECTORY) > 0
            if is_on_nodes and what:
                raise not_one_directory(checkpoint, f"rank {agreement.first_rank(_LEADS_DIRECTORY)}", what)
        messages = messages or []
        for message in filter(None, messages):
            session.writer.directory.hashes.update(message.hashes)
        refused = {rank: each.unloadable for rank, each in enumerate(messages) if each and each.unloadable}
        unloadable = report_unloadable(checkpoint, refused) if refused else {}
        is_unchanged = agreement.is_same and agreement.count(_SAME_PARAMETERS) == agreement.n_ranks
        return WrittenSave(
            self,
            *here,
            is_on_nodes,
            messages,
            unloadable,
            is_unchanged=is_unchanged and agreement.count(_HAS_PARAMETERS) > 0,
            others_differ=agreement.count(_OTHERS_DIFFER) > 0,
        )

    def _join(self) -> bool:
        """Whether this rank leads in a directory that the coordinator does not see."""
        return self.plan.channel.size > 1 and self.session.writer.directory.join()

    def _room(self, leads_directory: bool) -> RoomOfRank:
        kept, channel = self.plan.kept, self.plan.channel
        is_alone = channel.size == 1
        return self.session.writer.room(channel.rank, kept.placements, kept.variable_places, is_alone=is_alone)

    def _write(self, source: Callable[[], ItemSource], leads_directory: bool | None) -> _FilesOfRank:
        if leads_directory is None:
            leads_directory = self._join()
        session, channel = self.session, self.plan.channel
        started, kept = time.perf_counter(), self.plan.kept
        files = session.writer.write(channel.rank, source(), kept.placements, channel.check_stop)
        piece, block = self.plan.local.pieces(kept.share, kept.placements, files.names, files.variable_places)
        if piece and not session.writer.directory.write_pieces(piece, kept.share.piece_at, block, kept.share.block_at):
            block = b""
        session.clock.own_write_seconds = time.perf_counter() - started
        session.unloadable.raise_if_forbidden(session.planning.checkpoint)
        # Others may have been committed since this one was planned.
        key = kept.share.plan_id, self.kind
        last = next((k.last for k in plans_of(channel.ranks) if (k.share.plan_id, k.kind) == key), None)
        return _FilesOfRank(files, piece, block, leads_directory, last)

    @property
    def kind(self) -> str:
        """What the plan is kept as, for the next save."""
        kept, kind = self.plan.kept, self.session.planning.options.kind
        return kept.kind or kept.share.plan_id.hex() if kind is None else NAMED + kind

    def _message(self, here: _FilesOfRank) -> Written | None:
        """What the coordinator does not know of the files of this rank."""
        session, files, refused = self.session, here.files, self.session.unloadable.refused
        message = Written(
            piece=(len(here.piece), crc32(here.piece)),
            block_nbytes=len(here.block),
            # Once for each plan, for the sizes of modules.
            places=b"" if self.plan.kept.variable_places is not None else files.variable_places.astype("<i8").tobytes(),
            unloadable=refused,
            hashes=session.writer.directory.hashes,
        )
        if session.writer.options.report:
            return with_row(message, self.plan.channel.rank, session.clock, files)
        return message if here.piece or refused or message.hashes else None

    def write_items(self, items: Sequence[WriteItem], planner: SavePlanner) -> WrittenSave:
        """Do the same as :meth:`write` when stock ``save`` calls the writer's ``write_data``.

        Stock lets each rank commit only with ``no_dist=True``. Otherwise the coordinator alone commits. Then this rank
        keeps its plan now, but no save uses it unless the coordinator, which knows of the commit, offers it too.

        Args:
            items: this rank's share, as stock has it.
            planner: the planner that made it. ``RobustPlanner`` gives its data by ``source``, and another one, which
                wraps that, by ``resolve_data``.
        """

        def source() -> ItemSource:
            make: Callable[[AgreedSave], ItemSource] | None = getattr(planner, "source", None)
            if make is not None:
                return make(self)
            return WriteItemSource(items, partial(self.session.unloadable.resolve, planner.resolve_data))

        written = self.write(source)
        if not self.plan.channel.is_coordinator and not self.commits_together:
            written.keep_plan(confirmed=False)
        return written


class WrittenSave(msgspec.Struct, frozen=True, eq=False):
    """A save whose files are durable on all ranks. Readers do not see them yet.

    Attributes:
        agreed: the save, and its plan.
        files: what this rank has written.
        piece, block: its piece of ``.metadata`` and its block of the index, for nodes that do not share the directory.
        leads_directory: whether this rank commits in a directory that the coordinator does not see.
        last: the last save by this plan.
        is_on_nodes: whether some rank does.
        messages: on the coordinator, what each rank has said of what it has written.
        unloadable_objects: on the coordinator, objects that a load would refuse, and why, by key.
        is_unchanged: whether the parameters of all ranks are those of the last save.
        others_differ: whether something else is not.
    """

    agreed: AgreedSave
    files: WrittenFiles
    piece: bytes
    block: bytes
    leads_directory: bool
    last: LastSave | None
    is_on_nodes: bool
    messages: Sequence[Written | None]
    unloadable_objects: dict[str, str]
    is_unchanged: bool
    others_differ: bool

    @property
    def identical_to(self) -> str:
        """The checkpoint of the last save, if its parameters are those of this one."""
        return self.last.checkpoint if self.last is not None and self.is_unchanged else ""

    def commit(self) -> CommittedSave:
        """Make the checkpoint visible, and keep the plan for the next save.

        Each rank that commits checks that its files are still as it wrote them. Then the coordinator publishes. Once
        all ranks know that the checkpoint is committed, the coordinator removes what it replaces; no rank waits for
        that.
        """
        agreed, plan, session = self.agreed, self.agreed.plan, self.agreed.session
        channel, phase, directory = plan.channel, session.planning.phase, session.writer.directory
        earlier_drains = () if session.delivery is None else session.delivery.queue.under_way()
        protection = None
        if session.writer.options.parity_nodes is not None and session.delivery is not None:
            protection = self._protection(session.delivery)
        try:
            with session.clock.phase("commit"):
                if self.is_on_nodes:
                    commit_on_nodes(
                        channel,
                        phase,
                        directory,
                        leads_directory=self.leads_directory,
                        pieces=(self.piece, self.block),
                        make_metadata=self._make_metadata,
                    )
                elif agreed.commits_together:
                    channel.barrier(phase("commit"), directory.check_written, then=self._publish)
                elif channel.is_coordinator:  # the writer checks the files of all ranks
                    self._publish()
        except BaseException as error:
            # Only some ranks may know how the commit ended.
            forget_plan(channel.ranks, plan.kept.share.plan_id)
            if not agreed.commits_together:  # only the coordinator is here, and it knows the files of all ranks
                directory.roll_back(error)
            elif failed_in_step(error) and nothing_is_committed(channel, phase("clean up"), directory, error):
                clean_up(channel, phase("clean up"), directory, error)
            else:
                directory.release()
            if agreed.commits_together and isinstance(error, ExchangeError):  # the last message may be lost for good
                error.message += (
                    "; this save may be committed all the same: it is if "
                    f"{session.planning.checkpoint}/.metadata names files with the mark {mark_of(directory.save_id)}"
                )
            raise
        self.keep_plan(confirmed=agreed.commits_together)
        loads: tuple[LoadBefore, ...] = ()
        if channel.is_coordinator and session.writer.options.report:
            places = [b"" if message is None else message.places for message in self.messages]
            metadata = None if plan.kept.plan is None else plan.kept.plan.metadata
            loads = tuple(LOADS)
            LOADS.clear()
            is_left = directory.leave_report(
                lambda save_id, fallbacks: make_report(
                    self.messages,
                    session.clock,
                    checkpoint=session.planning.checkpoint,
                    save_id=save_id,
                    plan=plan.how,
                    fallbacks=fallbacks,
                    identical_to=self.identical_to,
                    loads=loads,
                    modules=None if metadata is None else metadata.module_sizes(places),
                )
            )
            if not is_left:
                tell_again(loads)
        if channel.is_coordinator or self.leads_directory:
            directory.tidy_up()
        return CommittedSave(self, earlier_drains, protection, loads)

    def _protection(self, delivery: Delivery) -> Protection | None:
        """What makes the checkpoint outlive the loss of a node, if nodes do not share the directory."""
        session, writer, channel = self.agreed.session, self.agreed.session.writer, self.agreed.plan.channel
        if not self.is_on_nodes:
            if channel.is_coordinator:
                log_no_parity(os.path.dirname(writer.path))
            return None
        return Protection(
            writer,
            session.planning.checkpoint,
            leads=channel.is_coordinator or self.leads_directory,
            open_channel=partial(delivery.open_channel, timeout_seconds=channel.timeout_seconds),
            queue=queue_of(channel.ranks, "protection"),
        )

    def _publish(self) -> None:
        directory, metadata = self.agreed.session.writer.directory, self._make_metadata()
        directory.prepare(metadata, metadata.files)
        if self.agreed.commits_together:
            directory.finish(metadata, are_checked=True, stop_if_given_up=self.agreed.plan.channel.stop_if_given_up)
        else:  # the other ranks wait in a collective of stock's
            directory.finish(metadata)

    def _make_metadata(self) -> MetadataToPublish:
        """On the coordinator: what the ranks have not written of this checkpoint's ``.metadata`` and index.

        Raises:
            ExchangeError: a rank has not written its piece of ``.metadata``.
        """
        plan, session = self.agreed.plan.kept.plan, self.agreed.session
        if plan is None:
            raise ValueError("only the coordinator has the metadata")
        messages = [Written() if message is None else message for message in self.messages]
        stored: Mapping[str, Section] | None = {}
        for rank, (share, message) in enumerate(zip(plan.shares, messages, strict=True)):
            if message.piece[0] != share.piece_nbytes:
                raise ExchangeError(
                    f"rank {rank} has written {message.piece[0]} bytes of .metadata, and the plan has "
                    f"{share.piece_nbytes} for it; save again",
                    ranks=[rank],
                )
            if message.block_nbytes != share.block_nbytes:
                stored = None
        if stored is not None and not plan.is_contested:  # if several claim the main replica, a resumed job must warn
            try:
                stored = plan.sections
            except Exception as error:  # the checkpoint is complete without it
                without = "its plan could not be stored, so a job that resumes from it makes a new plan"
                logger.warning("%s: %s: %s", session.planning.checkpoint, without, error)
        meta = session.writer.plain_meta(on_nodes=self.is_on_nodes)
        return plan.metadata.encode([message.piece for message in messages], meta, stored)

    def keep_plan(self, *, confirmed: bool) -> None:
        """Keep the plan for the next save.

        Args:
            confirmed: whether this rank knows that the checkpoint was committed.
        """
        agreed, files, channel = self.agreed, self.files, self.agreed.plan.channel
        checkpoint, was_told = agreed.session.planning.checkpoint, self.last is not None and self.last.is_told
        is_told = bool(self.identical_to) and (was_told or self.others_differ)
        if is_told and not was_told and channel.is_coordinator:
            logger.warning(
                "%s: all parameters are identical to those in %s, and other values are not. Unless all are frozen, the "
                "optimizer does not step the parameters that are saved",
                checkpoint,
                self.identical_to,
            )
        keep_plan(
            channel.ranks,
            replace(
                agreed.plan.kept,
                variable_places=files.variable_places if confirmed else None,
                loaded_from="",
                kind=agreed.kind,
                last=LastSave(checkpoint, agreed.session.writer.mark, files.parameters, files.others, is_told),
            ),
        )


class CommittedSave(msgspec.Struct, frozen=True, eq=False):
    """A save that has made a checkpoint.

    Attributes:
        written: what it has written.
        earlier_drains: those that were under way before the commit.
        protection: makes it outlive the loss of a node; ``None`` if that is not asked for, or not needed.
        loads: those of which its report tells.
    """

    written: WrittenSave
    earlier_drains: Collection[SaveFuture[Any]]
    protection: Protection | None
    loads: Sequence[LoadBefore]

    def deliver(self) -> None:
        """Do what follows the commit.

        Raises:
            RobustCheckpointError: the same on all ranks. It says that the checkpoint is committed, and where.
        """
        written, plan, session = self.written, self.written.agreed.plan, self.written.agreed.session
        try:
            if session.delivery is not None:
                leads = plan.channel.is_coordinator or written.leads_directory
                session.delivery.deliver(
                    plan.channel, session.clock, names=written.files.names, leads=leads, after=self.earlier_drains
                )
        except BaseException:
            delivery = session.delivery
            if delivery is not None and delivery.is_staged and not delivery.has_arrived:  # nor has the report
                tell_again(self.loads)
            raise
        finally:
            if self.protection is not None:
                self.protection.begin()

    def report(self, *, blocked_seconds: float) -> SaveReport:
        """The report of the save, which is over. Listeners are told that it has ended."""
        written, plan, session = self.written, self.written.agreed.plan, self.written.agreed.session
        files, checkpoint, clock = written.files, session.planning.checkpoint, session.clock
        place = session.writer.place
        report = SaveReport(
            checkpoint_id=checkpoint,
            rank=plan.channel.rank,
            world_size=plan.channel.size,
            items=len(plan.kept.share.kept),
            nbytes=files.nbytes,
            phases=tuple(clock.records),
            blocked_seconds=blocked_seconds,
            plan=plan.how.outcome,
            reason=plan.how.reason,
            changes=plan.how.changes,
            differing_replicas=plan.differing_replicas,
            unloadable_objects=written.unloadable_objects,
            total_nbytes=None if plan.kept.plan is None else plan.kept.plan.nbytes,
            files=files.names,
            how=(*files.how, *clock.remarks),
            peak_buffer_nbytes=files.peak_buffer_nbytes,
            stragglers=tuple(plan.channel.stragglers),
            leads_directory=written.leads_directory,
            identical_to=written.identical_to,
            _read_metadata=lambda: RobustReader(place).read_metadata(),
            _protection=None if self.protection is None else self.protection.future,
        )
        clock.tell("ended", report=report, seconds=clock.seconds)
        return report


def _in_words(differing: Sequence[Differing]) -> str:
    return (
        f"{len(differing)} value(s) of one name differ between ranks (ranks that hold the same are named together): "
        f"{listed(differing)}. Only the copy of the lowest rank is saved, and all ranks will load that one"
    )


def _warn_of_replicas(checkpoint: str, unclaimed: Sequence[str], contested: Sequence[Differing]) -> None:
    """Say where a state dict does not have exactly one main replica."""
    if unclaimed:
        logger.warning(
            "%d tensor(s) have shards without a main replica (replica_id 0) on any rank: %s. One copy of each "
            "is saved; stock Megatron leaves them out. validate_access_integrity=True refuses such a state dict",
            len(unclaimed),
            listed(map(repr, unclaimed)),
        )
    if contested:
        logger.warning(
            "%s: %d shard(s) have more than one main replica (replica_id 0), and the contents of %d of them differ "
            "(large ones are not compared): %s. That of the lowest rank is saved. validate_access_integrity=True "
            "refuses such a state dict: give all but one of them another replica_id",
            checkpoint,
            len(contested),
            sum(len(each.ranks) > 1 for each in contested),
            listed(contested),
        )
