"""The phases of one save on one rank. ``save`` runs them at once, and ``async_save`` in two parts.

Owns the order of the phases of a save, and its report. Called by ``api`` and ``async_save``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from robust_dcp.background import SaveQueue, queue_of
from robust_dcp.comm import Channel
from robust_dcp.drain.drain import Drain, remove_staging, staging_directory
from robust_dcp.errors import RobustCheckpointError, StorageError
from robust_dcp.hooks.progress_bar import watch_in_terminal
from robust_dcp.plan.checkpoint_name import checkpoint_name
from robust_dcp.plan.phases import PhaseClock
from robust_dcp.plan.plan import LocalStructure
from robust_dcp.plan.save_planner import RobustPlanner
from robust_dcp.plan.session import SaveSession
from robust_dcp.report import SaveReport
from robust_dcp.stateful import refuse_other_than_dict, state_dicts_of
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.remote import filesystem_of, local_path_of, place_of
from robust_dcp.storage.writer import RobustWriter
from robust_dcp.storage.writing.item_source import ItemSource

__all__ = ["CheckpointId", "StartedSave"]

CheckpointId = str | os.PathLike[str]

_SAME_VERDICT_SECONDS: Final = 5.0
"""All ranks hear within that time that a drain has failed."""


@dataclass(eq=False)
class StartedSave:
    """One save on one rank. ``save`` runs its phases at once, and ``async_save`` in two parts.

    Attributes:
        staged_for: the URL that the checkpoint is copied to before this save ends.
        drain_remarks: for the report.
    """

    session: SaveSession
    writer: RobustWriter
    planner: RobustPlanner
    queue: SaveQueue
    process_group: dist.ProcessGroup | None
    no_dist: bool
    on_commit: Callable[[], object] | None
    staged_for: str | None = None
    drain_remarks: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        *,
        checkpoint_id: CheckpointId | None,
        storage_writer: StorageWriter | None,
        planner: SavePlanner | None,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
        timeout_seconds: float | None,
        deadline_seconds: float | None,
        kind: str | None,
        on_commit: Callable[[], object] | None,
    ) -> StartedSave:
        """A save that has not exchanged anything yet. The arguments are those of ``save``."""
        watch_in_terminal()
        staged_for = _url_of(checkpoint_id)
        writer = _robust_writer(storage_writer, staging_directory(staged_for) if staged_for else checkpoint_id)
        own_planner = _robust_planner(planner)
        writer.known_as = staged_for or writer.known_as
        session = own_planner.open_session(
            checkpoint_name(writer.path),
            writer,
            process_group=process_group,
            timeout_seconds=timeout_seconds,
            deadline_seconds=deadline_seconds,
            no_dist=no_dist,
            kind=kind,
        )
        session.commits_together = session.clock.tells = True
        group = own_planner.process_group if process_group is None else process_group
        queue = queue_of(session.channel.ranks)
        return cls(session, writer, own_planner, queue, group, own_planner.no_dist or no_dist, on_commit, staged_for)

    @property
    def clock(self) -> PhaseClock:
        return self.session.clock

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Wait until the earlier async saves of this group are over, and then run the block."""
        with self.clock.telling_failures():
            self.clock.tell("started")
            self.queue.wait()
            with self.session.channel.together():
                yield

    def agree(self, state_dict: dict[str, Any]) -> None:
        """Agree with all ranks on the plan.

        If an earlier async save has failed, and some rank has not seen its error yet, all ranks raise that error.
        """

        def describe() -> LocalStructure:
            self.queue.raise_unreported()
            self.drain_queue.raise_unreported()
            refuse_other_than_dict(state_dict)
            if self.staged_for is not None:
                filesystem_of(self.staged_for)
            is_coordinator = self.session.channel.is_coordinator
            self.planner.set_up_planner(state_dicts_of(state_dict), self.writer.storage_meta(), is_coordinator)
            return self.planner.describe(self.session.channel)

        try:
            is_coordinator = self.session.channel.is_coordinator
            self.session.agree(describe, leads=is_coordinator, tells_of_commit=self.on_commit is not None)
        except BaseException:
            # Another rank may tell of a drain whose end this rank is about to hear. It must not tell of it once more.
            self.drain_queue.wait(timeout_seconds=_SAME_VERDICT_SECONDS)
            raise
        finally:
            self.queue.forget_unreported()
            self.drain_queue.forget_unreported()

    def source(self) -> ItemSource:
        """The data that this rank writes."""
        return self.planner.source(self.session)

    @property
    def drain_queue(self) -> SaveQueue:
        """The queue of the copies to durable storage."""
        return queue_of(self.session.channel.ranks, "drain")

    def commit(self) -> None:
        """Commit, tell of the commit, and copy the checkpoint to where it is to be."""
        self.session.commit()
        drain = None
        target = self.staged_for or self.writer.drain_to
        if target is not None:
            drain = self._drain_to(target)
            drain.announce()
        try:
            if self.on_commit is not None and self.staged_for is None:
                self._tell_of_commit(self.on_commit)
        finally:
            # After on_commit, which may leave a note in the checkpoint: a copy made earlier had none, or the note of an
            # earlier save. If it raises, the checkpoint is committed all the same.
            if drain is not None and self.staged_for is None:
                self.drain_queue.submit(drain.run)
        if drain is None or self.staged_for is None:
            return
        with self.clock.phase("drain"):
            copied = drain.run()
            self.drain_remarks = (f"copied {copied.nbytes} bytes to {copied.target} in {copied.seconds:.1f} s",)
            # In an exchange: a rank that is late must not remove what the next save of another makes there.
            phase = f"save {self.session.checkpoint}: remove the staged copy"
            self.session.channel.barrier(phase, lambda: remove_staging(self.writer.path))
            if self.on_commit is not None:
                self._tell_of_commit(self.on_commit)

    def _drain_to(self, target: str) -> Drain:
        writer, written, session = self.writer, self.session.written, self.session
        # A rank that waits for a store, and then to try again, is not silent: these waits have limits of their own.
        least_timeout_seconds = 2 * writer.drain_options.call_timeout_seconds
        return Drain(
            path=writer.path,
            target=target,
            names=() if written is None else written.names,
            options=writer.drain_options,
            open_channel=lambda: Channel.for_group(
                self.process_group,
                operation=f"drain {checkpoint_name(writer.path)}",
                timeout_seconds=max(session.channel.timeout_seconds, least_timeout_seconds),
                no_dist=self.no_dist,
            ),
            is_coordinator=session.channel.is_coordinator,
            disk=writer.disk,
        )

    def _tell_of_commit(self, on_commit: Callable[[], object]) -> None:
        channel = self.session.channel

        def tell() -> None:
            if not channel.is_coordinator:
                return
            try:
                on_commit()
            except RobustCheckpointError as error:
                error.message = f"{self.session.checkpoint} is committed, but {error.message}"
                raise

        channel.barrier(f"{self.session.checkpoint} is committed: on_commit", tell)

    def report(self, *, blocked_seconds: float, how: tuple[str, ...] = ()) -> SaveReport:
        """The report of the save, which is over.

        Args:
            how: remarks on how the data got to the files, in addition to those of the writer.
        """
        session, written, path = self.session, self.session.written, self.staged_for or self.writer.path
        report = SaveReport(
            checkpoint_id=self.staged_for or checkpoint_name(path),
            rank=session.rank,
            world_size=session.channel.size,
            items=len(session.share.kept),
            nbytes=0 if written is None else written.nbytes,
            phases=tuple(self.clock.records),
            blocked_seconds=blocked_seconds,
            plan=session.outcome,
            reason=session.reason,
            changes=session.changes,
            differing_replicas=session.differing_replicas,
            unloadable_objects=session.unloadable_objects,
            total_nbytes=None if session.plan is None else session.plan.nbytes,
            files=() if written is None else written.names,
            how=(*(() if written is None else written.how), *how, *self.drain_remarks),
            peak_buffer_nbytes=0 if written is None else written.peak_buffer_nbytes,
            stragglers=session.channel.stragglers,
            leads_directory=session.leads_directory,
            _read_metadata=lambda: RobustReader(path).read_metadata(),
        )
        self.clock.tell("ended", report=report, seconds=self.clock.seconds)
        return report


