"""Makes the ``.metadata`` of a checkpoint and its index from a global plan, on the coordinator.

This module translates the plan's columns into those that ``storage.metadata.pickled`` writes. What follows from the
plan is encoded once and kept with it. File names and the places of items of variable size are filled in at each commit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from robust_dcp.plan.global_plan import GlobalPlan, Patch, plan_of_written
from robust_dcp.plan.metadata_columns import metadata_columns
from robust_dcp.plan.patched_columns import patched_columns
from robust_dcp.plan.structure import ItemKind
from robust_dcp.report_file import Modules
from robust_dcp.storage.committing.commit import MetadataToPublish
from robust_dcp.storage.files.paths import mark_of
from robust_dcp.storage.index import Fragment, IndexTemplate, Section
from robust_dcp.storage.layouts import TORCH, Layout
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.metadata.metadata_file import FORMAT_VERSION
from robust_dcp.storage.metadata.pickled import MetadataColumns, MetadataPickle
from robust_dcp.storage.writing.engine import WrittenFiles
from robust_dcp.storage.writing.module_sizes import module_sizes

__all__ = ["MetadataTemplate", "stock_metadata"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]

logger = logging.getLogger(__name__)

_SPARE_FILES = 64
"""Room for files that patches add, besides one eighth of all files."""

_NO_FILE = "-"
"""The name in the index of a file that a patch has made unnecessary."""


class MetadataTemplate:
    """The metadata of all checkpoints that one plan writes.

    It is compiled at its first use. So the other ranks get the first plan sooner, and write in the meantime.

    Args:
        plan: the global plan. It is dropped after it has been compiled.
        placements: for each rank the places of its kept items.
        layout: the layout that made them.
    """

    def __init__(self, plan: GlobalPlan, placements: Sequence[Placements], layout: Layout = TORCH) -> None:
        ends = np.cumsum([placement.n_files for placement in placements]).tolist()
        self._ranks = [
            _Files.of(placement, np.arange(end - placement.n_files, end, dtype=np.int32))
            for placement, end in zip(placements, ends, strict=True)
        ]
        self._n_files = ends[-1] if ends else 0
        self._max_files = self._n_files * 9 // 8 + _SPARE_FILES
        self._layout = layout
        self._lock = threading.Lock()
        self._compiled: _Compiled | None = None
        self._variable_places: Int64 = np.empty((0, 2), dtype=np.int64)
        self._modules: Modules | None = None

        def compiled() -> tuple[MetadataPickle, MetadataColumns]:
            numbers = [files.numbers for files in self._ranks]
            columns = metadata_columns(plan, placements, numbers, self._n_files)
            return MetadataPickle(columns, max_files=self._max_files), columns

        self._compiler: Callable[[], tuple[MetadataPickle, MetadataColumns]] | None = compiled

    def patched(self, patch: Patch, placements: Mapping[int, Placements]) -> MetadataTemplate | None:
        """The metadata of a plan that was made from the plan of this metadata.

        Args:
            patch: the changes.
            placements: the places of the items of ranks that the patch has moved.

        Returns:
            ``None`` if the plan has more new files than there is room for.
        """
        new = copy(self)
        new._lock, new._compiled, new._modules, new._ranks = threading.Lock(), None, None, list(self._ranks)
        for rank, placement in placements.items():
            numbers = self._ranks[rank].numbers
            end = new._n_files + max(0, placement.n_files - len(numbers))
            numbers = np.append(numbers, np.arange(new._n_files, end, dtype=np.int32))
            new._ranks[rank], new._n_files = _Files.of(placement, numbers), end
        if new._n_files > self._max_files:
            return None

        def compiled() -> tuple[MetadataPickle, MetadataColumns]:
            tables = [
                patch.shares.tables[rank].taken(patch.shares.kept[rank])
                if rank in placements
                else table.taken(patch.changed.kept[rank])
                for rank, table in enumerate(patch.changed.columns.tables)
            ]
            all_placements = [placements.get(rank, _nowhere(len(table))) for rank, table in enumerate(tables)]
            some = plan_of_written(tables)
            columns = metadata_columns(some, all_placements, [files.numbers for files in new._ranks], new._n_files)
            is_stale = np.zeros(new._n_files, dtype=np.bool_)
            for rank in placements:
                is_stale[new._ranks[rank].numbers] = True
            is_new = np.array([name in patch.names for name in columns.names], dtype=np.bool_)
            gone = patch.names.difference(columns.names)
            before = self._compile()
            pickled = before.pickled.patched(columns, is_new, is_stale, gone)
            return pickled, patched_columns(before.columns, columns, is_new, is_stale, gone)

        new._compiler = compiled
        return new

    @property
    def nbytes(self) -> int:
        """How many bytes are kept for later saves."""
        if self._compiled is None:
            return 0
        columns, index = self._compiled.columns, self._compiled.indexed
        own = columns.name.nbytes + columns.offset.nbytes + columns.size.nbytes  # the index holds the other columns
        return self._compiled.pickled.nbytes + own + (0 if index is None else index.nbytes)

    def encode(
        self, written: Sequence[WrittenFiles], storage_meta: StorageMeta, kept_plan: Mapping[str, Section] | None = None
    ) -> MetadataToPublish:
        """The bytes of ``.metadata`` and of the index, and the data files of all ranks.

        Args:
            written: for each rank whether its file names are plain, and the places of its items of variable size.
            storage_meta: goes into the file unchanged.
            kept_plan: the sections of the index that hold the plan.

        Raises:
            ValueError: there is not one place for each item of variable size.
        """
        for rank, (files, own) in enumerate(zip(written, self._ranks, strict=True)):
            if len(files.variable_places) != own.n_variable:
                raise ValueError(
                    f"rank {rank} gave {len(files.variable_places)} places for {own.n_variable} items of variable size"
                )
        compiled = self._compile()
        places = self._variable_places = np.concatenate([files.variable_places for files in written])
        mark = mark_of(storage_meta.save_id or "")
        of_files = [
            self._layout.file_names(rank, own.head_nbytes, mark, plain=files.are_plain)
            for rank, (files, own) in enumerate(zip(written, self._ranks, strict=True))
        ]
        names: list[str | None] = [None] * self._n_files
        for own, some in zip(self._ranks, of_files, strict=True):
            for number, name in zip(own.numbers.tolist(), some, strict=False):
                names[number] = name.committed
        fragments = compiled.pickled.encode(names, places[compiled.order], storage_meta).fragments
        index = self._index(compiled, fragments, names, places, storage_meta, kept_plan or {})
        renames = tuple(name for some in of_files for name in some if name.written != name.committed)
        return MetadataToPublish(fragments, frozenset(name for name in names if name is not None), renames, index)

    @property
    def module_sizes(self) -> Modules:
        """The bytes of each module in the checkpoint that was encoded last.

        Like all else that takes time for each item, it is computed once for each plan. So in later checkpoints the
        sizes of objects are those of the first.
        """
        if self._modules is None:
            compiled = self._compile()
            columns = compiled.columns
            nbytes = columns.nbytes.copy()
            nbytes[columns.start < 0] = self._variable_places[compiled.index_order, 1]
            of_names = np.zeros(len(columns.names), dtype=np.int64)
            np.add.at(of_names, columns.name, nbytes)
            self._modules = module_sizes(columns.names, of_names)
        return self._modules

    def _index(
        self,
        compiled: _Compiled,
        fragments: Sequence[Fragment],
        names: Sequence[str | None],
        places: Int64,
        storage_meta: StorageMeta,
        kept_plan: Mapping[str, Section],
    ) -> tuple[Fragment, ...]:
        """The index of a checkpoint with this ``.metadata``; empty if there can be none."""
        if compiled.indexed is None:
            return ()
        used = [name or _NO_FILE for name in names]
        try:
            return compiled.indexed.encode(
                fragments, used, places[compiled.index_order], storage_meta, FORMAT_VERSION, kept_plan
            )
        except ValueError as error:  # UTF-8 cannot encode a path, for example
            _tell_of_no_index(error)
            return ()

    def _compile(self) -> _Compiled:
        with self._lock:
            if self._compiler is not None:
                pickled, columns = self._compiler()
                self._compiled = _Compiled(
                    pickled,
                    self._places_of_variable(pickled.variable_files),
                    columns,
                    _index_of(columns),
                    self._places_of_variable(columns.file[columns.start < 0]),
                )
                self._compiler = None
            if self._compiled is None:
                raise ValueError("an earlier attempt to compile this metadata failed")
            return self._compiled

    def _places_of_variable(self, files: npt.NDArray[np.integer[Any]]) -> Places:
        """For each item of variable size in ``files``, its place in the list of all ranks.

        Ranks report these items rank after rank, in plan order. Within one file that is also the order of ``files``."""
        rank_of = np.empty(self._n_files, dtype=np.intp)
        for rank, own in enumerate(self._ranks):
            rank_of[own.numbers] = rank
        places = np.empty(len(files), dtype=np.intp)
        places[np.argsort(rank_of[files], kind="stable")] = np.arange(len(files))
        return places


class _Compiled(NamedTuple):
    """What follows from a plan.

    Attributes:
        pickled: makes ``.metadata``.
        order: for each item of variable size in ``.metadata``, its place in the list of all ranks.
        columns: the columns that both are made of.
        indexed: makes the index; ``None`` if there can be none.
        index_order: as ``order``, for the index.
    """

    pickled: MetadataPickle
    order: Places
    columns: MetadataColumns
    indexed: IndexTemplate | None
    index_order: Places


class _Files(NamedTuple):
    """The files of one rank.

    Attributes:
        numbers: int32, the number of each file among those of all ranks, followed by the numbers of files that the rank
            used before.
        head_nbytes: as in :class:`Placements`.
        n_variable: how many items of variable size are in them.
    """

    numbers: Int32
    head_nbytes: Sequence[int]
    n_variable: int

    @classmethod
    def of(cls, placement: Placements, numbers: Int32) -> _Files:
        return cls(numbers, placement.head_nbytes, int((placement.offset < 0).sum()))


def _nowhere(n_items: int) -> Placements:
    """Placements for items of ranks that have not moved. Nothing reads them."""
    nothing = np.zeros(n_items, dtype=np.int64)
    return Placements(nothing.astype(np.int32), nothing, nothing, (0,), None)


def _index_of(columns: MetadataColumns) -> IndexTemplate | None:
    try:
        return IndexTemplate(columns)
    except ValueError as error:
        _tell_of_no_index(error)
        return None


def _tell_of_no_index(error: ValueError) -> None:
    logger.warning("the checkpoint gets no index, so a load takes longer: %s", error)


def stock_metadata(plan: GlobalPlan) -> Metadata:
    """DCP's own object, for storage writers other than ours. The writer fills in ``storage_data``."""
    columns, written = plan.columns, plan.written
    found: dict[str, Any] = {}
    # Use plain lists: a NumPy scalar for each field of each item would take several times as long.
    for row, place, is_bytes, ndim, offset, size in zip(
        written.tolist(),
        columns.name[written].tolist(),
        (columns.kind[written] == ItemKind.BYTES).tolist(),
        columns.ndim[written].tolist(),
        columns.offset[written].tolist(),
        columns.size[written].tolist(),
        strict=True,
    ):
        name = columns.names[place]
        if is_bytes:
            found[name] = BytesStorageMetadata()
            continue
        tensor = found.get(name)
        if tensor is None:
            tensor = found[name] = TensorStorageMetadata(
                properties=TensorProperties(
                    dtype=getattr(torch, columns.dtypes[columns.dtype[row]]),
                    layout=getattr(torch, columns.layouts[columns.layout[row]]),
                    requires_grad=bool(columns.requires_grad[row]),
                ),
                size=torch.Size(columns.shape[row, :ndim].tolist()),
                chunks=[],
            )
        tensor.chunks.append(ChunkStorageMetadata(offsets=torch.Size(offset[:ndim]), sizes=torch.Size(size[:ndim])))
    paths = None if plan.paths is None else dict(zip(plan.paths.names, plan.paths, strict=True))
    metadata = Metadata(state_dict_metadata=found, planner_data=paths)
    vars(metadata).update(plan.attributes)
    return metadata
