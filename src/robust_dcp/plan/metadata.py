"""The ``.metadata`` of a checkpoint and its index, from a global plan.

Owns the translation of the plan's columns into those that ``storage.metadata.pickled`` emits; what a plan determines is
emitted once and kept with it, the names of files and the places of items of variable size are filled in at each commit.
Coordinator only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
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

from robust_dcp.plan.global_plan import GlobalColumns, GlobalPlan
from robust_dcp.plan.structure import ItemKind
from robust_dcp.plan.structure.ragged import unique_rows
from robust_dcp.storage.index import Fragment, IndexTemplate, Section
from robust_dcp.storage.layouts import TORCH, FileName, Layout
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.metadata.metadata_file import FORMAT_VERSION
from robust_dcp.storage.metadata.pickled import MetadataColumns, MetadataPickle
from robust_dcp.storage.writer import MetadataToPublish
from robust_dcp.storage.writing.engine import WrittenFiles

__all__ = ["MetadataTemplate", "stock_metadata"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]

logger = logging.getLogger(__name__)


class MetadataTemplate:
    """The metadata of all checkpoints that are written by one plan. Compiled when first asked for: the first plan then
    reaches the other ranks sooner, and they write in the meantime.

    Args:
        plan: the global plan; not kept once it has been compiled.
        placements: for each rank the places of its kept items.
        layout: that made them.
    """

    def __init__(self, plan: GlobalPlan, placements: Sequence[Placements], layout: Layout = TORCH) -> None:
        self._source: tuple[GlobalPlan, Sequence[Placements]] | None = (plan, placements)
        self._compiled: tuple[MetadataPickle, IndexTemplate | None, Places] | None = None
        self._lock = threading.Lock()
        self._layout = layout
        self._heads = [placement.head_nbytes for placement in placements]
        self._variable = [int((placement.offset < 0).sum()) for placement in placements]

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for later saves."""
        if self._compiled is None:
            return 0
        pickled, index, _ = self._compiled
        return pickled.nbytes + (0 if index is None else index.nbytes)

    def encode(
        self, written: Sequence[WrittenFiles], storage_meta: StorageMeta, kept_plan: Mapping[str, Section] | None = None
    ) -> MetadataToPublish:
        """The bytes of ``.metadata`` and of the index, and the data files of all ranks.

        Args:
            written: for each rank the generation of its file names and the places of its items of variable size.
            storage_meta: goes into the file as it is.
            kept_plan: what the index holds of the plan.

        Raises:
            ValueError: if places are not one for each item of variable size.
        """
        for rank, (files, expected) in enumerate(zip(written, self._variable, strict=True)):
            if len(files.variable_places) != expected:
                raise ValueError(
                    f"rank {rank} gave {len(files.variable_places)} places for {expected} items of variable size"
                )
        compiled, index, order = self._compile()
        places = np.concatenate([files.variable_places for files in written])[order]
        of_files = self._file_names(written)
        names = [name.committed for name in of_files]
        fragments = compiled.encode(names, places, storage_meta).fragments
        renames = tuple(name for name in of_files if name.written != name.committed)
        encoded: tuple[Fragment, ...] = ()
        if index is not None:
            try:
                encoded = index.encode(fragments, names, places, storage_meta, FORMAT_VERSION, kept_plan or {})
            except ValueError as error:  # a path of which UTF-8 knows nothing, say
                _tell_of_no_index(error)
        return MetadataToPublish(fragments, frozenset(names), renames, encoded)

    def _file_names(self, written: Sequence[WrittenFiles]) -> list[FileName]:
        """Rank after rank."""
        return [
            name
            for rank, (files, heads) in enumerate(zip(written, self._heads, strict=True))
            for name in self._layout.file_names(rank, heads, files.generation)
        ]

    def _compile(self) -> tuple[MetadataPickle, IndexTemplate | None, Places]:
        """The pickle and the index, and for each of their variable rows the place among those of all ranks."""
        with self._lock:
            if self._source is not None:
                plan, placements = self._source
                by_rank = _InPlanOrder.of(plan, placements)
                columns = _columns_of(plan, by_rank, n_files=sum(map(len, self._heads)))
                compiled = MetadataPickle(columns)
                self._compiled = compiled, _index_of(columns), by_rank.variable[compiled.variable]
                self._source = None
            if self._compiled is None:
                raise ValueError("the metadata could not be compiled before")
            return self._compiled


def _index_of(columns: MetadataColumns) -> IndexTemplate | None:
    try:
        return IndexTemplate(columns)
    except ValueError as error:
        _tell_of_no_index(error)
        return None


def _tell_of_no_index(error: ValueError) -> None:
    logger.warning("the checkpoint gets no index, so a load takes longer: %s", error)


