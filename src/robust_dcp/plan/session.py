"""One save on one rank, from agreement to commit.

This module owns the plan, the order of exchanges in a save, and what is kept for the next save. ``api.save`` calls its
phases one by one; stock DCP calls them through the hooks of ``RobustPlanner`` and ``RobustWriter``. The session tells
its writer what to do when. It knows nothing of tensors, files or file names.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from robust_dcp.comm import Agreement, Channel
from robust_dcp.errors import ExchangeError, RobustCheckpointError
from robust_dcp.plan.agreed_plan import AgreedPlan
from robust_dcp.plan.clean_up import clean_up, failed_in_step, nothing_is_committed
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.node_commit import commit_on_nodes
from robust_dcp.plan.plan import Plan
from robust_dcp.plan.share import Share
from robust_dcp.plan.unloadable import UnloadableObjects, report_unloadable
from robust_dcp.plan.written import (
    LEADS_DIRECTORY,
    WrittenMessage,
    digest_of,
    digest_offer,
    written_by_all,
    written_message,
    written_offer,
)
from robust_dcp.report_file import Changes, SavedReport, shortened
from robust_dcp.report_file import Plan as PlanOfReport
from robust_dcp.storage.committing.commit import MetadataToPublish
from robust_dcp.storage.committing.save import Save, not_one_directory
from robust_dcp.storage.index import Section
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.writer import RobustWriter
from robust_dcp.storage.writing.engine import WrittenFiles
from robust_dcp.storage.writing.item_source import ItemSource, WriteItemSource
from robust_dcp.storage.writing.room import RoomOfRank, refuse_without_room
from robust_dcp.storage.writing.save_report import SaidOfRank, SaveTimes, make_report, said_of_rank

__all__ = ["SaveSession"]

_REASON_LENGTH: Final = 2000

Data = torch.Tensor | io.BytesIO

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SaveSession:
    """The state of one save on one rank. Call ``agree``, ``write`` and ``commit`` in this order.

    Args:
        plan: the plan of this save, with the channel to the other ranks of the group.
        writer: writes and commits. If it is ``None``, stock calls another writer, and the session only plans.
        unloadable: the objects on this rank that a load would refuse, and what to do about them.
        commits_together: whether all ranks call ``commit``. Inside stock ``save`` with collectives only the
            coordinator does, and stock tells the others.
        needs_one_directory: what kind of save this is, if it cannot be made on nodes that do not share the directory,
            for example because one rank writes more files into it.

    Attributes:
        times: how long the parts of this save took on this rank.
        messages: on the coordinator, what each rank has said of what it has written.
    """

    plan: AgreedPlan
    writer: RobustWriter | None = None
    unloadable: UnloadableObjects = field(default_factory=UnloadableObjects)
    commits_together: bool = False
    needs_one_directory: str = ""

    written: WrittenFiles | None = field(default=None, init=False)
    unloadable_objects: dict[str, str] = field(default_factory=dict, init=False)
    digest: str | None = field(default=None, init=False)
    leads_directory: bool = field(default=False, init=False)
    times: SaveTimes = field(default_factory=SaveTimes, init=False)
    messages: Sequence[WrittenMessage | None] = field(default=(), init=False)
    _written_agreement: Agreement | None = field(default=None, init=False)
    _written_by_all: tuple[WrittenFiles, ...] = field(default=(), init=False)
    _are_on_nodes: bool = field(default=False, init=False)

    @property
    def channel(self) -> Channel:
        """The channel to the other ranks of the group. Its coordinator is the rank that plans and commits."""
        return self.plan.channel

    @property
    def checkpoint(self) -> str:
        """The checkpoint's name. It is part of every phase's name, so saves to different places are noticed."""
        return self.plan.checkpoint

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.channel.rank

    def agree(self, describe: Callable[[], LocalStructure], *, leads: bool) -> Share:
        """Let the writer begin, agree with all ranks on the plan of this save, and return this rank's share.

        Args:
            describe: describes this rank's structure. If it raises, every rank raises.
            leads: whether the caller made this rank the coordinator. If exactly one rank leads, it plans and commits.

        Raises:
            PlanConflict: the ranks contradict each other.
            StructureChanged: the structure changed, with ``on_structure_change="error"``.
            ExchangeError: a rank is missing, late, or in another operation.
        """

        def begin() -> LocalStructure:
            if self.writer is not None:
                # If stock makes every rank the coordinator (no_dist=True), rank 0 counts as the coordinator.
                self.writer.begin(is_coordinator=leads, announces=self.rank == 0)
            return describe()

        with self._cleaned_up_after_failure(), self.times.phase("plan"):
            if self.writer is None:
                mark = self.plan.agree(begin, leads=leads)
            else:
                own_mark, has_ample_room = self.writer.mark, self.writer.has_ample_room
                mark = self.plan.agree(begin, leads=leads, mark=own_mark, has_ample_room=has_ample_room)
        if self.writer is not None:
            self.writer.adopt(mark)
            self._announce(self.writer)
        return self.plan.share

    def _announce(self, writer: RobustWriter) -> None:
        """Let the coordinator announce the save. Rank 0 has done so before it agreed; if another rank is the
        coordinator, all ranks wait for it, because they look for the announcement before they write."""

        def announce() -> None:
            if self.channel.is_coordinator:
                writer.announce()

        if self.channel.coordinator_rank == 0:
            announce()
            return
        with self._cleaned_up_after_failure():
            self.channel.barrier(self.plan.phase("announce"), announce)

    def write(self, source: Callable[[], ItemSource]) -> None:
        """Let the writer write this rank's files. Learn whether all ranks have written, and what a load would refuse.

        Args:
            source: gives the data of this rank's share, in plan order. If it fails, or if writing fails, the other
                ranks hear of it while they still write (:meth:`check_stop`), and all ranks raise.
        """

        begun: list[tuple[RobustWriter, Placements]] = []

        def begin_own() -> tuple[RobustWriter, Placements]:
            placements = self.plan.share.placements
            if self.writer is None or placements is None:
                raise ValueError("this save was planned for another storage writer")
            if self.channel.size > 1:
                self.leads_directory = self.writer.join()
            begun.append((self.writer, placements))
            return begun[0]

        def own_room() -> RoomOfRank:
            writer, placements = begin_own()
            return writer.room(self.rank, placements, self.plan.known_places)

        def write_own() -> WrittenMessage | None:
            writer, placements = begun[0] if begun else begin_own()
            known_places = self.plan.known_places
            with self.times.own_write():
                self.written = writer.write(self.rank, source(), placements, self.check_stop, known_places)
            self.unloadable.raise_if_forbidden(self.checkpoint)
            return written_message(
                self.written.variable_places,
                known_places,
                self.unloadable.found,
                said_of_rank(self.rank, self.written, self.times) if writer.leaves_report else None,
            )

        with self._cleaned_up_after_failure(), self.times.phase("write"):
            if self.plan.checks_room:
                self.channel.gather(
                    self.plan.phase("room"), own_room, RoomOfRank, then=partial(refuse_without_room, self.checkpoint)
                )
            messages = self.channel.gather(
                self.plan.phase("write"),
                write_own,
                WrittenMessage,
                offer=lambda _: written_offer(self.written, leads_directory=self.leads_directory),
            )
            self._are_on_nodes = self.channel.last_agreement.count(LEADS_DIRECTORY) > 0
            if self._are_on_nodes:
                self._refuse_nodes(self.channel.last_agreement.first_rank(LEADS_DIRECTORY))
        self.messages = messages or []
        if self.channel.is_coordinator:
            told = [(rank, message.unloadable) for rank, message in enumerate(self.messages) if message is not None]
            self.unloadable_objects = report_unloadable(self.checkpoint, told)
        self._written_agreement = self.channel.last_agreement

    def _refuse_nodes(self, rank: int | None) -> None:
        """Raise if this save cannot be made on nodes that do not share its directory."""
        what = self.needs_one_directory
        if not self.commits_together:
            what = "A save by torch.distributed.checkpoint"
        elif not self.plan.local.layout.may_share_directory:
            what = f"A save with layout={self.plan.local.layout.name!r}"
        if what:
            raise not_one_directory(self.checkpoint, f"rank {rank}", what)

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
            return WriteItemSource(items, self.watched(planner.resolve_data)) if make is None else make(self)

        self.write(source)
        if not self.channel.is_coordinator and not self.commits_together:
            self._keep_plan(confirmed=False)

    def _others_tell(self, error: RobustCheckpointError) -> bool:
        """Whether this rank's error should be short, because stock prints the errors of all ranks.

        That is so inside stock ``save`` with collectives, where the coordinator's error says everything."""
        return not self.plan.leads and not self.commits_together and not isinstance(error, ExchangeError)

    @contextmanager
    def _cleaned_up_after_failure(self) -> Iterator[None]:
        """Remove what this save has made if the block fails.

        If the ranks are out of step and some may be writing, nothing is removed. The coordinator may have heard from
        all ranks and be committing. If it is not, the next save into the directory removes what is left."""
        try:
            yield
        except BaseException as error:
            if self.writer is not None:
                directory = self.writer.directory
                if failed_in_step(error):
                    clean_up(self.channel, self.plan.phase("clean up"), directory, error)
                elif self.plan.may_be_writing:
                    directory.release()
                else:
                    directory.roll_back(error)
            if isinstance(error, RobustCheckpointError) and self._others_tell(error):
                raise error.in_brief() from error
            raise

    def watched(self, resolve: Callable[[WriteItem], Data]) -> Callable[[WriteItem], Data]:
        """Wrap a planner's ``resolve_data``, so that all that is pickled on its way to the writer is checked for a
        load."""
        return lambda write_item: self.unloadable.take(write_item.index.fqn, resolve(write_item))

    def check_stop(self, done_nbytes: int, total_nbytes: int) -> None:
        """Between blocks of data, report how far this rank is. Raise if another rank announced that the save failed."""
        self.channel.note_progress(done_nbytes, total_nbytes)
        self.channel.stop_if_announced()

    def _publish(self, writer: RobustWriter) -> None:
        """On the coordinator, after :meth:`write`: let the writer commit."""
        writer.publish(self._make_metadata(writer), are_checked=self.commits_together)

    def _make_metadata(self, writer: RobustWriter) -> MetadataToPublish:
        """On the coordinator, after :meth:`write`: this checkpoint's ``.metadata`` and index."""
        plan = self.plan.plan
        if plan is None or plan.metadata is None or self._written_agreement is None:
            raise ValueError(
                "only the coordinator has the metadata, of a plan for RobustWriter, after all have written"
            )
        self._written_by_all = written_by_all(
            self.messages,
            self.plan.places_of_all,
            self._written_agreement.signature,
            self.channel.combined_signature,
        )
        return plan.metadata.encode(self._written_by_all, writer.plain_meta(), self._kept_plan(plan))

    def _kept_plan(self, plan: Plan) -> Mapping[str, Section]:
        """The part of the index that lets a resumed job reuse this plan."""
        # If several ranks claim the main replica, a resumed job must plan anew and warn again.
        if plan.is_contested:
            return {}
        try:
            return plan.sections
        except Exception as error:  # the checkpoint is complete without it
            logger.warning(
                "%s: its plan could not be stored, so a job that resumes from it makes a new plan: %s",
                self.checkpoint,
                error,
            )
            return {}

    def commit(self) -> None:
        """Make the checkpoint visible, and keep the plan for the next save.

        Each rank that commits checks that its files are still as it wrote them. Then the coordinator publishes. Once
        all ranks know that the checkpoint is committed, the coordinator removes what it replaces; no rank waits for
        that.
        """
        writer = self.writer
        if writer is None:
            raise ValueError("this save was planned for another storage writer")
        try:
            with self.times.phase("commit"):
                self._commit(writer)
        except BaseException as error:
            self.plan.forget()
            self._clean_up_commit(writer.directory, error)
            raise
        self._keep_plan(confirmed=self.commits_together)
        if self.channel.is_coordinator:
            writer.leave_report(self._report)
        if self.channel.is_coordinator or self.leads_directory:
            writer.clean_up()

    def _commit(self, writer: RobustWriter) -> None:
        if self._are_on_nodes:
            agreement = commit_on_nodes(
                self.channel,
                self.plan.phase,
                writer.directory,
                leads_directory=self.leads_directory,
                check_own=writer.check_own,
                make_metadata=lambda: self._make_metadata(writer),
                offer=lambda: digest_offer(self.written),
            )
            self.digest = digest_of(agreement)
        elif self.commits_together:
            self.channel.barrier(
                self.plan.phase("commit"),
                writer.check_own,
                then=lambda: self._publish(writer),
                offer=lambda: digest_offer(self.written),
            )
            self.digest = digest_of(self.channel.last_agreement)
        elif self.channel.is_coordinator:  # the writer checks the files of all ranks
            self._publish(writer)

    def _clean_up_commit(self, directory: Save, error: BaseException) -> None:
        """Clean up as after other failures, but only if the coordinator knows that nothing was committed."""
        if not self.commits_together:  # only the coordinator is here, and it knows the files of all ranks
            directory.roll_back(error)
        elif failed_in_step(error) and nothing_is_committed(
            self.channel, self.plan.phase("clean up"), directory, error
        ):
            clean_up(self.channel, self.plan.phase("clean up"), directory, error)
        else:
            directory.release()

    def _report(self, save_id: str, fallbacks: tuple[str, ...]) -> SavedReport:
        """The report of this save, which is committed, on the coordinator.

        Args:
            save_id: the id in ``.metadata``.
            fallbacks: what the commit went without.
        """
        plan, changes = self.plan, self.plan.changes
        metadata = None if plan.plan is None else plan.plan.metadata
        told = None if changes is None else Changes.of(changes.added, changes.removed, changes.changed)
        return make_report(
            [
                (rank, SaidOfRank(message.row, message.node, message.how))
                for rank, message in enumerate(self.messages)
                if message is not None and message.row
            ],
            self.times,
            checkpoint=self.checkpoint,
            save_id=save_id,
            world_size=self.channel.size,
            coordinator_rank=self.rank,
            plan=PlanOfReport(plan.outcome, shortened(plan.reason, _REASON_LENGTH), told),
            waits=self.channel.stragglers,
            fallbacks=fallbacks,
            modules=None if metadata is None else metadata.module_sizes,
        )

    def _keep_plan(self, *, confirmed: bool) -> None:
        if self.written is not None:
            places_of_all = tuple(files.variable_places for files in self._written_by_all)
            self.plan.keep(self.written.variable_places, places_of_all, confirmed=confirmed)
