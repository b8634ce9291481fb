"""What one rank has to write, and the message that tells it.

Owns the step from "these of my items" to "these records at these places"; the coordinator takes the same step for
every rank, so that places need not travel.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.errors import ExchangeError
from robust_dcp.plan.structure import Form, ItemKind, StructureTable
from robust_dcp.storage.layout import Placements, place_records
from robust_dcp.storage.torch_zip import record_template

__all__ = ["RankPlan", "RankPlanMessage", "pack_places", "place_items", "unpack_places"]

Places = npt.NDArray[np.intp]


class RankPlanMessage(msgspec.Struct, frozen=True):
    """The coordinator's word to one rank.

    Attributes:
        kept: bits over the rank's items: those it writes. ``None``: as in the plan that it has cached.
        common_objects: bits over the rank's items: objects that every rank of the group holds.
        reason: why the plan was made anew, in words.
        added, removed, changed: the keys that differ from the last plan, over all ranks (bounded).
        differing_objects: replicated objects whose contents differ, with the ranks that hold them (bounded).
    """

    kept: bytes | None
    common_objects: bytes
    reason: str
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: dict[str, str] = {}
    differing_objects: dict[str, tuple[int, ...]] = {}


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What one rank writes, and where.

    Attributes:
        kept: places in the rank's table of the items that it writes, ascending.
        common_objects: places of objects that every rank of the group holds.
        placements: where the kept items lie, or ``None`` where another writer than ours decides that.
    """

    kept: Places
    common_objects: Places
    placements: Placements | None


def pack_places(places: Places, n_items: int) -> bytes:
    """Places among ``n_items`` as a bit for each item, little-endian."""
    bits = np.zeros(n_items, dtype=np.bool_)
    bits[places] = True
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_places(bits: bytes, n_items: int) -> Places:
    """The inverse of :func:`pack_places`.

    Raises:
        ExchangeError: if ``bits`` are not for ``n_items``.
    """
    if len(bits) != (n_items + 7) // 8:
        raise ExchangeError(f"a plan for {len(bits)} x 8 items came for a state dict of {n_items}")
    return np.flatnonzero(np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=n_items, bitorder="little"))


def place_items(table: StructureTable, kept: Places, *, files: int) -> Placements:
    """The places of a rank's kept items in its files."""
    header = np.zeros(len(kept), dtype=np.int64)
    payload = np.zeros(len(kept), dtype=np.int64)
    record = np.full(len(kept), -1, dtype=np.int64)
    dtypes = [getattr(torch, name) if name else None for name in table.dtypes]
    fixed = np.flatnonzero((table.forms[kept] == Form.FIXED) & (table.kinds[kept] != ItemKind.BYTES))
    items, sizes = kept[fixed], table.sizes.tolist()
    for n, dtype_id, start, end in zip(
        fixed.tolist(),
        table.dtype_ids[items].tolist(),
        table.starts[items].tolist(),
        table.starts[items + 1].tolist(),
        strict=True,
    ):
        dtype = dtypes[dtype_id]
        template = record_template(dtype, tuple(sizes[start:end]))
        if template is None:
            raise TypeError(f"items of {dtype} are not of fixed size")
        header[n], payload[n], record[n] = template.header_nbytes, template.payload_nbytes, template.nbytes
    return place_records(record, header, payload, files=files)
