"""``RobustWriter``: DCP's ``StorageWriter`` over ``engine`` and ``commit``.

Owns DCP's hooks and the options of a save; what is made in the checkpoint's directory is ``save_directory``'s. Places
come from the plan; with another planner than ours it makes them itself. Called by ``api.save`` and by stock ``save``.
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from robust_dcp.errors import entry_point
from robust_dcp.storage.files.disk import Disk, PosixDisk
from robust_dcp.storage.files.paths import directory_path, is_url, mark_of
from robust_dcp.storage.layouts import layout_named
from robust_dcp.storage.layouts.places import Placements, place_as_they_come
from robust_dcp.storage.metadata.metadata_file import FORMAT_VERSION, StorageInfo, encode_metadata, referenced_files
from robust_dcp.storage.writing.commit import MetadataToPublish
from robust_dcp.storage.writing.engine import WriteFiles, WrittenFiles, write_files
from robust_dcp.storage.writing.item_source import ItemSource, Resolve, WriteItemSource
from robust_dcp.storage.writing.save_directory import SaveDirectory
from robust_dcp.storage.writing.stripes import stripe_directories
from robust_dcp.storage.writing.write_options import WriteOptions, with_keywords

__all__ = ["PlannedSave", "RobustWriter", "WriterMeta"]

_FEW_FILES: Final = 64
_CHECK_AGAIN_SECONDS: Final = 1.0


@runtime_checkable
class PlannedSave(Protocol):
    """A save that ``RobustPlanner`` has planned. It calls the writer's methods itself, in the order that it has agreed
    on with all ranks; where stock calls a hook of the writer instead, the hook gives it its turn."""

    def write_items(self, items: Sequence[WriteItem], resolve: Resolve) -> None: ...

    def commit(self) -> None: ...


class _Share(NamedTuple):
    """What the coordinator of a save by another planner than ours tells each rank, in its plan."""

    rank: int
    mark: int


@dataclass
class WriterMeta(StorageMeta):
    """How ``RobustPlanner`` learns which writer it plans for: stock hands ``storage_meta()`` to ``set_up_planner``."""

    writer: RobustWriter | None = None


class RobustWriter(StorageWriter):
    """Writes checkpoints into a directory: parallel, checksummed, durable, and visible in one step.

    Files of a committed checkpoint in the directory are neither overwritten nor removed before the new one is
    committed; killed at any instant, the directory loads as the one or the other.

    Args:
        path: the checkpoint's directory; made if it is not there.
        options: how to write, see :class:`WriteOptions`. Each can also be given as a keyword of its own; one that is
            given in both places must be the same.
        disk: the file system.

    Attributes:
        disk: as given.
        write_files: writes this rank's files. One save may set it to what has them written elsewhere.

    Raises:
        ValueError: an option is out of range, or a path is a URL (``scheme://…``).
        StorageError: from :meth:`begin` on, when the file system refuses.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        options: WriteOptions | None = None,
        layout: str = "torch",
        threads: int | None = None,
        files_per_rank: int | None = None,
        block_bytes: int | None = None,
        buffer_bytes: int | None = None,
        direct: bool | None = None,
        stripe_paths: Sequence[str | os.PathLike[str]] = (),
        checksums: bool = True,
        overwrite: bool = True,
        disk: Disk | None = None,
    ) -> None:
        super().__init__()
        self.options = with_keywords(
            options or WriteOptions(),
            layout=layout,
            threads=threads,
            files_per_rank=files_per_rank,
            block_bytes=block_bytes,
            buffer_bytes=buffer_bytes,
            direct=direct,
            stripe_paths=stripe_paths,
            checksums=checksums,
            overwrite=overwrite,
        )
        self.layout = layout_named(self.options.layout)
        self.path = directory_path(path)
        self.disk: Disk = disk or PosixDisk()
        self.write_files: WriteFiles = write_files
        self.save_id = str(uuid.uuid4())
        self._directory: SaveDirectory | None = None
        self._rank: int | None = None
        self._alone = False
        self._is_coordinator = False
        self._begun = False
        self._announces = False
        self._checked_at_seconds = -math.inf
        self._uncommitted_names: tuple[str, ...] = ()

    @property
    def files_per_rank(self) -> int:
        """Files that a rank's tensors are spread over: part of the plan."""
        return self.options.n_files

    @property
    def plan_options(self) -> dict[str, str | int]:
        """The options that a plan depends on: part of its signature."""
        return {"layout": self.layout.name, "files_per_rank": self.files_per_rank}

    # One save, as `api.save` calls it.

    def begin(self, *, is_coordinator: bool, ranks: int | None, alone: bool = False) -> None:
        """Before any rank writes: make the directory, look what is there, and say in it that a save begins.

        Args:
            ranks: how many write; ``None`` where :meth:`announce` will say it.
            alone: whether this rank commits by itself.

        Raises:
            StorageError: a checkpoint is there and ``overwrite`` is false; files are there with which those of the
                layout cannot share a directory; or the directory cannot be made.
        """
        self._begun = True
        self._alone = alone
        self._directory = None
        if not is_coordinator:
            return
        try:
            self.directory.begin(overwrite=self.options.overwrite)
            if ranks is not None:
                self.announce(ranks=ranks)
        except BaseException:
            self.directory.remove_directories()
            raise

    @property
    def mark(self) -> int:
        """What tells the files of this save from those of others, as a number."""
        return int(mark_of(self.save_id), 16)

    def adopt(self, mark: int) -> None:
        """Take the coordinator's ``mark`` for that of this save; before :meth:`write`, on every rank."""
        if mark != self.mark:
            self.save_id = f"{mark:016x}"
            if self._directory is not None:
                self._directory.save_id = self.save_id

    def announce(self, *, ranks: int) -> None:
        """On the coordinator, before any rank writes: make sure that what ranks write can be told from what others do.

        Raises:
            StorageError: as :meth:`begin`.
        """
        # Where ranks commit by themselves nobody judges the files of the others.
        if not self._alone and not self.directory.is_announced:
            # One more for items of variable size; in the other layout their number depends on the names of tensors.
            files = None if self.layout.plans_places else self.files_per_rank + 1
            self.directory.announce(ranks=ranks, files=files)

    @property
    def directory(self) -> SaveDirectory:
        """What this save knows of, and has made in, its directory."""
        if self._directory is None:
            rank = self._rank if self._alone else None
            self._directory = SaveDirectory(self.disk, self.path, save_id=self.save_id, layout=self.layout, rank=rank)
        return self._directory

    def write(
        self,
        rank: int,
        source: ItemSource,
        placements: Placements,
        check_stop: Callable[[int, int], None],
        known_places: npt.NDArray[np.int64] | None = None,
    ) -> WrittenFiles:
        """Write this rank's items to their places, durably. Nothing is visible to readers yet.

        All ranks must have adopted one mark: they put it into their files.
        """
        if self._alone:
            self.directory.share()
        for place in (self.path, *stripe_directories(self.disk, self.path, self.options.stripes)):
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
        self.directory.has_written(written)
        self._uncommitted_names = written.uncommitted_names
        return written

    def check_own(self) -> None:
        """Make sure, right before the commit, that nobody has touched what this rank has written.

        Raises:
            StorageError: somebody has.
        """
        self._checked_at_seconds = time.monotonic()
        self.directory.check_own(self._uncommitted_names)

    def publish(self, metadata: MetadataToPublish, *, are_checked: bool) -> None:
        """Commit, on the coordinator. It looks at the files of all ranks once more where these are few, or where they
        were looked at long ago: this process may have stood still since.

        Args:
            are_checked: whether all ranks have called :meth:`check_own`.

        Raises:
            StorageError: as ``SaveDirectory.publish``.
        """
        are_few = len(metadata.files) <= _FEW_FILES

        def is_checked() -> bool:
            is_recent = time.monotonic() - self._checked_at_seconds < _CHECK_AGAIN_SECONDS
            return are_checked and is_recent and not are_few

        self.directory.publish(metadata, is_checked=is_checked)

    def clean_up(self) -> None:
        """Remove what the committed checkpoint supersedes; what cannot be removed is logged, and stays."""
        self.directory.tidy_up()

    # The hooks of stock `torch.distributed.checkpoint.save`, in the order in which it calls them.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = directory_path(checkpoint_id)
        self.save_id = str(uuid.uuid4())
        if self._directory is not None:
            self._directory.release()
            self._directory = None
        self._rank = None
        self._alone = False
        self._begun = self._announces = False
        self.write_files = write_files

    def storage_meta(self) -> WriterMeta:
        return WriterMeta(checkpoint_id=self.path, save_id=self.save_id, writer=self)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._begun = self._announces = False
        self._rank = kwargs.get("rank")
        self._is_coordinator = is_coordinator
        # With use_collectives=False every rank commits its own part, and stock's reader looks for `__{rank}.metadata`.
        # Not with a layout that only RobustPlanner plans for: its plans are global, and so is the commit.
        self._alone = not kwargs.get("use_collectives", True) and not self.layout.plans_places

    @entry_point
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not self._begun:  # by our planner, which announces the save as well
            self.begin(is_coordinator=self._is_coordinator, ranks=None, alone=self._alone)
            self._announces = self._is_coordinator
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._announces:
            self.announce(ranks=len(plans))
        return [replace(plan, storage_data=_Share(rank, self.mark)) for rank, plan in enumerate(plans)]

    @entry_point
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share. With ``RobustPlanner`` the results have been told to the coordinator by the time
        this returns, and stock gathers an empty list; with another planner they are returned."""
        results: list[WriteResult] = []
        save = plan.planner_data
        if isinstance(save, PlannedSave):
            save.write_items(plan.items, planner.resolve_data)
        else:
            results = self._write_unplanned(plan, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_unplanned(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write the plan of another planner than ours: items are placed as they come, for this rank alone."""
        if self.layout.plans_places:
            raise ValueError(
                f"RobustWriter with layout={self.layout.name!r} needs the places that RobustPlanner plans, and was "
                f"called with {type(planner).__name__}; pass planner=RobustPlanner()"
            )
        share = plan.storage_data if isinstance(plan.storage_data, _Share) else _Share(0, self.mark)
        rank = share.rank
        if self._alone and self._rank is not None:
            rank = self._rank
        else:
            self.adopt(share.mark)
        placements = place_as_they_come([_chunk_nbytes(item) for item in plan.items], files=self.files_per_rank)
        source = WriteItemSource(plan.items, planner.resolve_data)
        written = self.write(rank, source, placements, lambda done_nbytes, total_nbytes: None)
        return [
            WriteResult(
                index=item.index, size_in_bytes=nbytes, storage_data=StorageInfo(written.names[file], offset, nbytes)
            )
            for item, file, (offset, nbytes) in zip(
                plan.items, placements.file.tolist(), written.variable_places.tolist(), strict=True
            )
        ]

    @entry_point
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save = getattr(metadata, "save", None)
        if isinstance(save, PlannedSave):
            save.commit()
            return
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = self.plain_meta()
        metadata.version = FORMAT_VERSION
        files = referenced_files(metadata)
        try:
            self.directory.publish(MetadataToPublish((encode_metadata(metadata),), files))
        except BaseException as error:
            self.directory.roll_back(error)
            raise
        self.clean_up()

    def plain_meta(self) -> StorageMeta:
        """What goes into ``.metadata``: stock's class, and nothing of this process."""
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    @property
    def checkpoint_id(self) -> str:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` is a path on a mounted file system, rather than a URL."""
        return not is_url(checkpoint_id)


def _chunk_nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * int(data.properties.dtype.itemsize)
