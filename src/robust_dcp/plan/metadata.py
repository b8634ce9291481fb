"""Makes the ``.metadata`` of a checkpoint and its index from a global plan, on the coordinator.

This module translates the plan's columns into those that ``storage.metadata.pickled`` writes. What follows from the
plan is encoded once and kept with it. File names and the places of items of variable size are filled in at each commit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from robust_dcp.items import ItemKind, distinct
from robust_dcp.plan.global_plan import GlobalPlan
from robust_dcp.report import Modules
from robust_dcp.report_rows import module_sizes
from robust_dcp.storage.committing.save import MetadataToPublish
from robust_dcp.storage.files.paths import mark_of
from robust_dcp.storage.index.build import IndexTemplate
from robust_dcp.storage.index.form import Fragment, Section
from robust_dcp.storage.layouts.places import TORCH, Layout, Placements
from robust_dcp.storage.metadata.metadata_file import FORMAT_VERSION, decode_metadata
from robust_dcp.storage.metadata.pickled import MetadataColumns, MetadataPickle

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)

_NO_INDEX: Final = "the checkpoint gets no index, so a load takes longer: %s"


class MetadataTemplate:
    """The metadata of all checkpoints that one plan writes.

    It is compiled at its first use. So the other ranks get the first plan sooner, and write in the meantime.

    Args:
        plan: the global plan. It is dropped after it has been compiled.
        placements: for each rank the places of its kept items.
        layout: the layout that made them.
    """

    def __init__(self, plan: GlobalPlan, placements: Sequence[Placements], layout: Layout = TORCH) -> None:
        self._head_nbytes = [placement.head_nbytes for placement in placements]
        self._n_variable = [len(placement.variable) for placement in placements]
        self._layout = layout
        self._uncompiled: tuple[GlobalPlan, Sequence[Placements]] | None = (plan, placements)
        self._variable_places: Int64 = np.empty((0, 2), dtype=np.int64)

    def _compile(self, plan: GlobalPlan, placements: Sequence[Placements]) -> None:
        self._columns = columns = _metadata_columns(plan, placements)
        # Ranks report items of variable size rank after rank, in plan order. Within a file that is the order of the
        # columns, too. So `order` has, for each such item in the columns, its place in the list of all ranks.
        rank_of_file = np.repeat(np.arange(len(placements)), [placement.n_files for placement in placements])
        files = columns.file[columns.start < 0]
        order = np.empty(len(files), dtype=np.intp)
        order[np.argsort(rank_of_file[files], kind="stable")] = np.arange(len(files))
        self._order = order
        self._pickled = MetadataPickle(columns)
        self._index: IndexTemplate | None = None
        try:
            self._index = IndexTemplate(columns)
        except (ValueError, TypeError) as error:  # for example, a name is too long
            logger.warning(_NO_INDEX, error)
        self._uncompiled = None

    @property
    def nbytes(self) -> int:
        """How many bytes are kept for later saves."""
        if self._uncompiled is not None:
            return 0
        columns = self._columns
        own = columns.name.nbytes + columns.offset.nbytes + columns.size.nbytes  # the index holds the other columns
        return self._pickled.nbytes + own + (0 if self._index is None else self._index.nbytes)

    def encode(
        self,
        places_of_ranks: Sequence[Int64],
        storage_meta: StorageMeta,
        kept_plan: Mapping[str, Section] | None = None,
    ) -> MetadataToPublish:
        """The bytes of ``.metadata`` and of the index, and the data files of all ranks.

        Args:
            places_of_ranks: for each rank the places of its items of variable size.
            storage_meta: goes into the file unchanged.
            kept_plan: the sections of the index that hold the plan.

        Raises:
            ValueError: there is not one place for each item of variable size.
        """
        for rank, (places, n_variable) in enumerate(zip(places_of_ranks, self._n_variable, strict=True)):
            if len(places) != n_variable:
                raise ValueError(f"rank {rank} gave {len(places)} places for {n_variable} items of variable size")
        if self._uncompiled is not None:
            self._compile(*self._uncompiled)
        places = self._variable_places = np.concatenate(places_of_ranks)[self._order]
        mark = mark_of(storage_meta.save_id or "")
        of_ranks = (self._layout.file_names(rank, heads, mark) for rank, heads in enumerate(self._head_nbytes))
        names = list(chain.from_iterable(of_ranks))
        fragments = self._pickled.encode(names, places, storage_meta)
        index: Sequence[Fragment] = ()
        if self._index is not None:
            try:
                index = self._index.encode(fragments, names, places, storage_meta, FORMAT_VERSION, kept_plan or {})
            except (ValueError, TypeError) as error:  # for example, another torch has more in its StorageMeta
                logger.warning(_NO_INDEX, error)
        return MetadataToPublish(fragments, frozenset(names), index)

    def for_stock(self) -> Metadata:
        """DCP's own object, for storage writers other than ours. The writer fills in ``storage_data``."""
        nowhere = [np.zeros((n_variable, 2), dtype=np.int64) for n_variable in self._n_variable]
        encoded = self.encode(nowhere, StorageMeta(checkpoint_id="", save_id=""))
        metadata = decode_metadata(b"".join(encoded.fragments), ".metadata")
        metadata.storage_data = metadata.storage_meta = None
        return metadata

    @cached_property
    def module_sizes(self) -> Modules:
        """The bytes of each module in the checkpoint that was encoded last.

        Like all else that takes time for each item, it is computed once for each plan. So in later checkpoints the
        sizes of objects are those of the first.
        """
        columns = self._columns
        nbytes = columns.nbytes.copy()
        nbytes[columns.start < 0] = self._variable_places[:, 1]
        of_names = np.zeros(len(columns.names), dtype=np.int64)
        np.add.at(of_names, columns.name, nbytes)
        return module_sizes(columns.names, of_names)


