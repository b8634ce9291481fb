"""``RobustWriter``: DCP's ``StorageWriter`` on top of ``writing.engine`` and ``committing.save``.

This module owns DCP's hooks and the options of a save. Places come from the plan. With a planner that is not ours, the
writer chooses places itself.
"""

from __future__ import annotations

import errno
import math
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from robust_dcp.environment import node_of
from robust_dcp.errors import StorageError, entry_point, ranks_in_words
from robust_dcp.storage.committing.save import FileBeside, MetadataToPublish, OnEachNode, Save, not_one_directory
from robust_dcp.storage.committing.saving_file import identity
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import absolute, directory_path, is_url, mark_of, place_of, uncommitted_name
from robust_dcp.storage.layouts.places import PAGE_NBYTES, Placements, place_as_they_come
from robust_dcp.storage.metadata.metadata_file import (
    FORMAT_VERSION,
    StorageInfo,
    digest_beside,
    encode_metadata,
    note_files_beside,
    referenced_files,
)
from robust_dcp.storage.options import WriteKeywords, WriteOptions, given_options, layout_named
from robust_dcp.storage.remote import DEFAULT_COPY_OPTIONS, CopyOptions
from robust_dcp.storage.writing.emit import FilesOfRank
from robust_dcp.storage.writing.engine import WriteFiles, WrittenFiles, write_files
from robust_dcp.storage.writing.item_source import ItemSource, WriteItemSource

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
        options: how to write, see :class:`WriteOptions`. They can be given as keywords instead.
        drain_to: a URL of fsspec, or a directory on durable storage. Each save is copied there in the background, after
            its commit. ``robust_dcp.save`` and ``async_save`` do that; stock's ``save`` cannot.
        drain_options: how to copy it there, see :class:`CopyOptions`.
        disk: the file system.
        keywords: the options, one by one.

    Attributes:
        drain_to, drain_options, disk: the same.
        replaces: called with the directory that was saved to, right before its copy. Gives the digests of checkpoints
            at the place of the copy whose place it takes.
        on_arrival: called on the coordinator with that place when the copy has arrived there.
        path: the absolute path of the directory, as it is when a save begins: the working directory may change while
            an async save runs.
        checkpoint_id: the place that the checkpoint and its report name as their own: the path as it was given, or
            where they are moved or copied to.
        beside: the files that the checkpoint has beside its data, by name. They are committed with the data. Set it on
            the rank that commits, and what is made from the hashes of all files on every rank.
        write_files: writes this rank's files. A save may replace it with a function that has another process write
            them.

    Raises:
        ValueError: an option is out of range, options are given in both ways, or a path is a URL (``scheme://…``).
        StorageError: a call to the file system failed. Not raised before the save begins.
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
        self.options = given_options(WriteOptions, options, keywords)
        self.layout = layout_named(self.options.layout)
        self._given = self.checkpoint_id = directory_path(path)
        self.path = absolute(self._given)
        self.drain_to = None if drain_to is None else place_of(drain_to)
        self.drain_options = drain_options or DEFAULT_COPY_OPTIONS
        self.disk: Disk = disk or Disk()
        self.replaces: Callable[[str], tuple[str, ...]] | None = None
        self.on_arrival: Callable[[str], None] | None = None
        self.beside: Mapping[str, FileBeside] = {}
        self.write_files: WriteFiles = write_files
        self.save_id = str(uuid.uuid4())
        self._directory: Save | None = None
        self._directory_of: Callable[[int], str] | None = None
        self._is_coordinator = False
        self._is_agreed = self._is_used = False
        self._written: Any = None

    # The methods of one save, in the order in which `api.save` calls them.

    @property
    def mark(self) -> int:
        """A number that tells the files of this save from those of other saves."""
        return int(mark_of(self.save_id), 16)

    @property
    def place(self) -> str:
        """Where the checkpoint is once it has arrived: the URL, or the directory."""
        return os.fsdecode(self.checkpoint_id) if is_url(self.checkpoint_id) else self.path

    def stage(self, url: str, directory_of: Callable[[int], str]) -> None:
        """Make the checkpoint of a URL in a directory of this save alone.

        Args:
            directory_of: that of the save with a mark.
        """
        self.checkpoint_id, self._directory_of = url, directory_of
        self.path = directory_of(self.mark)

    def adopt(self, mark: int) -> None:
        """Use the coordinator's ``mark`` for this save. Called on every rank before :meth:`write`."""
        self._is_agreed = True
        if mark != self.mark:
            self.save_id = f"{mark:016x}"
            self._directory = None
            if self._directory_of is not None:
                self.path = self._directory_of(mark)

    @property
    def directory(self) -> Save:
        """What this save has found and made in its directory."""
        if self._directory is None:
            is_staged = is_url(self.checkpoint_id)
            self._directory = Save(
                self.disk,
                self.path,
                self.layout,
                self.save_id,
                beside=self.beside,
                overwrite=self.options.overwrite,
                is_staged=is_staged,
            )
        return self._directory

    def has_ample_room(self, nbytes: int) -> bool:
        """Whether the disk has room for twice ``nbytes`` and a GiB more."""
        return self.disk.room(self.path)[1] > 2 * nbytes + (1 << 30)

    def room(
        self, rank: int, placements: Placements, earlier_places: npt.NDArray[np.int64] | None, *, is_alone: bool
    ) -> RoomOfRank:
        """How much room this rank needs on which file system, and how much is free. Called before any rank writes.

        Args:
            is_alone: whether there is no other rank, which may see another directory.
        """
        number, free_nbytes = self.disk.room(self.path)
        # The same text on all ranks that see this very directory. Others count for each node.
        file_system = "" if is_alone else identity(self.disk, self.path, self.save_id) or f"{node_of(rank)}: {number}"
        variable_nbytes = 0 if earlier_places is None else int(earlier_places[:, 1].sum())  # as in the save before
        pages = sum(-(-nbytes // PAGE_NBYTES) for nbytes in (*placements.file_nbytes, variable_nbytes))
        return RoomOfRank(file_system, pages * PAGE_NBYTES, free_nbytes)

    def write(
        self,
        rank: int,
        source: ItemSource,
        placements: Placements,
        check_stop: Callable[[int, int], None],
    ) -> WrittenFiles:
        """Write this rank's items to their places, durably. Readers do not see them yet.

        All ranks must have adopted the same mark, because they write it into their files.
        """
        mark = mark_of(self.save_id)
        files = FilesOfRank(
            disk=self.disk,
            directory=self.path,
            rank=rank,
            mark=mark,
            names=self.layout.file_names(rank, placements.head_nbytes, mark),
            placements=placements,
            options=self.options,
        )
        written = self.write_files(files, source, check_stop, self.directory.not_removed)
        self.directory.written = tuple(map(uncommitted_name, written.names))
        self.directory.files.update(self.directory.written, written.names)
        if self.directory.needs_hashes:
            self.directory.hash_written(check_stop)
        return written

    # The hooks of `torch.distributed.checkpoint.save`, in the order in which it calls them.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._given = self.checkpoint_id = directory_path(checkpoint_id)
        self.path = absolute(self._given)
        self.save_id = str(uuid.uuid4())
        if self._directory is not None:
            self._directory.release()
            self._directory = None
        self._directory_of = self._written = None
        self._is_agreed = self._is_used = False
        self.write_files = write_files

    def storage_meta(self) -> WriterMeta:
        if self._is_used:  # without a ``checkpoint_id`` stock's save does not reset it
            self.reset()
        return WriterMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id, writer=self)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self.drain_to is not None:
            raise ValueError(
                "RobustWriter(drain_to=…) needs robust_dcp.save or robust_dcp.async_save: stock's save knows nothing "
                "of it. Call one of these, or copy the checkpoint afterwards with robust_dcp.copy_checkpoint"
            )
        self._is_agreed, self._is_used = False, True
        self._is_coordinator = is_coordinator
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "RobustWriter saves with collectives only: with use_collectives=False each rank would commit by "
                "itself. Leave use_collectives at True, or save with torch's FileSystemWriter"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @entry_point
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not self._is_agreed:  # a save that our planner has planned is announced already
            try:
                self.directory.announce()
            except BaseException as error:
                self.directory.roll_back(error)
                raise
        # Another planner's save gets the rank and the mark in this way.
        return [replace(plan, storage_data=(rank, self.mark)) for rank, plan in enumerate(plans)]

    @entry_point
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share.

        With ``RobustPlanner`` the results have reached the coordinator when this returns, and DCP gathers an empty
        list. With another planner this returns the results.
        """
        results: list[WriteResult] = []
        # A save that `RobustPlanner` has planned calls the writer's methods itself, in the order that all ranks have
        # agreed on. If DCP calls a hook of the writer instead, the hook lets it go on.
        save: Any = plan.planner_data
        if hasattr(save, "write_items"):
            written = save.write_items(plan.items, planner)
            self._written = written if self._is_coordinator else None  # for finish
        else:
            results = self._write_unplanned(plan, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_unplanned(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write the plan of a planner that is not ours. Items get places as they come, on this rank alone. A rank that
        does not commit first makes sure that it writes into the coordinator's directory."""
        rank, mark = plan.storage_data or (0, self.mark)
        error: Exception | None = None
        if self.layout.plans_places:
            error = ValueError(
                f"RobustWriter with layout={self.layout.name!r} needs the places that RobustPlanner plans, and was "
                f"called with {type(planner).__name__}; pass planner=RobustPlanner()"
            )
        elif getattr(planner, "_enable_plan_caching", False):  # its next plan would hold the mark of this save
            error = ValueError(
                f"RobustWriter cannot write plans that {type(planner).__name__} keeps from save to save; pass "
                "planner=RobustPlanner(), which keeps its own, or enable_plan_caching=False"
            )
        else:
            self.adopt(mark)
            if plan.storage_data and not self._is_coordinator and self.directory.join():
                error = not_one_directory(self.path, f"rank {rank}", "A save by torch.distributed.checkpoint")
        if error is not None:
            self.directory.roll_back(error)
            raise error
        planned = [item.tensor_data for item in plan.items]
        nbytes_of_items = [
            0 if each is None else math.prod(each.chunk.sizes) * each.properties.dtype.itemsize for each in planned
        ]
        placements = place_as_they_come(nbytes_of_items, files=self.options.n_files)
        source = WriteItemSource(plan.items, planner.resolve_data)
        try:
            written = self.write(rank, source, placements, lambda done_nbytes, total_nbytes: None)
        except BaseException:
            self.directory.release()  # its file stays, by which the next save removes what other ranks have written
            raise
        places = zip(placements.file.tolist(), written.variable_places.tolist(), strict=True)
        return [
            WriteResult(item.index, nbytes, StorageInfo(written.names[file], offset, nbytes))
            for item, (file, (offset, nbytes)) in zip(plan.items, places, strict=True)
        ]

    @entry_point
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written, self._written = self._written, None
        if written is not None:
            written.commit()
            return
        metadata.storage_meta = self.plain_meta()
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.version = FORMAT_VERSION
        try:
            to_publish = MetadataToPublish(((0, encode_metadata(metadata)),), referenced_files(metadata))
            self.directory.prepare(to_publish, to_publish.files)
            self.directory.finish(to_publish)
        except BaseException as error:
            self.directory.roll_back(error)
            raise
        self.directory.tidy_up()

    def plain_meta(self, *, on_nodes: bool = False) -> StorageMeta:
        """The ``StorageMeta`` for ``.metadata``: an object of DCP's class, without anything of this process.

        Args:
            on_nodes: whether the checkpoint is committed on nodes that do not share its directory.
        """
        meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)
        files = {
            name: each.data if isinstance(each, OnEachNode) and on_nodes else each for name, each in self.beside.items()
        }
        note_files_beside(meta, {name: digest_beside(data) for name, data in files.items() if isinstance(data, bytes)})
        return meta

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` is a path on a mounted file system, and not a URL."""
        return not is_url(checkpoint_id)


# How much room a save needs, and whether there is so much: found out before the first byte. What the save replaces does
# not count: it stays until the new checkpoint is committed.


class RoomOfRank(msgspec.Struct, frozen=True):
    """What one rank needs. What all ranks have in common is sent once.

    Attributes:
        file_system: a text that tells its file system from others that ranks of the save see under the same path.
        nbytes, free_nbytes: needed and free, in bytes.
    """

    file_system: str = ""
    nbytes: int = 0
    free_nbytes: int = 0


def refuse_without_room(checkpoint: str, ranks: Sequence[RoomOfRank | None]) -> None:
    """Make sure that all ranks together have room.

    Args:
        ranks: what each rank has said.

    Raises:
        StorageError: they have not. It says what is needed and free on each file system that is too small.
    """
    ranks_of: dict[str, dict[int, RoomOfRank]] = defaultdict(dict)
    for rank, room in enumerate(ranks):
        if room is not None:
            ranks_of[room.file_system][rank] = room
    too_small = []
    for rooms in ranks_of.values():
        nbytes = sum(room.nbytes for room in rooms.values())
        free_nbytes = min(room.free_nbytes for room in rooms.values())
        if nbytes > free_nbytes:
            too_small.append(f"{nbytes} bytes are needed for {ranks_in_words(list(rooms))}, {free_nbytes} are free")
    if too_small:
        raise StorageError(
            f"{checkpoint} has no room, and nothing was written: {'; '.join(too_small)}. What a save replaces is freed "
            "only after its commit. Free space, or save to another directory",
            path=checkpoint,
            errno=errno.ENOSPC,
            operation="begin",
        )
