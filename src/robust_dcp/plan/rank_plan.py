"""What one rank has to write, and the message that tells it.

This module turns "these of my items" into "these records at these places". The coordinator does the same for every
rank, so places need not be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.errors import ExchangeError
from robust_dcp.plan.global_plan import GlobalPlan, ascending
from robust_dcp.plan.replica_checks import ReplicaChecks
from robust_dcp.plan.structure import Form, ItemKind, StructureTable
from robust_dcp.plan.structure.ragged import padded, unique_rows
from robust_dcp.storage.layouts import TORCH, ItemColumns, Layout
from robust_dcp.storage.layouts.places import Placements

__all__ = [
    "RankPlan",
    "RankPlanMessage",
    "checks_of",
    "pack_places",
    "pack_some",
    "place_items",
    "place_items_of_all",
    "unpack_places",
]

Places = npt.NDArray[np.intp]


class RankPlanMessage(msgspec.Struct, frozen=True):
    """What the coordinator tells one rank.

    Attributes:
        kept: bits over the rank's items: those that it writes. ``None`` means as in its cached plan.
        common_objects: bits over the rank's items: objects that every rank of the group holds.
        outcome: ``built`` (the coordinator had no plan to start from), ``patched`` (only some ranks had changed and
            sent their structure) or ``rebuilt`` (all ranks had changed).
        reason: why a new plan was made, in words.
        added, removed, changed: the keys of all ranks that differ from the last plan (bounded).
        differing_objects: replicated objects with contents that differ, and the ranks that hold them (bounded).
        replicated, n_classes, contested: as in :class:`~robust_dcp.plan.replica_checks.ReplicaChecks`; bits over the
            rank's items, or empty for none.
    """

    kept: bytes | None
    common_objects: bytes
    outcome: Literal["built", "patched", "rebuilt"]
    reason: str
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: dict[str, str] = {}
    differing_objects: dict[str, tuple[int, ...]] = {}
    replicated: bytes = b""
    n_classes: int = 1
    contested: bytes = b""


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What one rank writes, and where.

    Attributes:
        kept: the places in the rank's table of the items that it writes, ascending.
        common_objects: the places of objects that every rank of the group holds.
        placements: where the kept items go; ``None`` if another writer than ours decides that.
        checks: which replicas are compared with those of other ranks.
    """

    kept: Places
    common_objects: Places
    placements: Placements | None
    checks: ReplicaChecks = field(default_factory=ReplicaChecks)


def pack_places(places: Places, n_items: int) -> bytes:
    """Encode places among ``n_items`` as one bit for each item, little-endian."""
    bits = np.zeros(n_items, dtype=np.bool_)
    bits[places] = True
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_places(bits: bytes, n_items: int) -> Places:
    """The inverse of :func:`pack_places`.

    Raises:
        ExchangeError: ``bits`` are not for ``n_items`` items.
    """
    if len(bits) != (n_items + 7) // 8:
        raise ExchangeError(f"a plan for {len(bits)} x 8 items came for a state dict of {n_items}")
    return np.flatnonzero(np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=n_items, bitorder="little"))


def pack_some(places: Places, n_items: int) -> bytes:
    """As :func:`pack_places`, but no bytes at all if there are no places."""
    return pack_places(places, n_items) if len(places) else b""


def checks_of(replicated: bytes, n_classes: int, contested: bytes, n_items: int) -> ReplicaChecks:
    """Decode what :func:`pack_some` has encoded.

    Raises:
        ExchangeError: the bits are not for ``n_items`` items, or the number of classes is not positive.
    """
    if n_classes < 1:
        raise ExchangeError(f"a plan came with {n_classes} classes of replicas")
    none = np.empty(0, dtype=np.intp)
    return ReplicaChecks(
        replicated=unpack_places(replicated, n_items) if replicated else none,
        n_classes=n_classes,
        contested=unpack_places(contested, n_items) if contested else none,
    )


def place_items(table: StructureTable, kept: Places, *, files: int, layout: Layout = TORCH) -> Placements:
    """The places of a rank's kept items in its files."""
    width = int(table.ndims.max(initial=0))
    items = _items_of(
        table.names,
        table.name_ids[kept],
        table.dtypes,
        table.dtype_ids[kept],
        table.ndims[kept],
        padded(table.offsets, table.ndims, width, fill=0)[kept],
        padded(table.sizes, table.ndims, width, fill=1)[kept],
        is_fixed=(table.forms[kept] == Form.FIXED) & (table.kinds[kept] != ItemKind.BYTES),
    )
    return layout.place(layout.measure(items), files=files)


def place_items_of_all(plan: GlobalPlan, *, files: int, layout: Layout = TORCH) -> tuple[Placements, ...]:
    """:func:`place_items` for every rank of a plan."""
    columns = plan.columns
    rows = ascending(plan.written, len(columns))  # ascending rows are rank after rank
    items = _items_of(
        columns.names,
        columns.name[rows],
        columns.dtypes,
        columns.dtype[rows],
        columns.ndim[rows],
        columns.offset[rows],
        columns.size[rows],
        is_fixed=(columns.form[rows] == Form.FIXED) & (columns.kind[rows] != ItemKind.BYTES),
    )
    measures = layout.measure(items)
    ends = np.cumsum([0, *map(len, plan.kept)])
    # Ranks that write shards of the same sizes have the same places, so compute them once.
    placed: dict[bytes, Placements] = {}
    found = []
    for begin, end in pairwise(ends.tolist()):
        key = measures[begin:end].tobytes()
        if key not in placed:
            placed[key] = layout.place(measures[begin:end], files=files)
        found.append(placed[key])
    return tuple(found)


def _items_of(
    names: Sequence[str],
    name_ids: npt.NDArray[np.int32],
    dtypes: Sequence[str],
    dtype_ids: npt.NDArray[np.int32],
    ndims: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    *,
    is_fixed: npt.NDArray[np.bool_],
) -> ItemColumns:
    """What a layout needs to know about items. Items of one dtype and shape are of one kind."""
    kind_ids = np.full(len(dtype_ids), -1, dtype=np.int32)
    fixed = np.flatnonzero(is_fixed)
    kinds: list[tuple[str, tuple[int, ...]]] = []
    if len(fixed):
        first, kind_ids[fixed] = unique_rows(dtype_ids[fixed], ndims[fixed], *sizes[fixed].T)
        chosen = fixed[first]
        kinds = [
            (dtypes[dtype], tuple(shape[:ndim]))
            for dtype, ndim, shape in zip(
                dtype_ids[chosen].tolist(), ndims[chosen].tolist(), sizes[chosen].tolist(), strict=True
            )
        ]
    return ItemColumns(names, name_ids, kinds, kind_ids, ndims, offsets)
