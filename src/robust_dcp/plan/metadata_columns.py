"""Turns a global plan and the places of its items into the columns from which ``.metadata`` is written.

The columns hold names, sizes, chunks and places. This is pure NumPy. ``plan.metadata`` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.plan.global_plan import GlobalColumns, GlobalPlan
from robust_dcp.plan.structure import ItemKind
from robust_dcp.plan.structure.ragged import unique_rows
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.metadata.pickled import MetadataColumns

__all__ = ["metadata_columns"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]


def metadata_columns(plan: GlobalPlan, placements: Sequence[Placements]) -> MetadataColumns:
    """The columns for everything that ``plan`` writes.

    Args:
        plan: the plan.
        placements: for each rank the places of the items that it writes. Files are numbered rank after rank.
    """
    return _columns_of(plan, _InPlanOrder.of(plan, placements), n_files=sum(each.n_files for each in placements))


class _InPlanOrder(NamedTuple):
    """Where the written items are, in the order of ``GlobalPlan.written``.

    Attributes:
        file: int32 ``[K]``, the number of the file among those of all ranks.
        start, nbytes: int64 ``[K]``, as in :class:`Placements`.
    """

    file: Int32
    start: Int64
    nbytes: Int64

    @classmethod
    def of(cls, plan: GlobalPlan, placements: Sequence[Placements]) -> _InPlanOrder:
        # Placements come rank after rank and ascend within a rank. So do the rows of the columns.
        is_written = np.zeros(len(plan.columns), dtype=np.bool_)
        is_written[plan.written] = True
        place = (np.cumsum(is_written) - 1)[plan.written]
        ends = np.cumsum([p.n_files for p in placements])
        file = [p.file + np.int32(end - p.n_files) for p, end in zip(placements, ends.tolist(), strict=True)]
        return cls(
            np.concatenate(file)[place],
            np.concatenate([p.offset for p in placements])[place],
            np.concatenate([p.nbytes for p in placements])[place],
        )


def _columns_of(plan: GlobalPlan, placed: _InPlanOrder, *, n_files: int) -> MetadataColumns:
    columns, written = plan.columns, plan.written
    is_object = columns.kind[written] == ItemKind.BYTES
    name = columns.name[written]
    first_of_name = np.flatnonzero(np.diff(name, prepend=-1))  # this works because every name is written
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
        self._ndims: list[npt.NDArray[np.uint8]] = []
        self._count = 0

    def add(self, rows: Int64, ndims: npt.NDArray[np.uint8]) -> Places:
        """Add ``rows`` and return their places in the table. The first ``ndims`` entries of each row count."""
        first, which = unique_rows(ndims, *rows.T)
        self._tables.append(rows[first])
        self._ndims.append(ndims[first])
        self._count += len(first)
        return which + (self._count - len(first))

    @property
    def values(self) -> Int64:
        return np.concatenate(self._tables)

    @property
    def ndims(self) -> npt.NDArray[np.uint8]:
        return np.concatenate(self._ndims)


Properties = list[tuple[torch.dtype, torch.layout, bool]]


def _properties(columns: GlobalColumns, rows: Places) -> tuple[Properties, Places]:
    """The distinct properties of ``rows``, and for each row the place of its own. For objects it means nothing."""
    is_object = columns.kind[rows] == ItemKind.BYTES
    which = np.zeros(len(rows), dtype=np.intp)
    if is_object.all():
        return [], which
    tensors = np.flatnonzero(~is_object)
    keys = [column[rows[tensors]] for column in (columns.dtype, columns.layout, columns.requires_grad)]
    first, which[tensors] = unique_rows(*keys)
    distinct = [
        (getattr(torch, columns.dtypes[dtype]), getattr(torch, columns.layouts[layout]), bool(requires_grad))
        for dtype, layout, requires_grad in zip(*(key[first].tolist() for key in keys), strict=True)
    ]
    return distinct, which
