"""One save on one rank, from agreement to commit: the order of exchanges, and what is kept for the next save.

Owns the plan and the phases of a save, whoever calls them: ``api.save`` one by one, or stock DCP through the hooks of
``RobustPlanner`` and ``RobustWriter``. It is handed a writer, and tells it what to do when. Knows nothing of tensors,
of files or of their names.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from robust_dcp.comm import Agreement, Channel
from robust_dcp.errors import ExchangeError, RobustCheckpointError
from robust_dcp.plan.agreed_plan import AgreedPlan
from robust_dcp.plan.cache import CoordinatorPlan
from robust_dcp.plan.clean_up import clean_up, failed_in_step, nothing_is_committed
from robust_dcp.plan.local import LocalStructure
from robust_dcp.plan.rank_plan import RankPlan
from robust_dcp.plan.replica_checks import Differing, DigestItems, VerifyReplicas, compare_replicas, digest_columns
from robust_dcp.plan.stored_plan import plan_sections
from robust_dcp.plan.unloadable import UnloadableObjects, report_unloadable
from robust_dcp.plan.written import (
    WrittenMessage,
    are_named_plainly,
    digest_of,
    digest_offer,
    written_by_all,
    written_message,
    written_offer,
)
from robust_dcp.storage.index import Section
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.writing.commit import MetadataToPublish
from robust_dcp.storage.writing.engine import WrittenFiles
from robust_dcp.storage.writing.item_source import ItemSource, WriteItemSource
from robust_dcp.storage.writing.save_directory import SaveDirectory

__all__ = ["SaveSession", "SessionWriter"]

Data = torch.Tensor | io.BytesIO

logger = logging.getLogger(__name__)


class SessionWriter(Protocol):
    """What a save needs of its writer, in the order in which it calls it: all that ``RobustWriter`` is to the session.

    Attributes:
        mark: 64 bits that tell this save from others. All ranks take that of the rank that leads.
        directory: takes back what a save that failed has made.
    """

    @property
    def mark(self) -> int: ...

    @property
    def directory(self) -> SaveDirectory: ...

    def begin(self, *, is_coordinator: bool, ranks: int | None) -> None: ...

    def adopt(self, mark: int) -> None: ...

    def announce(self, *, ranks: int) -> None: ...

    def write(
        self,
        rank: int,
        source: ItemSource,
        placements: Placements,
        check_stop: Callable[[int, int], None],
        known_places: npt.NDArray[np.int64] | None,
    ) -> WrittenFiles: ...

    def check_own(self) -> None: ...

    def plain_meta(self) -> StorageMeta: ...

    def publish(self, metadata: MetadataToPublish, *, are_checked: bool) -> None: ...

    def clean_up(self) -> None: ...


@dataclass(eq=False)
class SaveSession:
    """The state of one save on one rank. Calls come in this order: ``agree``, ``write``, ``commit``.

    Args:
        plan: of this save, and the channel to the other ranks of the group.
        writer: writes and commits; ``None`` where stock calls another writer than ours, and the session only plans.
        unloadable: what this rank finds that a load would refuse, and what is to be done about it.
        commits_together: whether all ranks call ``commit``. Inside stock ``save`` with collectives only the
            coordinator's does, and stock tells the others.
        verify_replicas: which replicas are compared with those of other ranks.
        digest_items: gives the digests of this rank's items; ``None`` if nothing can be compared.
    """

    plan: AgreedPlan
    writer: SessionWriter | None = None
    unloadable: UnloadableObjects = field(default_factory=UnloadableObjects)
    commits_together: bool = False
    verify_replicas: VerifyReplicas = "off"
    digest_items: DigestItems | None = None

    differing_replicas: tuple[Differing, ...] = field(default=(), init=False)
    written: WrittenFiles | None = field(default=None, init=False)
    unloadable_objects: dict[str, str] = field(default_factory=dict, init=False)
    digest: str | None = field(default=None, init=False)
    _digests: bytes | None = field(default=None, init=False)
    _messages: Sequence[WrittenMessage | None] = field(default=(), init=False)
    _are_plain: Sequence[bool] = field(default=(), init=False)
    _written_agreement: Agreement | None = field(default=None, init=False)
    _written_by_all: tuple[WrittenFiles, ...] = field(default=(), init=False)

    @property
    def channel(self) -> Channel:
        """To the other ranks of the group, led by the one that plans and commits."""
        return self.plan.channel

    @property
    def checkpoint(self) -> str:
        """What is saved where; part of every phase's name, so ranks that save to different places are told."""
        return self.plan.checkpoint

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self.channel.rank

    def agree(self, describe: Callable[[], LocalStructure], *, leads: bool) -> RankPlan:
        """Let the writer begin, agree with all ranks on the plan of this save, and return this rank's share.

        Args:
            describe: gives this rank's structure; an exception in it is raised on every rank.
            leads: whether the caller takes this rank for the coordinator. If just one rank leads, it plans and commits.

        Raises:
            PlanConflict: the ranks contradict each other.
            StructureChanged: with ``on_structure_change="error"``.
            ExchangeError: a rank is missing, late, or in another operation.
        """

        def begin() -> LocalStructure:
            if self.writer is not None:
                # Where stock tells every rank that it is the coordinator (no_dist=True), rank 0 is.
                self.writer.begin(is_coordinator=leads, ranks=self.channel.size if self.rank == 0 else None)
            return describe()

        with self._cleaned_up_after_failure():
            mark = self.plan.agree(begin, leads=leads, mark=0 if self.writer is None else self.writer.mark)
        if self.writer is not None:
            self.writer.adopt(mark)
            if self.channel.is_coordinator:
                self.writer.announce(ranks=self.channel.size)
        return self.plan.rank_plan

    def write(self, source: Callable[[], ItemSource]) -> None:
        """Let the writer write this rank's files; learn whether all ranks have, and what a load would refuse.

        Args:
            source: gives the data of this rank's share, in plan order. A failure in it, or while it is written, is told
                to the other ranks while they still write (:meth:`check_stop`), and raised on all of them.
        """

        def write_own() -> WrittenMessage | None:
            placements = self.plan.rank_plan.placements
            if self.writer is None or placements is None:
                raise ValueError("this save was planned for another storage writer")
            known_places = self.plan.known_places
            self.written = self.writer.write(self.rank, source(), placements, self.check_stop, known_places)
            self.unloadable.raise_if_forbidden(self.checkpoint)
            return written_message(
                self.written.variable_places, known_places, self.take_digests(), self.unloadable.found
            )

        with self._cleaned_up_after_failure():
            messages = self.channel.gather(
                self.plan.phase("write"), write_own, WrittenMessage, offer=lambda _: written_offer(self.written)
            )
        self._messages = messages or []
        if self.channel.is_coordinator:
            told = [(rank, message.unloadable) for rank, message in enumerate(self._messages) if message is not None]
            self.unloadable_objects = report_unloadable(self.checkpoint, told)
        self._written_agreement = self.channel.last_agreement
        self._are_plain = are_named_plainly(self.channel, self.plan.phase("file names"), self.written)

    def write_items(self, items: Sequence[WriteItem], resolve: Callable[[WriteItem], Data]) -> None:
        """:meth:`write`, where stock ``save`` calls the writer's ``write_data``, with the planner's ``resolve_data``.

        Only with ``no_dist=True`` will stock let each rank commit. Else it does so on the coordinator alone: this
        rank's plan is kept now, but counts only together with the coordinator's, which is kept after the commit.
        """
        self.write(lambda: WriteItemSource(items, self.watched(resolve)))
        if not self.channel.is_coordinator and not self.commits_together:
            self._keep_plan(confirmed=False)

    def take_digests(self) -> bytes:
        """What this rank holds of the chunks that this save compares; no bytes if it compares none of them. Looked at
        in the first call: a save whose data may change while it is written calls this before."""
        if self._digests is None:
            self._digests = b""
            if self.digest_items is not None and self.channel.size > 1:
                checks = self.plan.rank_plan.checks
                self._digests = digest_columns(
                    *(self.plan.local.table, checks, self.verify_replicas, self.checkpoint, self.digest_items),
                    is_new=self.plan.outcome != "reused",
                )
        return self._digests

    def _others_tell(self, error: RobustCheckpointError) -> bool:
        """Whether stock prints this error once for each rank: within its ``save`` with collectives, the coordinator's
        has all that they know together."""
        return not self.plan.leads and not self.commits_together and not isinstance(error, ExchangeError)

    @contextmanager
    def _cleaned_up_after_failure(self) -> Iterator[None]:
        """Remove what this save has made. Not when the ranks fell out of step and some may write: the coordinator may
        have heard from all of them, and be committing; if it is not, the next save into the directory removes what
        they wrote."""
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

    def _publish(self, writer: SessionWriter) -> None:
        """On the coordinator, after :meth:`write`: make ``.metadata`` of this checkpoint, and let the writer commit."""
        plan = self.plan.coordinator
        if plan is None or plan.metadata is None or self._written_agreement is None:
            raise ValueError(
                "only the coordinator has the metadata, of a plan for RobustWriter, after all have written"
            )
        self._written_by_all = written_by_all(
            self._are_plain,
            self._messages,
            plan.variable_places,
            self._written_agreement.signature,
            self.channel.combined_signature,
        )
        metadata = plan.metadata.encode(self._written_by_all, writer.plain_meta(), self._kept_plan(plan))
        writer.publish(metadata, are_checked=self.commits_together)

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

    def commit(self) -> None:
        """Make the checkpoint visible, and keep the plan for the next save.

        Each rank that commits makes sure that what it has written is still as it was; then the coordinator publishes.
        Once all ranks know that the checkpoint is committed, it removes what that replaces: nobody waits for this.
        """
        writer = self.writer
        if writer is None:
            raise ValueError("this save was planned for another storage writer")
        try:
            if self.commits_together:
                self.channel.barrier(
                    self.plan.phase("commit"),
                    writer.check_own,
                    then=lambda: self._publish(writer),
                    offer=lambda: digest_offer(self.written),
                )
                self.digest = digest_of(self.channel.last_agreement)
            elif self.channel.is_coordinator:  # the writer looks at the files of all
                self._publish(writer)
        except BaseException as error:
            self.plan.forget()
            self._clean_up_commit(writer.directory, error)
            raise
        self._keep_plan(confirmed=self.commits_together)
        if self.channel.is_coordinator:
            writer.clean_up()
            if self.plan.coordinator is not None:
                sent = [b"" if message is None else message.replicas for message in self._messages]
                self.differing_replicas = compare_replicas(sent, self.plan.coordinator.tables, self.checkpoint)

    def _clean_up_commit(self, directory: SaveDirectory, error: BaseException) -> None:
        """As after other failures, if the coordinator knows that nothing was committed."""
        if not self.commits_together:  # the coordinator is alone here, and knows the files of all
            directory.roll_back(error)
        elif failed_in_step(error) and nothing_is_committed(
            self.channel, self.plan.phase("clean up"), directory, error
        ):
            clean_up(self.channel, self.plan.phase("clean up"), directory, error)
        else:
            directory.release()

    def _keep_plan(self, *, confirmed: bool) -> None:
        if self.written is not None:
            places_of_all = tuple(files.variable_places for files in self._written_by_all)
            self.plan.keep(self.written.variable_places, places_of_all, confirmed=confirmed)
