"""A structure table as a typed message: how it travels from a rank to the coordinator.

Owns the mapping between columns and bytes, and checks what arrives before anything uses it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.errors import ExchangeError
from robust_dcp.plan.structure.signature import PlanContext
from robust_dcp.plan.structure.table import Form, ItemKind, Path, StructureTable

__all__ = ["StructureMessage"]

_INDEX_DIGITS = 20
"""More than a list index can have."""


class StructureMessage(msgspec.Struct, frozen=True):
    """The columns of a :class:`StructureTable`, little-endian, and the digests of its objects.

    ``path_parts`` holds, for each name, the length of each part of its path, negative where the part is a list
    index: a name is its path joined by dots (``torch.distributed.checkpoint._nested_dict``), so the lengths suffice.
    ``None`` stands for a planner that does not flatten.

    ``object_digests``: uint64, one for each item of kind BYTES in table order; 0 stands for "not computed".

    ``context``: :meth:`PlanContext.encode`, compared with the coordinator's.
    """

    names: tuple[str, ...]
    path_parts: tuple[tuple[int, ...], ...] | None
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    name_ids: bytes
    dtype_ids: bytes
    layout_ids: bytes
    kinds: bytes
    forms: bytes
    requires_grad: bytes
    ndims: bytes
    shapes: bytes
    offsets: bytes
    sizes: bytes
    object_digests: bytes
    context: bytes

    @classmethod
    def of(
        cls, table: StructureTable, object_digests: npt.NDArray[np.uint64], context: PlanContext
    ) -> StructureMessage:
        nested = bool(table.paths) and table.paths[0] is not None
        return cls(
            names=table.names,
            path_parts=tuple(_part_lengths(path or ()) for path in table.paths) if nested else None,
            dtypes=table.dtypes,
            layouts=table.layouts,
            name_ids=_to_bytes(table.name_ids, np.int32),
            dtype_ids=_to_bytes(table.dtype_ids, np.int32),
            layout_ids=_to_bytes(table.layout_ids, np.int32),
            kinds=_to_bytes(table.kinds, np.uint8),
            forms=_to_bytes(table.forms, np.uint8),
            requires_grad=_to_bytes(table.requires_grad, np.uint8),
            ndims=_to_bytes(table.ndims, np.uint8),
            shapes=_to_bytes(table.shapes, np.int64),
            offsets=_to_bytes(table.offsets, np.int64),
            sizes=_to_bytes(table.sizes, np.int64),
            object_digests=_to_bytes(object_digests, np.uint64),
            context=context.encode(),
        )

    def to_table(self) -> StructureTable:
        """The table again.

        Raises:
            ExchangeError: if the columns do not fit each other.
        """
        if self.path_parts is not None and len(self.path_parts) != len(self.names):
            raise _malformed(f"{len(self.path_parts)} paths for {len(self.names)} names")
        table = StructureTable(
            names=self.names,
            paths=tuple(
                None if self.path_parts is None else _split(name, self.path_parts[place])
                for place, name in enumerate(self.names)
            ),
            dtypes=self.dtypes,
            layouts=self.layouts,
            name_ids=_from_bytes(self.name_ids, np.int32),
            dtype_ids=_from_bytes(self.dtype_ids, np.int32),
            layout_ids=_from_bytes(self.layout_ids, np.int32),
            kinds=_from_bytes(self.kinds, np.uint8),
            forms=_from_bytes(self.forms, np.uint8),
            requires_grad=_from_bytes(self.requires_grad, np.uint8),
            ndims=_from_bytes(self.ndims, np.uint8),
            shapes=_from_bytes(self.shapes, np.int64),
            offsets=_from_bytes(self.offsets, np.int64),
            sizes=_from_bytes(self.sizes, np.int64),
        )
        _check(table)
        if len(self.digests()) != int((table.kinds == ItemKind.BYTES).sum()):
            raise _malformed("the number of object digests is not that of the objects")
        return table

    def digests(self) -> npt.NDArray[np.uint64]:
        return _from_bytes(self.object_digests, np.uint64)


def _to_bytes(column: npt.NDArray[Any], dtype: type[np.generic]) -> bytes:
    return column.astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes()


def _from_bytes(data: bytes, dtype: type[np.generic]) -> npt.NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise _malformed(f"a column of {np.dtype(dtype).name} has {len(data)} bytes")
    return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<"))


def _part_lengths(path: Path) -> tuple[int, ...]:
    return tuple(-len(str(part)) if isinstance(part, int) else len(part) for part in path)


def _split(name: str, lengths: tuple[int, ...]) -> Path:
    parts: list[str | int] = []
    at = 0
    for length in lengths:
        text = name[at : at + abs(length)]
        if length < 0 and not (text.isdecimal() and len(text) < _INDEX_DIGITS):
            raise _malformed(f"the path of {name!r} has the list index {text!r}")
        parts.append(int(text) if length < 0 else text)
        at += abs(length) + 1
    if not parts or at != len(name) + 1 or ".".join(map(str, parts)) != name:
        raise _malformed(f"the path of {name!r} does not spell it")
    return tuple(parts)


def _check(table: StructureTable) -> None:
    n_items, n_dims = len(table.name_ids), int(table.ndims.sum(dtype=np.int64))
    columns = (table.dtype_ids, table.layout_ids, table.kinds, table.forms, table.requires_grad, table.ndims)
    if any(len(column) != n_items for column in columns):
        raise _malformed("columns of different lengths")
    if any(len(column) != n_dims for column in (table.shapes, table.offsets, table.sizes)):
        raise _malformed(f"the dimension columns do not have the {n_dims} entries that ndims announces")
    for ids, strings in (
        (table.name_ids, table.names),
        (table.dtype_ids, table.dtypes),
        (table.layout_ids, table.layouts),
    ):
        if n_items and (int(ids.min()) < 0 or int(ids.max()) >= len(strings)):
            raise _malformed("a place outside its string table")
    if any(left >= right for left, right in pairwise(table.names)):
        raise _malformed("the names are not sorted")
    for strings, kind in ((table.dtypes, torch.dtype), (table.layouts, torch.layout)):
        unknown = [text for text in strings if text and not isinstance(vars(torch).get(text), kind)]
        if unknown:
            raise _malformed(f"this torch has no {kind.__name__} called {unknown[0]!r}")
    is_bytes = table.kinds == ItemKind.BYTES
    for ids, strings in ((table.dtype_ids, table.dtypes), (table.layout_ids, table.layouts)):
        if (np.array([not text for text in strings], dtype=np.bool_)[ids] != is_bytes).any():
            raise _malformed("a tensor without dtype or layout, or an object with one")
    if table.ndims[is_bytes].any():
        raise _malformed("an object with dimensions")
    if not np.isin(table.kinds, list(ItemKind)).all() or not np.isin(table.forms, list(Form)).all():
        raise _malformed("an unknown kind or form of item")


def _malformed(what: str) -> ExchangeError:
    return ExchangeError(f"a structure message is malformed: {what}; are all ranks on the same robust_dcp version?")