def _url_of(checkpoint_id: CheckpointId | None) -> str | None:
    """The URL that a checkpoint is saved to by way of a local directory; ``None`` if it is a path."""
    place = None if checkpoint_id is None else place_of(checkpoint_id)
    if place is None or local_path_of(place) is not None:
        return None
    # A URL of an unknown kind is refused now, not after the save. A package may be missing on one node only, so
    # `agree` raises that on all ranks.
    with suppress(StorageError):
        filesystem_of(place)
    return place


def _robust_writer(writer: StorageWriter | None, checkpoint_id: CheckpointId | None) -> RobustWriter:
    if writer is None:
        if checkpoint_id is None:
            raise ValueError("pass checkpoint_id, the directory to save to, or storage_writer=RobustWriter(path)")
        return RobustWriter(_path_of(checkpoint_id))
    if not isinstance(writer, RobustWriter):
        raise TypeError(
            f"robust_dcp.save writes with RobustWriter, not with {type(writer).__name__}; to keep that writer call "
            "torch.distributed.checkpoint.save(…, planner=RobustPlanner())"
        )
    writer.reset(None if checkpoint_id is None else _path_of(checkpoint_id))
    return writer


def _path_of(checkpoint_id: CheckpointId) -> CheckpointId:
    """The path, also of ``file:///path``."""
    return local_path_of(place_of(checkpoint_id)) or checkpoint_id


def _robust_planner(planner: SavePlanner | None) -> RobustPlanner:
    if planner is None:
        return RobustPlanner()
    if isinstance(planner, RobustPlanner):
        return planner
    if type(planner) is DefaultSavePlanner:
        return RobustPlanner(
            flatten_state_dict=planner.flatten_state_dict,
            flatten_sharded_tensors=planner.flatten_sharded_tensors,
            dedup_save_to_lowest_rank=planner.dedup_save_to_lowest_rank,
        )
    raise TypeError(
        f"robust_dcp.save plans with RobustPlanner, not with {type(planner).__name__}; derive your planner from "
        "RobustPlanner, or call torch.distributed.checkpoint.save(…, storage_writer=RobustWriter(path))"
    )
