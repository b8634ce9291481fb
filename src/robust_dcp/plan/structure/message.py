"""A structure table as a typed message. A rank sends it to the coordinator.

This module converts columns to bytes and back, and checks what arrives before anything uses it. Ranks that are replicas
of each other send the same columns. So :class:`TableDecoder` decodes and checks each distinct column once, and several
tables share it.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import lt
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.errors import ExchangeError
from robust_dcp.plan.structure.attributes import NO_ATTRIBUTES, attributes_of
from robust_dcp.plan.structure.paths import Paths
from robust_dcp.plan.structure.table import Form, ItemKind, Replica, StructureTable

__all__ = ["StructureMessage", "TableDecoder"]

T = TypeVar("T")


class StructureMessage(msgspec.Struct, frozen=True):
    """The columns of a :class:`StructureTable`, little-endian.

    ``names``: a msgpack array of strings. It is one column like the others, so it is decoded once for many ranks.

    ``path_counts``, ``path_lengths``: int32, from :class:`Paths`; ``None`` for a planner that does not flatten.

    ``context``: :meth:`PlanContext.encode`. The coordinator compares it with its own.

    ``attributes``, ``peers``: as in :class:`StructureTable`.

    ``signature``: 16 bytes, the :class:`StructureSignature` of the table and the context.
    """

    names: bytes
    path_counts: bytes | None
    path_lengths: bytes | None
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    name_ids: bytes
    dtype_ids: bytes
    layout_ids: bytes
    kinds: bytes
    forms: bytes
    requires_grad: bytes
    ndims: bytes
    replicas: bytes
    shapes: bytes
    offsets: bytes
    sizes: bytes
    context: bytes
    attributes: bytes = NO_ATTRIBUTES
    signature: bytes = b""
    peers: tuple[int, ...] = ()

    @classmethod
    def of(cls, table: StructureTable, context: bytes, signature: bytes) -> StructureMessage:
        """The message for ``table``. The other arguments are the fields of these names."""
        paths = table.paths
        return cls(
            names=msgspec.msgpack.encode(table.names),
            path_counts=None if paths is None else _to_bytes(paths.counts, np.int32),
            path_lengths=None if paths is None else _to_bytes(paths.lengths, np.int32),
            dtypes=table.dtypes,
            layouts=table.layouts,
            name_ids=_to_bytes(table.name_ids, np.int32),
            dtype_ids=_to_bytes(table.dtype_ids, np.int32),
            layout_ids=_to_bytes(table.layout_ids, np.int32),
            kinds=_to_bytes(table.kinds, np.uint8),
            forms=_to_bytes(table.forms, np.uint8),
            requires_grad=_to_bytes(table.requires_grad, np.uint8),
            ndims=_to_bytes(table.ndims, np.uint8),
            replicas=_to_bytes(table.replicas, np.uint8),
            shapes=_to_bytes(table.shapes, np.int64),
            offsets=_to_bytes(table.offsets, np.int64),
            sizes=_to_bytes(table.sizes, np.int64),
            context=context,
            attributes=table.attributes,
            signature=signature,
            peers=table.peers,
        )


class TableDecoder:
    """Decodes the structures of many ranks. Columns with the same bytes become one object."""

    def __init__(self) -> None:
        self._decoded: dict[tuple[object, ...], Any] = {}

    def decode(self, message: StructureMessage) -> StructureTable:
        """The table in ``message``.

        Raises:
            ExchangeError: the columns do not fit each other.
        """
        names = self._once(("names", message.names), lambda: _names(message.names))
        table = StructureTable(
            names=names,
            paths=self._paths(message, names),
            dtypes=message.dtypes,
            layouts=message.layouts,
            name_ids=self._column(message.name_ids, np.int32),
            dtype_ids=self._column(message.dtype_ids, np.int32),
            layout_ids=self._column(message.layout_ids, np.int32),
            kinds=self._column(message.kinds, np.uint8),
            forms=self._column(message.forms, np.uint8),
            requires_grad=self._column(message.requires_grad, np.uint8),
            ndims=self._column(message.ndims, np.uint8),
            replicas=self._column(message.replicas, np.uint8),
            shapes=self._column(message.shapes, np.int64),
            offsets=self._column(message.offsets, np.int64),
            sizes=self._column(message.sizes, np.int64),
            attributes=self._once(("attributes", message.attributes), lambda: _checked_attributes(message.attributes)),
            peers=self._once(("peers", message.peers), lambda: message.peers),
        )
        _check(table)
        return table

    def _once(self, key: tuple[object, ...], decode: Callable[[], T]) -> T:
        found: T | None = self._decoded.get(key)
        if found is None:
            found = self._decoded[key] = decode()
        return found

    def _column(self, data: bytes, dtype: type[np.generic]) -> npt.NDArray[Any]:
        return self._once((dtype, data), lambda: _from_bytes(data, dtype))

    def _paths(self, message: StructureMessage, names: tuple[str, ...]) -> Paths | None:
        counts, lengths = message.path_counts, message.path_lengths
        if counts is None or lengths is None:
            if counts is not None or lengths is not None:
                raise _malformed("half of the columns of paths")
            return None
        return self._once(("paths", message.names, counts, lengths), lambda: _checked_paths(names, counts, lengths))


def _names(data: bytes) -> tuple[str, ...]:
    try:
        names = msgspec.msgpack.decode(data, type=tuple[str, ...])
    except (msgspec.MsgspecError, ValueError) as error:
        raise _malformed(f"the names are no list of strings ({error})") from None
    if not all(map(lt, names, names[1:])):
        raise _malformed("the names are not sorted")
    return names


def _checked_paths(names: tuple[str, ...], counts: bytes, lengths: bytes) -> Paths:
    paths = Paths(names, _from_bytes(counts, np.int32), _from_bytes(lengths, np.int32))
    try:
        paths.check()
    except ValueError as error:
        raise _malformed(str(error)) from None
    return paths


def _checked_attributes(data: bytes) -> bytes:
    try:
        attributes_of(data)
    except ValueError as error:
        raise _malformed(str(error)) from None
    return data


def _to_bytes(column: npt.NDArray[Any], dtype: type[np.generic]) -> bytes:
    return column.astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes()


def _from_bytes(data: bytes, dtype: type[np.generic]) -> npt.NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise _malformed(f"a column of {np.dtype(dtype).name} has {len(data)} bytes")
    return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<"))


def _check(table: StructureTable) -> None:
    n_items, n_dims = len(table.name_ids), int(table.ndims.sum(dtype=np.int64))
    columns = (
        *(table.dtype_ids, table.layout_ids, table.kinds, table.forms),
        *(table.requires_grad, table.ndims, table.replicas),
    )
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
    if n_items and (np.diff(table.name_ids) < 0).any():
        raise _malformed("the items are not sorted by name")
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
    known = ((table.kinds, ItemKind), (table.forms, Form), (table.replicas, Replica))
    if not all(np.isin(column, list(values)).all() for column, values in known):
        raise _malformed("an unknown kind or form of item, or an unknown kind of replica")


def _malformed(what: str) -> ExchangeError:
    return ExchangeError(f"a structure message is malformed: {what}; are all ranks on the same robust_dcp version?")
