"""One rank's share of a plan: which of its items it writes, and where.

The coordinator computes the same places for every rank, so places need not be sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from robust_dcp.errors import ExchangeError
from robust_dcp.plan.global_plan import GlobalPlan, ascending
from robust_dcp.plan.structure import Form, ItemKind, StructureTable
from robust_dcp.plan.structure.ragged import padded, unique_rows
from robust_dcp.plan.structure.signature import SIGNATURE_NBYTES
from robust_dcp.storage.layouts import TORCH, ItemColumns, Layout
from robust_dcp.storage.layouts.places import Placements

__all__ = ["Share", "pack_places", "place_items", "place_items_of_all", "plan_id_of", "unpack_places"]

Places = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Share:
    """What one rank writes, and where.

    Attributes:
        plan_id: the identity of the plan, 16 bytes (:func:`plan_id_of`).
        kept: the places in the rank's table of the items that it writes, ascending.
        placements: where the kept items go; ``None`` if another writer than ours decides that.
        total_nbytes: bytes of the files of all ranks, without items of variable size; ``None`` if that is not known.
    """

    plan_id: bytes
    kept: Places
    placements: Placements | None
    total_nbytes: int | None = None


def plan_id_of(
    signatures: Sequence[bytes], kept_bits: Sequence[bytes], placements: Sequence[Placements] | None
) -> bytes:
    """The identity of a plan: a hash of what it was made for and of all that was decided.

    So ranks that have the same identity have made the same decisions, whichever coordinator or version made them.

    Args:
        signatures: the signature of each rank's structure.
        kept_bits: for each rank the items that it writes (:func:`pack_places`).
        placements: for each rank where they go.
    """
    placed: dict[int, bytes] = {}  # many ranks share one object
    digest = hashlib.blake2b(digest_size=SIGNATURE_NBYTES, person=b"rdcp-plan")
    for rank, (signature, bits) in enumerate(zip(signatures, kept_bits, strict=True)):
        digest.update(signature + len(bits).to_bytes(8, "little") + bits)
        if placements is not None:
            places = placements[rank]
            if id(places) not in placed:
                columns = (places.file, places.offset, places.nbytes, np.array(places.head_nbytes, dtype=np.int64))
                own = hashlib.blake2b(digest_size=SIGNATURE_NBYTES)
                for column in columns:
                    own.update(len(column).to_bytes(8, "little") + column.tobytes())
                placed[id(places)] = own.digest()
            digest.update(placed[id(places)])
    return digest.digest()


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
