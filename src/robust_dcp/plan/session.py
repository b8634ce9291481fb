"""One save on one rank, from its turn to its report.

This module owns the order of exchanges in a save, and what is kept for the next save. Its steps are taken one by one,
also where stock DCP saves, through the hooks of ``RobustPlanner`` and ``RobustWriter``. The session tells its writer
what to do when. How values are described and digested, and how bytes get to a disk, is handed to it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from robust_dcp.comm import Agreement, Channel, Offer, combined_signature
from robust_dcp.drain.delivery import Delivery, staging_directory
from robust_dcp.errors import (
    ExchangeError,
    PlanConflict,
    RobustCheckpointError,
    StructureChanged,
    ranks_in_words,
)
from robust_dcp.items import ItemsMessage
from robust_dcp.phases import PhaseClock
from robust_dcp.plan.cache import NAMED, KnownPlan, forget_plan, keep_plan, last_of_kind, plan_of, plans_of
from robust_dcp.plan.clean_up import clean_up, failed_in_step, nothing_is_committed
from robust_dcp.plan.conflicts import Differing, find_differing
from robust_dcp.plan.diff import bounded, diff_items
from robust_dcp.plan.global_plan import GlobalPlan, make_global_plan
from robust_dcp.plan.node_commit import commit_on_nodes
from robust_dcp.plan.plan import LocalStructure, Plan, PlanReply, structures_of_all
from robust_dcp.plan.save_report import Written, make_report
from robust_dcp.plan.unloadable import OnUnloadableObject, UnloadableObjects, report_unloadable
from robust_dcp.report import PlanReport, SaveReport, listed
from robust_dcp.save_queue import SaveQueue
from robust_dcp.storage.committing.save import MetadataToPublish, not_one_directory
from robust_dcp.storage.files.paths import is_url
from robust_dcp.storage.index.form import Section
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.writer import RobustWriter, RoomOfRank, refuse_without_room
from robust_dcp.storage.writing.engine import WrittenFiles
from robust_dcp.storage.writing.item_source import ItemSource, WriteItemSource

OnStructureChange = Literal["rebuild", "error", "quiet"]
OnReplicaMismatch = Literal["warn", "error", "ignore"]

Places = npt.NDArray[np.int64]

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

_NO_PLAN: Final = Offer().plan_id
_MAX_DIFFERING: Final = 200
"""How many differing values the coordinator tells the other ranks."""

_SAME_VERDICT_SECONDS: Final = 5.0
"""All ranks hear within that time that a drain has failed."""


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


@dataclass(eq=False)
class SaveSession:
    """The state of one save on one rank. Call ``agree``, ``write`` and ``commit`` in this order.

    Args:
        channel: the channel to the other ranks. After :meth:`agree` its coordinator is the rank that plans and commits.
        checkpoint: the checkpoint's name. It is part of every phase's name, so saves to different places are noticed.
        writer: writes and commits. If it is ``None``, stock calls another writer, and the session only plans.
        unloadable: the objects on this rank that a load would refuse, and what to do about them.
        commits_together: whether all ranks call ``commit``. Inside stock ``save`` with collectives only the
            coordinator does, and stock tells the others.
        needs_one_directory: what kind of save this is, if it cannot be made on nodes that do not share the directory,
            for example because one rank writes more files into it.

    Attributes:
        queues: the async saves and the drains of the group, which this save comes after. None inside stock ``save``.
        on_commit: as for ``save``.
        leads: whether the caller made this rank the coordinator. ``n_leaders`` says how many ranks were made it.
        local: what this rank holds.
        how: how the plan was made.
        differing_replicas: values with contents that differ between ranks, and the ranks that hold them. They are
            compared only when a plan is made.
        clock: how long the phases of this save took on this rank, with the wait for other ranks.
        messages: on the coordinator, what each rank has said of what it has written.
    """

    channel: Channel
    checkpoint: str
    writer: RobustWriter | None = None
    options: SaveOptions = field(default_factory=SaveOptions)
    unloadable: UnloadableObjects = field(default_factory=UnloadableObjects)
    commits_together: bool = False
    needs_one_directory: str = ""

    queues: tuple[SaveQueue, ...] = field(default=(), init=False)
    on_commit: Callable[[], object] | None = field(default=None, init=False)
    leads: bool = field(default=True, init=False)
    n_leaders: int = field(default=0, init=False)
    local: LocalStructure = field(init=False)
    how: PlanReport = field(default_factory=PlanReport, init=False)
    differing_replicas: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False)
    written: WrittenFiles | None = field(default=None, init=False)
    unloadable_objects: dict[str, str] = field(default_factory=dict, init=False)
    leads_directory: bool = field(default=False, init=False)
    clock: PhaseClock = field(init=False)
    messages: Sequence[Written | None] = field(default=(), init=False)
    _known: KnownPlan | None = field(default=None, init=False)
    _own_offer: Offer = field(default_factory=Offer, init=False)
    _may_be_writing: bool = field(default=False, init=False)
    _has_joined: bool = field(default=False, init=False)
    _checks_room: bool = field(default=True, init=False)
    _are_on_nodes: bool = field(default=False, init=False)
    _written_signature: bytes = field(default=b"", init=False)
    _places_of_all: tuple[Places, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self.clock = PhaseClock(self.channel, tells=False)

    @property
    def known(self) -> KnownPlan:
        """The plan of this save, after :meth:`agree`: what this rank writes, where, and how it was the last time."""
        if self._known is None:
            raise ValueError("the ranks have not agreed on a plan")
        return self._known

    def phase(self, name: str) -> str:
        """The name of a phase of this save in exchanges and errors."""
        return f"save {self.checkpoint}: {name}"

    def agree(self, describe: Callable[[], LocalStructure], *, leads: bool) -> None:
        """Let the writer begin, and agree with all ranks on the plan of this save.

        If an earlier async save or drain has failed, and some rank has not seen its error yet, all ranks raise it.

        Args:
            describe: describes this rank's structure. If it raises, every rank raises.
            leads: whether the caller made this rank the coordinator. If exactly one rank leads, it plans and commits.

        Raises:
            PlanConflict: the ranks contradict each other.
            StructureChanged: the structure changed, with ``on_structure_change="error"``.
            ExchangeError: a rank is missing, late, or in another operation.
        """
        self.leads = leads
        try:
            with self.cleaned_up_after_failure():
                with self.clock.phase("plan"):
                    # Under rank 0, because which rank leads is not known yet.
                    agreement = self.channel.led_by(0).agree(self.phase("agree"), partial(self._offer, describe))
                    self._follow_coordinator(agreement)
                    # Each rank decides alone, from the same bytes, so all agree.
                    may_reuse = (
                        agreement.same_plan_id
                        and agreement.plan_id != _NO_PLAN
                        and agreement.count(MATCHES) == agreement.n_ranks
                        and agreement.first_rank(_HAS_PLAN) == self.channel.coordinator_rank
                    )
                    if may_reuse:
                        since = self.known.loaded_from and f" since {self.known.loaded_from}"
                        self.how = PlanReport("reused", f"no rank's structure has changed{since}")
                        self._checks_room = agreement.count(_NEEDS_ROOM) > 0  # ask only if room is short
                    else:
                        self._make_plan(agreement)
                    self.local = replace(self.local, digests_of=None)  # or the planner and its session hold each other
                if self.writer is not None:
                    self.writer.adopt(agreement.told)
                    if is_url(self.writer.checkpoint_id):
                        self.writer.path = staging_directory(self.checkpoint, self.writer.mark)
                    # Rank 0 has announced the save before it agreed. If another rank is the coordinator, all ranks wait
                    # for it, because they look for the announcement before they write.
                    if self.channel.coordinator_rank != 0:
                        self.channel.barrier(self.phase("announce"), then=self.writer.directory.announce)
                    elif self.channel.is_coordinator:
                        self.writer.directory.announce()
        except BaseException as told:
            # Another rank may tell of a drain whose end this rank is about to hear. It must not tell of it once more.
            for queue in self.queues[1:]:
                queue.wait(timeout_seconds=_SAME_VERDICT_SECONDS)
            for queue in self.queues:
                queue.forget_told(told)
            raise

    def _offer(self, describe: Callable[[], LocalStructure]) -> Offer:
        """Look at what this rank holds, and offer the plan that it would use, which need not fit the structure."""
        writer = self.writer
        if writer is not None and self.leads and self.channel.rank == 0:
            # If stock makes every rank the coordinator (no_dist=True), rank 0 counts as the coordinator.
            writer.directory.announce()
        for queue in self.queues:
            queue.raise_unreported()
        self.local = describe()
        known = None
        if writer is not None:  # another storage writer does not tell whether its checkpoint was committed
            known = self._known = plan_of(self.channel.ranks, self.channel.rank, self.local, leads=self.leads)
        self._may_be_writing = known is not None  # some rank may have the plan before others are there
        flags = _LEADS if self.leads else 0
        if known is None or writer is None:
            flags |= _NEEDS_ROOM
        else:
            flags |= MATCHES if known.signature == self.local.signature.value else 0
            flags |= _HAS_PLAN if known.plan is not None else 0
            flags |= 0 if writer.has_ample_room(known.share.total_nbytes) else _NEEDS_ROOM
        self._own_offer = Offer(
            plan_id=_NO_PLAN if known is None else known.offered_id,
            flags=flags,
            value=0 if not self.queues else 1 if self.on_commit is not None else 2,
            told=writer.mark if writer is not None and self.leads else 0,
        )
        return self._own_offer

    def _follow_coordinator(self, agreement: Agreement) -> None:
        """Stock ``save`` makes one rank the coordinator, not always rank 0. With ``no_dist=True`` each rank is one."""
        if not agreement.same_value:  # some ranks would come to one exchange more than others
            self._may_be_writing = False  # all ranks have heard the same, and refuse
            raise ExchangeError(
                f"{self.checkpoint}: on_commit was given on rank {agreement.lowest_rank}, and not on rank "
                f"{agreement.highest_rank}: give it on all ranks, although only the coordinator calls it",
                phase=self.phase("agree"),
                ranks=sorted((agreement.lowest_rank, agreement.highest_rank)),
            )
        self.n_leaders, leader = agreement.count(_LEADS), agreement.first_rank(_LEADS)
        if leader is not None and self.n_leaders == 1:
            self.channel = self.channel.led_by(leader)

    def _make_plan(self, agreement: Agreement) -> None:
        """Send the structures to the coordinator, which makes the plan, and get this rank's share."""
        coordinator_rank = self.channel.coordinator_rank
        # A rank need not send its structure if the coordinator has offered a plan that holds it. What rank 0 has
        # offered is known to all.
        is_held = (
            (agreement.same_plan_id or coordinator_rank == 0)
            and agreement.first_rank(_HAS_PLAN) == coordinator_rank
            and self._own_offer.plan_id == agreement.plan_id != _NO_PLAN
            and bool(self._own_offer.flags & MATCHES)
        )
        structures = self.channel.gather(
            self.phase("structures"), lambda: None if is_held else self.local.to_message(), ItemsMessage
        )
        self._may_be_writing = True
        reply = self.channel.scatter(self.phase("plan"), lambda: self._plan_for_all(structures or []), PlanReply)
        if reply is None:
            raise ExchangeError(f"{self.checkpoint}: the coordinator sent this rank no plan", phase="plan")
        self.how, self.differing_replicas = reply.how, reply.differing
        if not self.channel.is_coordinator:
            # Without places, which the coordinator may not have: this rank sends them.
            self._known = KnownPlan(reply.share, self.local.place(reply.share), self.local.signature.value)

    def _plan_for_all(self, messages: Sequence[ItemsMessage | None]) -> list[PlanReply]:
        """On the coordinator: take an earlier plan for these structures, or make a plan. Returns each rank's reply."""
        group, local = self.channel.ranks, self.local
        items, signatures = structures_of_all(messages, None if self._known is None else self._known.plan, local)
        plans = [] if self.writer is None else plans_of(group)
        for known in plans:
            if known.plan is not None and known.plan.signatures == tuple(signatures):
                self._known = known
                how = PlanReport(
                    "reused", "the structures are those of an earlier save, which some ranks had not offered"
                )
                return [PlanReply(share, how) for share in known.plan.shares]
        last = last_of_kind(group, self.options.kind, items) if plans else None
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
        plan = Plan.of(decided, group, signatures, local)
        share = plan.shares[self.channel.rank]
        kind = share.plan_id.hex() if last is None else last.kind
        self._known = KnownPlan(share, local.place(share), local.signature.value, plan, kind=kind)
        return [PlanReply(each, how, differing) for each in plan.shares]

    def _compare(self, plan: GlobalPlan, digests: Sequence[bytes]) -> dict[str, tuple[int, ...]]:
        """On the coordinator: compare what several ranks hold, since only one copy of it is saved.

        Returns:
            The values that differ, by key (bounded), with all ranks that hold them.

        Raises:
            PlanConflict: something differs, with ``on_replica_mismatch="error"``.
        """
        found = find_differing(plan.items, plan.contested, digests)
        differing = [each for each in found if not each.is_contested]
        ranks = {each.key: tuple(sorted(sum(each.ranks, ()))) for each in differing[:_MAX_DIFFERING]}
        if differing and self.options.on_replica_mismatch == "error":
            key = differing[0].key
            raise PlanConflict(
                f'{_in_words(differing)}; on_replica_mismatch="error" forbids that', key=key, ranks=list(ranks[key])
            )
        if differing:
            logger.warning("%s: %s", self.checkpoint, _in_words(differing))
        _warn_of_replicas(self.checkpoint, plan.unclaimed, [each for each in found if each.is_contested])
        return ranks

    def write(self, source: Callable[[], ItemSource]) -> None:
        """Let the writer write this rank's files. Learn whether all ranks have written, and what a load would refuse.

        Args:
            source: gives the data of this rank's share, in plan order. If it fails, or if writing fails, the other
                ranks hear of it while they still write (:meth:`Channel.check_stop`), and all ranks raise.
        """
        with self.cleaned_up_after_failure(), self.clock.phase("write"):
            if self._checks_room:
                refuse = partial(refuse_without_room, self.checkpoint)
                self.channel.gather(self.phase("room"), self._room, RoomOfRank, then=refuse)
            messages = self.channel.gather(
                self.phase("write"), partial(self._write_own, source), Written, offer=self._written_offer
            )
            written = self.channel.last_agreement
            self._are_on_nodes = written.count(_LEADS_DIRECTORY) > 0
            what = self.needs_one_directory
            if not self.commits_together:
                what = "A save by torch.distributed.checkpoint"
            elif not self.local.layout.may_share_directory:
                what = f"A save with layout={self.local.layout.name!r}"
            if self._are_on_nodes and what:
                raise not_one_directory(self.checkpoint, f"rank {written.first_rank(_LEADS_DIRECTORY)}", what)
        if messages is None:
            return
        self.messages = messages
        if self.writer is not None:
            for message in filter(None, messages):
                self.writer.directory.hashes.update(message.hashes)
        told = {rank: message.unloadable for rank, message in enumerate(messages) if message and message.unloadable}
        if told:
            self.unloadable_objects = report_unloadable(self.checkpoint, told)
        self._written_signature = written.signature

    def _joined(self) -> tuple[RobustWriter, Placements]:
        """The writer, which has found the directory of the save, and the places of this rank's items."""
        if self.writer is None:
            raise ValueError("this save was planned for another storage writer")
        if self.channel.size > 1 and not self._has_joined:
            self._has_joined = True
            self.leads_directory = self.writer.directory.join()
        return self.writer, self.known.placements

    def _room(self) -> RoomOfRank:
        writer, placements = self._joined()
        return writer.room(self.channel.rank, placements, self.known.variable_places, is_alone=self.channel.size == 1)

    def _write_own(self, source: Callable[[], ItemSource]) -> Written | None:
        """Write this rank's files. Returns what the coordinator does not know of them."""
        writer, placements = self._joined()
        rank, known_places = self.channel.rank, self.known.variable_places
        started = time.perf_counter()
        written = writer.write(rank, source(), placements, self.channel.check_stop)
        self.clock.own_write_seconds = time.perf_counter() - started
        self.written = written
        unloadable = self.unloadable.found
        self.unloadable.raise_if_forbidden(self.checkpoint)
        places = b""
        if known_places is None or not np.array_equal(known_places, written.variable_places):
            places = written.variable_places.astype("<i8").tobytes()
        told = Written(places=places, unloadable=unloadable, hashes=writer.directory.hashes)
        if writer.options.report:
            return told.with_row(rank, self.clock, written.nbytes, len(written.names), written.how)
        return told if places or unloadable or told.hashes else None

    def _written_offer(self, _: Written | None) -> Offer:
        """By the digest of this rank's places the coordinator notices if it would fill in other places than it
        meant."""
        if self.written is None:
            return Offer()
        flags = _LEADS_DIRECTORY if self.leads_directory else 0
        return Offer(signature=digest_of_places(self.written.variable_places), flags=flags)

    def write_items(self, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        """Do the same as :meth:`write` when stock ``save`` calls the writer's ``write_data``.

        Stock lets each rank commit only with ``no_dist=True``. Otherwise the coordinator alone commits. Then this rank
        keeps its plan now, but no save uses it unless the coordinator, which knows of the commit, offers it too.

        Args:
            items: this rank's share, as stock has it.
            planner: the planner that made it. ``RobustPlanner`` gives its data by ``source``, and another one, which
                wraps that, by ``resolve_data``.
        """

        def source() -> ItemSource:
            make: Callable[[SaveSession], ItemSource] | None = getattr(planner, "source", None)
            if make is not None:
                return make(self)
            return WriteItemSource(items, partial(self.unloadable.resolve, planner.resolve_data))

        self.write(source)
        if not self.channel.is_coordinator and not self.commits_together:
            self._keep_plan(confirmed=False)

    def commit(self) -> None:
        """Make the checkpoint visible, keep the plan for the next save, and do what follows a commit.

        Each rank that commits checks that its files are still as it wrote them. Then the coordinator publishes. Once
        all ranks know that the checkpoint is committed, the coordinator removes what it replaces; no rank waits for
        that.
        """
        writer = self.writer
        if writer is None:
            raise ValueError("this save was planned for another storage writer")
        try:
            with self.clock.phase("commit"):
                if self._are_on_nodes:
                    commit_on_nodes(
                        self.channel,
                        self.phase,
                        writer.directory,
                        leads_directory=self.leads_directory,
                        make_metadata=partial(self._make_metadata, writer),
                    )
                elif self.commits_together:
                    publish = partial(self._publish, writer)
                    self.channel.barrier(self.phase("commit"), writer.directory.check_own, then=publish)
                elif self.channel.is_coordinator:  # the writer checks the files of all ranks
                    self._publish(writer)
        except BaseException as error:
            # Only some ranks may know how the commit ended.
            forget_plan(self.channel.ranks, self.known.share.plan_id)
            directory, phase = writer.directory, self.phase("clean up")
            if not self.commits_together:  # only the coordinator is here, and it knows the files of all ranks
                directory.roll_back(error)
            elif failed_in_step(error) and nothing_is_committed(self.channel, phase, directory, error):
                clean_up(self.channel, phase, directory, error)
            else:
                directory.release()
            raise
        self._keep_plan(confirmed=self.commits_together)
        if self.channel.is_coordinator and writer.options.report:
            metadata = None if self.known.plan is None else self.known.plan.metadata
            writer.directory.leave_report(
                lambda save_id, fallbacks: make_report(
                    self.messages,
                    self.clock,
                    checkpoint=self.checkpoint,
                    save_id=save_id,
                    plan=self.how,
                    fallbacks=fallbacks,
                    modules=None if metadata is None else metadata.module_sizes,
                )
            )
        if self.channel.is_coordinator or self.leads_directory:
            writer.directory.tidy_up()
        if self.queues:  # stock knows nothing of a delivery
            self._delivery(writer, self.queues[1]).deliver()

    def _publish(self, writer: RobustWriter) -> None:
        metadata = self._make_metadata(writer)
        writer.directory.prepare(metadata, metadata.files)
        writer.directory.finish(metadata, are_checked=self.commits_together)

    def _make_metadata(self, writer: RobustWriter) -> MetadataToPublish:
        """On the coordinator, after :meth:`write`: this checkpoint's ``.metadata`` and index.

        Raises:
            ExchangeError: the places of items of variable size are not those that the ranks meant.
        """
        plan = self.known.plan
        if plan is None:
            raise ValueError("only the coordinator has the metadata")
        none = np.empty((0, 2), dtype=np.int64)
        places = list(self.known.places_of_all or [none] * len(self.messages))
        for rank, message in enumerate(self.messages):
            if message is not None and message.places:
                if len(message.places) % 16:
                    raise ExchangeError(f"rank {rank} sent {len(message.places)} bytes of places", ranks=[rank])
                places[rank] = np.frombuffer(message.places, dtype="<i8").reshape(-1, 2)
        meant = combined_signature(list(map(digest_of_places, places)), self.channel.coordinator_rank)
        if meant != self._written_signature:
            raise ExchangeError(
                "the places of the objects that ranks wrote are not those that the coordinator has; save again"
            )
        self._places_of_all = tuple(places)
        stored: Mapping[str, Section] = {}
        if not plan.is_contested:  # if several ranks claim the main replica, a resumed job must warn again
            try:
                stored = plan.sections
            except Exception as error:  # the checkpoint is complete without it
                without = "its plan could not be stored, so a job that resumes from it makes a new plan"
                logger.warning("%s: %s: %s", self.checkpoint, without, error)
        return plan.metadata.encode(self._places_of_all, writer.plain_meta(), stored)

    def _delivery(self, writer: RobustWriter, drains: SaveQueue) -> Delivery:
        # A rank that waits for a store, and then to try again, is not silent: these waits have limits of their own.
        least_timeout_seconds = 2 * writer.drain_options.call_timeout_seconds
        return Delivery(
            checkpoint=self.checkpoint,
            channel=self.channel,
            clock=self.clock,
            writer=writer,
            names=() if self.written is None else self.written.names,
            leads=self.channel.is_coordinator or self.leads_directory,
            on_commit=self.on_commit,
            queue=drains,
            open_channel=lambda: Channel.for_group(
                self.options.process_group,
                operation=f"drain {self.checkpoint}",
                timeout_seconds=max(self.channel.timeout_seconds, least_timeout_seconds),
                no_dist=self.options.no_dist,
            ),
        )

    @contextmanager
    def cleaned_up_after_failure(self) -> Iterator[None]:
        """Remove what this save has made if the block fails.

        If the ranks are out of step and some may be writing, nothing is removed. The coordinator may have heard from
        all ranks and be committing. If it is not, the next save into the directory removes what is left."""
        try:
            yield
        except BaseException as error:
            if self.writer is not None:
                directory = self.writer.directory
                if failed_in_step(error):
                    clean_up(self.channel, self.phase("clean up"), directory, error)
                elif self._may_be_writing and self.channel.size > 1:
                    directory.release()
                else:
                    directory.roll_back(error)
            # Inside stock `save` with collectives the coordinator's error says everything, and stock prints all errors.
            is_in_stock = not self.leads and not self.commits_together
            if is_in_stock and isinstance(error, RobustCheckpointError) and not isinstance(error, ExchangeError):
                raise error.in_brief() from error
            raise

    def _keep_plan(self, *, confirmed: bool) -> None:
        """Keep the plan for the next save.

        Args:
            confirmed: whether this rank knows that the checkpoint was committed.
        """
        if self.written is None:
            return
        known = self.known
        kept = replace(
            known,
            variable_places=self.written.variable_places if confirmed else None,
            places_of_all=None if known.plan is None else self._places_of_all,
            places_mark=self.writer.mark if confirmed and self.writer is not None else 0,
            loaded_from="",
            kind=NAMED + self.options.kind
            if self.options.kind is not None
            else known.kind or known.share.plan_id.hex(),
        )
        keep_plan(self.channel.ranks, kept)

    def report(self, *, blocked_seconds: float) -> SaveReport:
        """The report of the save, which is over. Listeners are told that it has ended."""
        written = self.written
        path = "" if self.writer is None else self.writer.path
        if is_url(self.checkpoint):
            path = self.checkpoint
        report = SaveReport(
            checkpoint_id=self.checkpoint,
            rank=self.channel.rank,
            world_size=self.channel.size,
            items=len(self.known.share.kept),
            nbytes=0 if written is None else written.nbytes,
            phases=tuple(self.clock.records),
            blocked_seconds=blocked_seconds,
            plan=self.how.outcome,
            reason=self.how.reason,
            changes=self.how.changes,
            differing_replicas=self.differing_replicas,
            unloadable_objects=self.unloadable_objects,
            total_nbytes=None if self.known.plan is None else self.known.plan.nbytes,
            files=() if written is None else written.names,
            how=(*(() if written is None else written.how), *self.clock.remarks),
            peak_buffer_nbytes=0 if written is None else written.peak_buffer_nbytes,
            stragglers=tuple(self.channel.stragglers),
            leads_directory=self.leads_directory,
            _read_metadata=lambda: RobustReader(path).read_metadata(),
        )
        self.clock.tell("ended", report=report, seconds=self.clock.seconds)
        return report


def digest_of_places(places: Places) -> bytes:
    """What a rank offers for the places of its items of variable size: int64 ``[v, 2]``, as they are sent."""
    return hashlib.blake2b(places.astype("<i8").tobytes(), digest_size=16).digest()


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
