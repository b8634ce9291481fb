"""The structures of all ranks in one set of columns. Every check of the global plan runs on these columns.

This module merges string tables and pads dimensions. It decides nothing. Only the coordinator uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.plan.structure import ItemKind, StructureTable
from robust_dcp.plan.structure.ragged import padded

__all__ = ["GlobalColumns", "itemsize_of", "merge_tables"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class GlobalColumns:
    """Columns over the M items of all ranks, rank after rank, each in the order of its table.

    Attributes:
        tables: the table of each rank.
        name_places: for each rank the places of its table's names in ``names``. Ranks with the same names share it.
        names, dtypes, layouts: the distinct strings over all ranks, sorted.
        rank, item: int32 ``[M]``, the rank that has the item, and the item's place in that rank's table.
        name, dtype, layout: int32 ``[M]``, places in the string tables.
        kind, form, requires_grad, ndim, replica: uint8 ``[M]``.
        shape, offset, size: int64 ``[M, D]``, padded with 1, 0 and 1; D is the largest number of dimensions.
        numel: int64 ``[M]``, elements in the chunk; 0 for objects.
        nbytes: int64 ``[M]``, bytes in the chunk; 0 for objects.
    """

    tables: tuple[StructureTable, ...]
    name_places: tuple[Int32, ...]
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    rank: Int32
    item: Int32
    name: Int32
    dtype: Int32
    layout: Int32
    kind: UInt8
    form: UInt8
    requires_grad: UInt8
    ndim: UInt8
    replica: UInt8
    shape: Int64
    offset: Int64
    size: Int64
    numel: Int64
    nbytes: Int64

    def __len__(self) -> int:
        return len(self.rank)

    def describe(self, row: int) -> str:
        """Describe one item in words, for errors."""
        return self.tables[int(self.rank[row])].describe_item(int(self.item[row]))


def itemsize_of(dtype: str) -> int:
    """How many bytes one element of ``dtype`` has; 0 for ``""`` (not a tensor)."""
    return 0 if not dtype else int(getattr(torch, dtype).itemsize)


def merge_tables(tables: Sequence[StructureTable]) -> GlobalColumns:
    """The items of all ranks, in rank order."""
    names, name_places = _merge_strings([t.names for t in tables])
    dtypes, dtype_places = _merge_strings([t.dtypes for t in tables])
    layouts, layout_places = _merge_strings([t.layouts for t in tables])
    width = max((int(t.ndims.max(initial=0)) for t in tables), default=0)
    kind = _joined(t.kinds for t in tables)
    shape = np.concatenate([padded(t.shapes, t.ndims, width, fill=1) for t in tables])
    offset = np.concatenate([padded(t.offsets, t.ndims, width, fill=0) for t in tables])
    size = np.concatenate([padded(t.sizes, t.ndims, width, fill=1) for t in tables])
    dtype = _translated(dtype_places, [t.dtype_ids for t in tables])
    numel = np.where(kind == ItemKind.BYTES, 0, size.prod(axis=1, dtype=np.int64))
    itemsizes = np.array([itemsize_of(name) for name in dtypes] or [0], dtype=np.int64)
    return GlobalColumns(
        tables=tuple(tables),
        name_places=tuple(name_places),
        names=names,
        dtypes=dtypes,
        layouts=layouts,
        rank=np.repeat(np.arange(len(tables), dtype=np.int32), [len(t) for t in tables]),
        item=np.concatenate([np.arange(len(t), dtype=np.int32) for t in tables]),
        name=_translated(name_places, [t.name_ids for t in tables]),
        dtype=dtype,
        layout=_translated(layout_places, [t.layout_ids for t in tables]),
        kind=kind,
        form=_joined(t.forms for t in tables),
        requires_grad=_joined(t.requires_grad for t in tables),
        ndim=_joined(t.ndims for t in tables),
        replica=_joined(t.replicas for t in tables),
        shape=shape,
        offset=offset,
        size=size,
        numel=numel,
        nbytes=numel * itemsizes[dtype],
    )


def _joined(columns: Iterable[UInt8]) -> UInt8:
    return np.concatenate(list(columns)).astype(np.uint8, copy=False)


def _merge_strings(tables: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], list[Int32]]:
    """One sorted table of all strings, and for each of ``tables`` the places of its strings there.

    Many ranks share the same table object (``structure.message`` makes it so). Each object is looked at once.
    """
    distinct = {id(table): table for table in tables}
    merged = tuple(sorted(set().union(*distinct.values())))
    place = {value: i for i, value in enumerate(merged)}
    places = {
        key: np.fromiter(map(place.__getitem__, table), dtype=np.int32, count=len(table))
        for key, table in distinct.items()
    }
    return merged, [places[id(table)] for table in tables]


def _translated(places: Sequence[Int32], columns: Sequence[Int32]) -> Int32:
    """Join the columns of all ranks into one, with places in the merged table."""
    return np.concatenate([to[column] for to, column in zip(places, columns, strict=True)])
