"""The structure of one rank's state dict as columns: which items there are to save, without their contents.

This module owns the table and its order. It never looks at tensor data, other ranks or files. The planner makes the
table from what it knows of each item (:func:`table_of`); ``signature`` hashes it, ``diff`` compares it, and ``message``
sends it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from robust_dcp.errors import PlanConflict
from robust_dcp.plan.structure.attributes import NO_ATTRIBUTES
from robust_dcp.plan.structure.paths import Path, Paths

__all__ = ["Form", "ItemKind", "ItemStructure", "Replica", "StructureTable", "sorted_places", "table_of"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]


class ItemKind(IntEnum):
    """The kinds of ``torch.distributed.checkpoint.planner.WriteItemType``."""

    TENSOR = 1
    SHARD = 2
    BYTES = 3


class Form(IntEnum):
    """How an item is stored: in a record of a length that follows from the structure, or in bytes of any length."""

    FIXED = 0
    VARIABLE = 1


class Replica(IntEnum):
    """Which of the ranks that hold a chunk may write it.

    In plain DCP replicas are equal by contract, so any rank may write. Megatron's callers say which replica counts
    (``replica_id`` 0), because the others may have drifted from it.
    """

    ANY = 0
    MAIN = 1
    COPY = 2


class ItemStructure(NamedTuple):
    """What an item is, without its name. Many items of a state dict share one structure.

    Attributes:
        kind, form: see :class:`ItemKind` and :class:`Form`.
        dtype, layout: for example ``"float32"`` and ``"strided"``; ``""`` for items that are not tensors.
        requires_grad: the flag of the tensor.
        shape, offsets, sizes: the global size, and the offsets and sizes of the chunk; ``()`` for objects.
        replica: whether this rank may write the item.
    """

    kind: ItemKind
    form: Form
    dtype: str = ""
    layout: str = ""
    requires_grad: bool = False
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    replica: Replica = Replica.ANY


@dataclass(frozen=True, eq=False)
class StructureTable:
    """Columns over the N items of one rank, sorted by (name, offsets).

    Strings are in sorted tables of their own, and the columns hold places in these tables. So two state dicts that
    differ only in the order of their keys have equal tables.

    Attributes:
        names: the distinct FQNs, sorted.
        paths: for each name its path in the nested state dict; ``None`` if the planner does not flatten.
        dtypes: the distinct dtypes, for example ``"float32"``, sorted; ``""`` for items that are not tensors.
        layouts: the distinct layouts, for example ``"strided"``, sorted; ``""`` for items that are not tensors.
        name_ids, dtype_ids, layout_ids: int32 ``[N]``, places in the tables above.
        kinds: uint8 ``[N]``, :class:`ItemKind`.
        forms: uint8 ``[N]``, :class:`Form`.
        requires_grad: uint8 ``[N]``.
        ndims: uint8 ``[N]``, the number of dimensions of each item.
        replicas: uint8 ``[N]``, :class:`Replica`.
        shapes, offsets, sizes: int64 ``[sum(ndims)]``, the global size, and the offsets and sizes of the chunk, item
            after item.
        attributes: what the planner adds to ``Metadata``, encoded by :func:`~.attributes.encode_attributes`.
        peers: the global ranks that may write copies of each other's main replicas. ``()`` means only this rank.
    """

    names: tuple[str, ...]
    paths: Paths | None
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    name_ids: Int32
    dtype_ids: Int32
    layout_ids: Int32
    kinds: UInt8
    forms: UInt8
    requires_grad: UInt8
    ndims: UInt8
    replicas: UInt8
    shapes: Int64
    offsets: Int64
    sizes: Int64
    attributes: bytes = NO_ATTRIBUTES
    peers: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.name_ids)

    @property
    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """The columns over items, in the order of the attributes."""
        return (
            self.name_ids,
            self.dtype_ids,
            self.layout_ids,
            self.kinds,
            self.forms,
            self.requires_grad,
            self.ndims,
            self.replicas,
            self.shapes,
            self.offsets,
            self.sizes,
        )

    @cached_property
    def starts(self) -> Int64:
        """int64 ``[N + 1]``: item ``i`` has entries ``starts[i]:starts[i + 1]`` of the ragged columns."""
        return np.concatenate(([0], np.cumsum(self.ndims, dtype=np.int64)))

    @cached_property
    def identities(self) -> npt.NDArray[np.uint64]:
        """uint64 ``[N]``: a hash of each item's name and offsets, the same on every rank that holds the chunk."""
        names = [hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest() for name in self.names]
        identity = np.frombuffer(b"".join(names), dtype="<u8")[self.name_ids]
        for dim in range(int(self.ndims.max(initial=0))):
            has = self.ndims > dim
            offsets = self.offsets[self.starts[:-1][has] + dim].astype(np.uint64)
            mixed = (identity[has] ^ offsets) * np.uint64(0x9E3779B97F4A7C15)
            identity[has] = mixed ^ (mixed >> np.uint64(29))
        return identity

    def taken(self, items: npt.NDArray[np.intp]) -> StructureTable:
        """The table of only the items at ``items``, which ascend. It has no ``attributes``."""
        if not len(items):
            return _NO_ITEMS
        is_taken = np.zeros(len(self), dtype=np.bool_)
        is_taken[items] = True
        entries = np.repeat(is_taken, self.ndims)
        names, name_ids = np.unique(self.name_ids[items], return_inverse=True)
        return StructureTable(
            names=tuple(map(self.names.__getitem__, names.tolist())),
            paths=None if self.paths is None else self.paths.taken(names.astype(np.intp)),
            dtypes=self.dtypes,
            layouts=self.layouts,
            name_ids=name_ids.astype(np.int32),
            dtype_ids=self.dtype_ids[items],
            layout_ids=self.layout_ids[items],
            kinds=self.kinds[items],
            forms=self.forms[items],
            requires_grad=self.requires_grad[items],
            ndims=self.ndims[items],
            replicas=self.replicas[items],
            shapes=self.shapes[entries],
            offsets=self.offsets[entries],
            sizes=self.sizes[entries],
            peers=self.peers,
        )

    def dims_of(self, item: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """(global size, chunk offsets, chunk sizes) of one item."""
        span = slice(int(self.starts[item]), int(self.starts[item + 1]))
        return (
            tuple(self.shapes[span].tolist()),
            tuple(self.offsets[span].tolist()),
            tuple(self.sizes[span].tolist()),
        )

    def describe_whole(self, item: int) -> str:
        """Describe in words the tensor that an item belongs to. This text must be the same on all ranks."""
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
        """Describe one item in words, for errors and differences."""
        text = self.describe_whole(item)
        if self.kinds[item] == ItemKind.SHARD:
            shape, offsets, sizes = self.dims_of(item)
            is_whole = sizes == shape and not any(offsets)
            text += " as one shard" if is_whole else f" chunk at {list(offsets)} of size {list(sizes)}"
        if self.replicas[item] != Replica.ANY:
            text += " (main replica)" if self.replicas[item] == Replica.MAIN else " (other replica)"
        return text

    def describe_path(self, item: int) -> str:
        if self.paths is None:
            return ""
        return "/".join(repr(part) for part in self.paths[int(self.name_ids[item])])


def sorted_places(names: Sequence[str], items: Sequence[ItemStructure]) -> list[int]:
    """The order of the table: the places of the items, sorted by (name, offsets)."""
    return sorted(range(len(names)), key=lambda place: (names[place], items[place].offsets))


def table_of(
    names: Sequence[str],
    items: Sequence[ItemStructure],
    paths: Mapping[str, Path] | None = None,
    attributes: bytes = NO_ATTRIBUTES,
    peers: tuple[int, ...] = (),
) -> StructureTable:
    """The table of one rank's items.

    Args:
        names: the FQN of each item, in the order of :func:`sorted_places`.
        items: the structure of each item.
        paths: for each FQN its path in the nested state dict; ``None`` if the planner does not flatten.
        attributes, peers: as in :class:`StructureTable`.

    Raises:
        PlanConflict: two items have the same name and offsets, or a name belongs to a tensor and to an object.
    """
    _refuse_duplicates(names, items)
    distinct_names = tuple(dict.fromkeys(names))
    name_place = {name: place for place, name in enumerate(distinct_names)}
    distinct = {item: place for place, item in enumerate(dict.fromkeys(items))}
    which = np.fromiter(map(distinct.__getitem__, items), dtype=np.intp, count=len(items))
    dtypes = tuple(sorted({item.dtype for item in distinct}))
    layouts = tuple(sorted({item.layout for item in distinct}))
    ndims = np.array([len(item.shape) for item in distinct], dtype=np.uint8)[which] if distinct else _empty(np.uint8)

    def column(values: Sequence[int], dtype: type[np.generic]) -> npt.NDArray[Any]:
        return np.array(values, dtype=dtype)[which] if values else _empty(dtype)

    shapes, offsets, sizes = (
        (
            _ragged(values, which, ndims)
            for values in zip(*((item.shape, item.offsets, item.sizes) for item in distinct), strict=True)
        )
        if distinct
        else (_empty(np.int64), _empty(np.int64), _empty(np.int64))
    )
    return StructureTable(
        names=distinct_names,
        paths=None if paths is None else Paths.of(distinct_names, [paths[name] for name in distinct_names]),
        dtypes=dtypes,
        layouts=layouts,
        name_ids=np.fromiter(map(name_place.__getitem__, names), dtype=np.int32, count=len(names)),
        dtype_ids=column([dtypes.index(item.dtype) for item in distinct], np.int32),
        layout_ids=column([layouts.index(item.layout) for item in distinct], np.int32),
        kinds=column([item.kind for item in distinct], np.uint8),
        forms=column([item.form for item in distinct], np.uint8),
        requires_grad=column([item.requires_grad for item in distinct], np.uint8),
        ndims=ndims,
        replicas=column([item.replica for item in distinct], np.uint8),
        shapes=shapes,
        offsets=offsets,
        sizes=sizes,
        attributes=attributes,
        peers=peers,
    )


def _empty(dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.empty(0, dtype=dtype)


def _ragged(values: Sequence[tuple[int, ...]], which: npt.NDArray[np.intp], ndims: UInt8) -> Int64:
    """Concatenate ``values[w]`` for each ``w`` in ``which``."""
    width = max(map(len, values))
    rows = np.zeros((len(values), width), dtype=np.int64)
    for row, value in enumerate(values):
        rows[row, : len(value)] = value
    return rows[which][np.arange(width) < ndims[:, None]]


def _refuse_duplicates(names: Sequence[str], items: Sequence[ItemStructure]) -> None:
    for place, (left, right) in enumerate(pairwise(names)):
        if left != right:
            continue
        one, other = items[place], items[place + 1]
        are_objects = ItemKind.BYTES in (one.kind, other.kind)
        if one.offsets == other.offsets or one.kind != other.kind:
            at = "" if are_objects else f" at offset {list(one.offsets)}"
            raise PlanConflict(
                f"the local plan names {left!r}{at} twice (as {one.kind.name} and as {other.kind.name}); "
                "each item of a state dict needs a name of its own: rename one of them",
                key=left,
            )


_NO_ITEMS: Final = table_of([], [])
