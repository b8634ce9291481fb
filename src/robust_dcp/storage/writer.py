"""``RobustWriter``: DCP's ``StorageWriter`` on top of ``writing.engine`` and ``committing.save``.

This module owns DCP's hooks and the options of a save. Places come from the plan. With a planner that is not ours, the
writer chooses places itself.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from robust_dcp.comm import node_of
from robust_dcp.errors import entry_point
from robust_dcp.report_file import SavedReport
from robust_dcp.storage.committing.cleaning import stripe_directories
from robust_dcp.storage.committing.save import MetadataToPublish, Save, not_one_directory
from robust_dcp.storage.committing.saving_file import identity
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import directory_path, is_url, mark_of
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.layouts import layout_named
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.remote.copy_options import CopyOptions
from robust_dcp.storage.remote.filesystem import place_of
from robust_dcp.storage.writing.engine import WriteFiles, WrittenFiles, write_files
from robust_dcp.storage.writing.item_source import ItemSource
from robust_dcp.storage.writing.planned_save import PlannedSave
from robust_dcp.storage.writing.room import RoomOfRank, room_of_rank
from robust_dcp.storage.writing.unplanned_save import Share, UnplannedSave, shared
from robust_dcp.storage.writing.write_options import WriteKeywords, WriteOptions, with_keywords

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["RobustWriter", "WriterMeta"]


@dataclass
class WriterMeta(StorageMeta):
    """Tells ``RobustPlanner`` which writer it plans for: DCP hands ``storage_meta()`` to ``set_up_planner``."""

    writer: RobustWriter | None = None


class RobustWriter(StorageWriter):
    """Writes checkpoints into a directory, in parallel and with checksums. A checkpoint is durable, and becomes visible
    in one step.

    Files of a committed checkpoint in the directory are neither overwritten nor removed before the new one is
    committed. Whenever a save is killed, the directory loads as the old checkpoint or as the new one.

    Args:
        path: the checkpoint's directory. It is created if it does not exist.
        options: how to write, see :class:`WriteOptions`. Each option can also be given as a keyword. It is an error to
            give two different values, also if one of them is the default.
        drain_to: a URL of fsspec, or a directory on durable storage. Each save is copied there in the background, after
            its commit. ``robust_dcp.save`` and ``async_save`` do that; stock's ``save`` cannot.
        drain_options: how to copy it there, see :class:`CopyOptions`.
        disk: the file system.
        keywords: the options, one by one.

    Attributes:
        drain_to, drain_options, disk: the same.
        known_as: the place that the checkpoint and its report name as their own, if they are moved or copied there from
            ``path``.
        write_files: writes this rank's files. A save may replace it with a function that has another process write
            them.

    Raises:
        ValueError: an option is out of range, or a path is a URL (``scheme://…``).
        StorageError: a call to the file system failed. Not raised before :meth:`begin`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        options: WriteOptions | None = None,
        drain_to: str | os.PathLike[str] | None = None,
        drain_options: CopyOptions | None = None,
        disk: Disk | None = None,
        **keywords: Unpack[WriteKeywords],
    ) -> None:
        super().__init__()
        self.options = with_keywords(options or WriteOptions(), keywords)
        self.known_as: str | None = None
        self.layout = layout_named(self.options.layout)
        self.path = directory_path(path)
        self.drain_to = None if drain_to is None else place_of(drain_to)
        self.drain_options = drain_options or CopyOptions()
        self.disk: Disk = disk or PosixDisk()
        self.write_files: WriteFiles = write_files
        self.save_id = str(uuid.uuid4())
        self._directory: Save | None = None
        self._is_coordinator = False
        self._begun = False
        self._announces = False
        self._uncommitted_names: tuple[str, ...] = ()
        self._unplanned = UnplannedSave()

    @property
    def files_per_rank(self) -> int:
        """How many files hold a rank's tensors. This is part of the plan."""
        return self.options.n_files

    @property
    def plan_options(self) -> dict[str, str | int]:
        """The options that a plan depends on. They are part of its signature."""
        return {"layout": self.layout.name, "files_per_rank": self.files_per_rank}

    # The methods of one save, in the order in which `api.save` calls them.

    def begin(self, *, is_coordinator: bool, announces: bool = True) -> None:
        """Make the directory, see what is in it, and announce the save there. Called before any rank writes.

        Args:
            announces: ``False`` if :meth:`announce` will be called.

        Raises:
            StorageError: there is a checkpoint and ``overwrite`` is false; the directory holds files that may not lie
                beside those of the layout; or it cannot be made.
        """
        self._begun = True
        self._directory = None
        if not is_coordinator:
            return
        try:
            self.directory.begin(overwrite=self.options.overwrite, announces=announces)
        except BaseException:
            self.directory.give_up()
            raise

    @property
    def mark(self) -> int:
        """A number that tells the files of this save from those of other saves."""
        return int(mark_of(self.save_id), 16)

    def adopt(self, mark: int) -> None:
        """Use the coordinator's ``mark`` for this save. Called on every rank before :meth:`write`."""
        if mark != self.mark:
            self.save_id = f"{mark:016x}"
            self._directory = None

    def announce(self) -> None:
        """Called on the coordinator before any rank writes: announce the save, so that its files can be told from
        others.

        Raises:
            StorageError: as :meth:`begin`.
        """
        if not self.directory.is_announced:
            self.directory.announce()

    def join(self) -> bool:
        """Called on each rank before it writes: find the announcement of the save in the directory that this rank sees.

        Returns:
            whether this rank sees another directory than the coordinator, and has announced the save there. It then
            leads the commit in that directory.

        Raises:
            StorageError: as :meth:`begin`.
        """
        if self.directory.is_announced:
            return False
        return self.directory.join(overwrite=self.options.overwrite)

    @property
    def directory(self) -> Save:
        """What this save has found and made in its directory."""
        if self._directory is None:
            self._directory = Save(self.disk, self.path, save_id=self.save_id, layout=self.layout)
        return self._directory

    def has_ample_room(self, nbytes: int) -> bool:
        """Whether each disk of this save has room for twice ``nbytes`` and a GiB more."""
        places = (self.path, *stripe_directories(self.disk, self.path, self.options.stripes))
        return all(self.disk.room(place)[1] > 2 * nbytes + (1 << 30) for place in places)

    def room(self, rank: int, placements: Placements, known_places: npt.NDArray[np.int64] | None) -> RoomOfRank:
        """How much room this rank needs on which file systems, and how much is free. Called before any rank writes."""
        return room_of_rank(
            self.disk,
            self.path,
            rank,
            placements,
            known_places,
            stripes=stripe_directories(self.disk, self.path, self.options.stripes),
            shared_as=identity(self.disk, self.path, self.save_id),
            node=str(node_of(rank)),
        )

    def write(
        self,
        rank: int,
        source: ItemSource,
        placements: Placements,
        check_stop: Callable[[int, int], None],
        known_places: npt.NDArray[np.int64] | None = None,
    ) -> WrittenFiles:
        """Write this rank's items to their places, durably. Readers do not see them yet.

        All ranks must have adopted the same mark, because they write it into their files.
        """
        for place in stripe_directories(self.disk, self.path, self.options.stripes):
            self.directory.make(place)
        written = self.write_files(
            self.disk,
            self.path,
            rank,
            source,
            placements,
            mark=mark_of(self.save_id),
            options=self.options,
            check_stop=check_stop,
            known_places=known_places,
            layout=self.layout,
            not_removed=self.directory.not_removed,
        )
        self.directory.own.update(written.uncommitted_names, written.names)
        self._uncommitted_names = written.uncommitted_names
        return written

    def check_own(self) -> None:
        """Make sure, right before the commit, that nobody has touched the files that this rank has written.

        Raises:
            StorageError: somebody has touched one.
        """
        self.directory.check_own(self._uncommitted_names)

    def publish(self, metadata: MetadataToPublish, *, are_checked: bool) -> None:
        """Commit, on the coordinator.

        Args:
            are_checked: whether all ranks have called :meth:`check_own`.

        Raises:
            StorageError: as ``Save.publish``.
        """
        self.directory.publish(metadata, are_checked=are_checked)

    @property
    def leaves_report(self) -> bool:
        """Whether a committed save leaves a report beside the checkpoint."""
        return self.options.report

    def leave_report(self, make: Callable[[str, tuple[str, ...]], SavedReport]) -> None:
        """Called on the coordinator after the commit: leave a report beside the checkpoint, unless the options say
        otherwise. If that fails, it is logged.

        Args:
            make: makes the report, from the id of the save and what its commit went without.
        """
        if self.leaves_report:
            place = self.known_as
            self.directory.leave_report(
                make if place is None else lambda *known: msgspec.structs.replace(make(*known), checkpoint=place)
            )

    def clean_up(self) -> None:
        """Remove the files that the committed checkpoint replaces. A file that cannot be removed stays, and is
        logged.
        """
        self.directory.tidy_up()

    # The hooks of `torch.distributed.checkpoint.save`, in the order in which it calls them.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = directory_path(checkpoint_id)
        self.save_id = str(uuid.uuid4())
        if self._directory is not None:
            self._directory.release()
            self._directory = None
        self._begun = self._announces = False
        self.write_files = write_files

    def storage_meta(self) -> WriterMeta:
        return WriterMeta(checkpoint_id=self.known_as or self.path, save_id=self.save_id, writer=self)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self.drain_to is not None:
            raise ValueError(
                "RobustWriter(drain_to=…) needs robust_dcp.save or robust_dcp.async_save: stock's save knows nothing "
                "of it. Call one of these, or copy the checkpoint afterwards with robust_dcp.copy_checkpoint"
            )
        self._begun = self._announces = False
        self._unplanned = UnplannedSave()
        self._is_coordinator = is_coordinator
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "RobustWriter saves with collectives only: with use_collectives=False each rank would commit by "
                "itself. Leave use_collectives at True, or save with torch's FileSystemWriter"
            )

    @entry_point
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not self._begun:  # our planner calls begin itself, and announces the save as well
            self.begin(is_coordinator=self._is_coordinator, announces=False)
            self._announces = self._is_coordinator
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._announces:
            self.announce()
        return shared(plans, self.mark)

    @entry_point
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share.

        With ``RobustPlanner`` the results have reached the coordinator when this returns, and DCP gathers an empty
        list. With another planner this returns the results.
        """
        results: list[WriteResult] = []
        save = plan.planner_data
        if isinstance(save, PlannedSave):
            save.write_items(plan.items, planner)
        else:
            results = self._write_unplanned(plan, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_unplanned(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write the plan of a planner that is not ours. Items get places as they come, on this rank alone."""
        if self.layout.plans_places:
            raise ValueError(
                f"RobustWriter with layout={self.layout.name!r} needs the places that RobustPlanner plans, and was "
                f"called with {type(planner).__name__}; pass planner=RobustPlanner()"
            )
        share = plan.storage_data if isinstance(plan.storage_data, Share) else Share(0, self.mark)
        rank = share.rank
        self.adopt(share.mark)
        if isinstance(plan.storage_data, Share) and not self._is_coordinator:
            self._refuse_another_directory(rank)
        return self._unplanned.write(
            *(plan.items, planner, rank), write=self.write, n_files=self.files_per_rank, tells=self.leaves_report
        )

    def _refuse_another_directory(self, rank: int) -> None:
        """Make sure, on a rank that does not commit, that it writes into the coordinator's directory."""
        if self.join():
            error = not_one_directory(self.path, f"rank {rank}", "A save by torch.distributed.checkpoint")
            self.directory.roll_back(error)
            raise error

    @entry_point
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save = getattr(metadata, "save", None)
        if isinstance(save, PlannedSave):
            save.commit()
            return
        metadata.storage_meta = self.plain_meta()
        self._unplanned.commit(metadata, results, self.directory)
        self.leave_report(lambda save_id, fallbacks: self._unplanned.report_of(results, self.path, save_id, fallbacks))
        self.clean_up()

    def plain_meta(self) -> StorageMeta:
        """The ``StorageMeta`` for ``.metadata``: an object of DCP's class, without anything of this process."""
        return StorageMeta(checkpoint_id=self.known_as or self.path, save_id=self.save_id)

    @property
    def checkpoint_id(self) -> str:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` is a path on a mounted file system, and not a URL."""
        return not is_url(checkpoint_id)