class _InPlanOrder(NamedTuple):
    """Where the written items lie, in the order of ``GlobalPlan.written``.

    Attributes:
        file: int32 ``[K]``, place among the files of all ranks.
        start, nbytes: int64 ``[K]``, as in :class:`Placements`.
        variable: intp ``[K]``, place of an item of variable size among those of all ranks, rank after rank; -1 for
            others.
    """

    file: Int32
    start: Int64
    nbytes: Int64
    variable: Places

    @classmethod
    def of(cls, plan: GlobalPlan, placements: Sequence[Placements]) -> _InPlanOrder:
        first_file = np.cumsum([0, *(placement.n_files for placement in placements)])
        file = np.concatenate([p.file + first for p, first in zip(placements, first_file.tolist(), strict=False)])
        start = np.concatenate([p.offset for p in placements])
        variable = np.where(start < 0, np.cumsum(start < 0) - 1, -1)
        # Placements are rank after rank and ascend within a rank, as the rows of the columns do.
        place = np.empty(len(plan.written), dtype=np.intp)
        place[np.argsort(plan.written)] = np.arange(len(plan.written))
        nbytes = np.concatenate([p.nbytes for p in placements])
        return cls(file[place].astype(np.int32), start[place], nbytes[place], variable[place])


def _columns_of(plan: GlobalPlan, placed: _InPlanOrder, *, n_files: int) -> MetadataColumns:
    columns, written = plan.columns, plan.written
    is_object = columns.kind[written] == ItemKind.BYTES
    name = columns.name[written]
    first_of_name = np.flatnonzero(np.diff(name, prepend=-1))  # every name is written
    properties, which_properties = _properties(columns, written[first_of_name])
    ndims = columns.ndim[written]
    sizes = _Sizes()
    whole = sizes.add(columns.shape[written[first_of_name]], ndims[first_of_name])
    offset = sizes.add(columns.offset[written], ndims)
    size = sizes.add(columns.size[written], ndims)
    return MetadataColumns(
        names=columns.names,
        paths=plan.paths,
        attributes=plan.attributes,
        properties=properties,
        name_properties=np.where(is_object[first_of_name], -1, which_properties).astype(np.int32),
        name_size=np.where(is_object[first_of_name], -1, whole).astype(np.int32),
        sizes=sizes.values,
        size_ndims=sizes.ndims,
        name=name,
        offset=np.where(is_object, -1, offset).astype(np.int32),
        size=np.where(is_object, -1, size).astype(np.int32),
        file=placed.file,
        start=placed.start,
        nbytes=placed.nbytes,
        n_files=n_files,
    )


class _Sizes:
    """The distinct ``torch.Size`` values of several columns, in one table."""

    def __init__(self) -> None:
        self._tables: list[Int64] = []
        self._count = 0

    def add(self, rows: Int64, ndims: npt.NDArray[np.uint8]) -> Places:
        """Places in the table of ``rows``, of which the first ``ndims`` entries count."""
        keys = np.column_stack([ndims.astype(np.int64), rows])
        first, which = unique_rows(keys)
        self._tables.append(keys[first])
        self._count += len(first)
        return which + (self._count - len(first))

    @property
    def values(self) -> Int64:
        return np.concatenate(self._tables)[:, 1:]

    @property
    def ndims(self) -> npt.NDArray[np.uint8]:
        return np.concatenate(self._tables)[:, 0].astype(np.uint8)


Properties = list[tuple[torch.dtype, torch.layout, bool]]


def _properties(columns: GlobalColumns, rows: Places) -> tuple[Properties, Places]:
    """The distinct properties of ``rows``, and which each has; those of objects mean nothing."""
    is_object = columns.kind[rows] == ItemKind.BYTES
    keys = np.column_stack([columns.dtype[rows], columns.layout[rows], columns.requires_grad[rows]]).astype(np.int64)
    which = np.zeros(len(rows), dtype=np.intp)
    if is_object.all():
        return [], which
    tensors = np.flatnonzero(~is_object)
    first, which[tensors] = unique_rows(keys[tensors])
    distinct = [
        (getattr(torch, columns.dtypes[dtype]), getattr(torch, columns.layouts[layout]), bool(requires_grad))
        for dtype, layout, requires_grad in keys[tensors][first].tolist()
    ]
    return distinct, which


def stock_metadata(plan: GlobalPlan) -> Metadata:
    """DCP's own object, for storage writers other than ours; ``storage_data`` is for the writer to fill in."""
    columns, written = plan.columns, plan.written
    found: dict[str, Any] = {}
    # Plain lists: a NumPy scalar for each field of each item would cost several times as much.
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
