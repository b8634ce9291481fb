"""The structure of one rank's state dict, as columns: what there is to save, and nothing of its contents.

Owns the table and its order; never looks at tensor data, other ranks or files. Made by the planner from its write
items (:func:`table_of`), hashed by ``signature``, compared by ``diff``, sent by ``message``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from robust_dcp.errors import PlanConflict

__all__ = ["Form", "ItemKind", "Path", "StructureTable", "reorder", "table_of"]

Path = tuple[str | int, ...]
Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]


class ItemKind(IntEnum):
    """The kinds of ``torch.distributed.checkpoint.planner.WriteItemType``."""

    TENSOR = 1
    SHARD = 2
    BYTES = 3


class Form(IntEnum):
    """How an item lies in a file: a record whose length the structure alone determines, or bytes of any length."""

    FIXED = 0
    VARIABLE = 1


_KINDS = {
    WriteItemType.TENSOR: ItemKind.TENSOR,
    WriteItemType.SHARD: ItemKind.SHARD,
    WriteItemType.BYTE_IO: ItemKind.BYTES,
}


@dataclass(frozen=True, eq=False)
class StructureTable:
    """Columns over the N items of one rank, sorted by (name, offsets).

    Strings stand in sorted tables of their own and the columns hold their places there, so two state dicts that
    differ only in the order of their keys give equal tables.

    Attributes:
        names: the distinct FQNs, sorted.
        paths: for each name its place in the nested state dict, or ``None`` where the planner did not flatten.
        dtypes: the distinct dtypes, as ``"float32"``, sorted; ``""`` for items that are no tensors.
        layouts: the distinct layouts, as ``"strided"``, sorted; ``""`` for items that are no tensors.
        name_ids, dtype_ids, layout_ids: int32 ``[N]``, places in the tables above.
        kinds: uint8 ``[N]``, :class:`ItemKind`.
        forms: uint8 ``[N]``, :class:`Form`.
        requires_grad: uint8 ``[N]``.
        ndims: uint8 ``[N]``, the number of dimensions of each item.
        shapes, offsets, sizes: int64 ``[sum(ndims)]``, the global size, and the offsets and sizes of the chunk, item
            after item.
    """

    names: tuple[str, ...]
    paths: tuple[Path | None, ...]
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    name_ids: Int32
    dtype_ids: Int32
    layout_ids: Int32
    kinds: UInt8
    forms: UInt8
    requires_grad: UInt8
    ndims: UInt8
    shapes: Int64
    offsets: Int64
    sizes: Int64

    def __len__(self) -> int:
        return len(self.name_ids)

    @cached_property
    def starts(self) -> Int64:
        """int64 ``[N + 1]``: item ``i`` has entries ``starts[i]:starts[i + 1]`` of the ragged columns."""
        return np.concatenate(([0], np.cumsum(self.ndims, dtype=np.int64)))

    def dims_of(self, item: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """(global size, chunk offsets, chunk sizes) of one item."""
        span = slice(int(self.starts[item]), int(self.starts[item + 1]))
        return (
            tuple(self.shapes[span].tolist()),
            tuple(self.offsets[span].tolist()),
            tuple(self.sizes[span].tolist()),
        )

    def describe_whole(self, item: int) -> str:
        """The tensor that an item belongs to, in words: what must be the same on all ranks."""
        if self.kinds[item] == ItemKind.BYTES:
            return "object"
        shape, _, _ = self.dims_of(item)
        text = f"{self.dtypes[self.dtype_ids[item]]}{list(shape)}"
        layout = self.layouts[self.layout_ids[item]]
        if layout != "strided":
            text += f" {layout}"
        if self.requires_grad[item]:
            text += " requires_grad"
        return text

    def describe_item(self, item: int) -> str:
        """One item in words, for errors and diffs."""
        text = self.describe_whole(item)
        if self.kinds[item] == ItemKind.SHARD:
            shape, offsets, sizes = self.dims_of(item)
            is_whole = sizes == shape and not any(offsets)
            text += " as one shard" if is_whole else f" chunk at {list(offsets)} of size {list(sizes)}"
        return text

    def describe_path(self, item: int) -> str:
        path = self.paths[self.name_ids[item]]
        return "" if path is None else "/".join(repr(part) for part in path)


def _plain_name(value: Any) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(value).removeprefix("torch.")


def _place_in(table: Sequence[str], values: Iterable[str]) -> Int32:
    places = {value: place for place, value in enumerate(table)}
    return np.fromiter((places[value] for value in values), dtype=np.int32)


def reorder(items: Sequence[WriteItem]) -> list[WriteItem]:
    """``items`` in the order of the table: by (name, offsets)."""
    return sorted(items, key=lambda item: (item.index.fqn, tuple(item.index.offset or ())))


def table_of(items: Sequence[WriteItem], forms: Sequence[Form], paths: Mapping[str, Path] | None) -> StructureTable:
    """Describe the write items of one rank's local plan.

    Args:
        items: the write items, in the order of :func:`reorder`.
        forms: for each of them how it will lie in a file.
        paths: FQN to place in the nested state dict; ``None`` where the planner does not flatten.

    Raises:
        PlanConflict: if two items have the same name and offsets.
    """
    _refuse_duplicates(items)
    names = tuple(dict.fromkeys(item.index.fqn for item in items))
    dims: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []
    dtypes: list[str] = []
    layouts: list[str] = []
    requires_grad = np.zeros(len(items), dtype=np.uint8)
    for row, item in enumerate(items):
        data = item.tensor_data
        if data is None:
            dims.append(((), (), ()))
            dtypes.append("")
            layouts.append("")
            continue
        dims.append((tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
        dtypes.append(_plain_name(data.properties.dtype))
        layouts.append(_plain_name(data.properties.layout))
        requires_grad[row] = data.properties.requires_grad
    dtype_table, layout_table = tuple(sorted(set(dtypes))), tuple(sorted(set(layouts)))
    flat = [np.array([n for row in dims for n in row[column]], dtype=np.int64) for column in range(3)]
    return StructureTable(
        names=names,
        paths=tuple(None if paths is None else tuple(paths[name]) for name in names),
        dtypes=dtype_table,
        layouts=layout_table,
        name_ids=_place_in(names, (item.index.fqn for item in items)),
        dtype_ids=_place_in(dtype_table, dtypes),
        layout_ids=_place_in(layout_table, layouts),
        kinds=np.array([_KINDS[item.type] for item in items], dtype=np.uint8),
        forms=np.array(forms, dtype=np.uint8),
        requires_grad=requires_grad,
        ndims=np.array([len(row[0]) for row in dims], dtype=np.uint8),
        shapes=flat[0],
        offsets=flat[1],
        sizes=flat[2],
    )


def _refuse_duplicates(items: Sequence[WriteItem]) -> None:
    for left, right in pairwise(items):
        if left.index == right.index or (left.index.fqn == right.index.fqn and left.type != right.type):
            at = "" if left.index.offset is None else f" at offset {list(left.index.offset)}"
            raise PlanConflict(
                f"the local plan names {left.index.fqn!r}{at} twice (as {left.type.name} and as {right.type.name}); "
                "each item of a state dict needs a name of its own: rename one of them",
                key=left.index.fqn,
            )