def _metadata_columns(plan: GlobalPlan, placements: Sequence[Placements]) -> MetadataColumns:
    """The columns for everything that ``plan`` writes.

    Args:
        plan: the plan.
        placements: for each rank the places of the items that it writes. Files are numbered rank after rank.
    """
    items, written, place = plan.items, plan.written, plan.place
    ends = np.cumsum([p.n_files for p in placements])
    file = [p.file + np.int32(end - p.n_files) for p, end in zip(placements, ends.tolist(), strict=True)]
    is_object = items.kind[written] == ItemKind.BYTES
    name = items.name[written]
    first_of_name = np.flatnonzero(np.diff(name, prepend=-1))  # this works because every name is written
    # A rank may hold replicas with other properties than the one that is written.
    heads = written[first_of_name]
    used, which_properties = np.unique(items.properties_of[heads], return_inverse=True)
    has_objects = int(bool(len(used)) and not items.properties[used[0]].dtype)  # their properties are the first
    properties = [items.properties[each] for each in used[has_objects:].tolist()]
    # Some sizes of the plan may be only those of copies that are not written.
    sizes, which = distinct(
        np.concatenate([items.shape[heads], items.offset[written], items.size[written]]), len(items.sizes)
    )
    whole, offset, size = np.split(which, np.cumsum([len(heads), len(written)]))
    return MetadataColumns(
        names=items.names,
        paths=items.paths,
        properties=[(getattr(torch, dtype), getattr(torch, layout), grad) for dtype, layout, grad in properties],
        name_properties=(which_properties - has_objects).astype(np.int32),
        name_size=np.where(is_object[first_of_name], -1, whole).astype(np.int32),
        sizes=[items.sizes[each] for each in sizes.tolist()],
        name=name,
        offset=np.where(is_object, -1, offset).astype(np.int32),
        size=np.where(is_object, -1, size).astype(np.int32),
        file=np.concatenate(file)[place],
        start=np.concatenate([p.offset for p in placements])[place],
        nbytes=np.concatenate([p.nbytes for p in placements])[place],
        n_files=int(ends[-1]),
    )
