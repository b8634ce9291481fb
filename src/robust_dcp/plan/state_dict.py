"""The structure of a state dict, and the data of its items.

A save with the same items as one of the last saves reuses its structure. Every name, path and item is compared by
value, so every change is noticed. :class:`StateDictSource` gives the writer the data directly from the state dict's
values, and asks the planner only if a value is not a plain tensor.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from robust_dcp.errors import RobustCheckpointError
from robust_dcp.plan.describe import DescribedItems, ItemData
from robust_dcp.plan.items import (
    ItemKind,
    Items,
    ItemStructure,
    Path,
    items_of,
    sorted_places,
)
from robust_dcp.plan.signature import PlanContext, StructureSignature
from robust_dcp.staging.tensor_bytes import on_cpu
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.writing.item_source import ItemSource, version_of
from robust_dcp.structure_cache import Cache

__all__ = ["KnownStructure", "StateDictSource", "digest_of", "structure_of"]

Expected = tuple[torch.dtype, torch.Size]
Resolved = torch.Tensor | io.BytesIO
_Parts = tuple[list[str], list[ItemStructure], list[Path] | None, tuple[int, ...]]

_CONTEXTS: Final = 8
"""How many signatures one structure keeps. Several groups may save it, or it may be saved with other options."""

_ITEM_NBYTES: Final = 500
"""Roughly how many bytes the lists, names and paths of one item take."""

_PIECE_NBYTES: Final = 16 << 20
"""How many bytes of a device tensor are copied to the host at a time."""


class KnownStructure:
    """The structure of a state dict, and what every save of these items needs.

    Args:
        parts: names, structures and paths of the items in the order of the state dict, and peers.

    Attributes:
        items: the items, sorted.
        order: intp ``[N]``, for each of them its place in the state dict.
        expected: the dtype and local size of each; ``None`` for an object.

    Raises:
        PlanConflict: a name belongs to two items.
    """

    def __init__(self, parts: _Parts) -> None:
        self.parts = parts
        names, structures, paths, peers = parts
        order = sorted_places(names, structures)
        self.items: Items = items_of(
            [names[place] for place in order],
            [structures[place] for place in order],
            None if paths is None else dict(zip(names, paths, strict=True)),
            peers,
        )
        self.order: npt.NDArray[np.intp] = np.array(order, dtype=np.intp)
        expected = {
            each: None if each.kind == ItemKind.BYTES else (getattr(torch, each.dtype), torch.Size(each.sizes))
            for each in set(structures)
        }
        self.expected: list[Expected | None] = [expected[structures[place]] for place in order]
        self._signatures: dict[bytes, StructureSignature] = {}

    def signature(self, context: PlanContext) -> StructureSignature:
        """The signature of the items in ``context``. It is hashed once for each context."""
        key = context.encode()
        signature = self._signatures.get(key)
        if signature is None:
            signature = StructureSignature.of(self.items, context)
            if len(self._signatures) >= _CONTEXTS:
                self._signatures = {}
            self._signatures[key] = signature
        return signature


_STRUCTURES: Final[Cache[KnownStructure, None]] = Cache(
    lambda known, _: sum(column.nbytes for column in known.items.columns) + _ITEM_NBYTES * len(known.order),
    max_nbytes=512 << 20,
)
"""The last structures of this process. All planners share them, because a planner may live for one save only."""


def structure_of(
    described: DescribedItems,
    mappings: Mapping[str, Path] | None,
    peers: tuple[int, ...] = (),
) -> KnownStructure:
    """The structure of these items. It is made if it is not known.

    Args:
        mappings: for each FQN its path in the nested state dict; ``None`` if the planner does not flatten.
        peers: as in :class:`~robust_dcp.plan.items.Items`.

    Raises:
        PlanConflict: a name belongs to two items.
        RobustCheckpointError: a name has no path.
    """
    try:
        paths = None if mappings is None else [mappings[name] for name in described.names]
    except KeyError as missing:
        raise RobustCheckpointError(
            f"the planner's mappings have no path for {missing.args[0]!r}; a planner that adds items to the flattened "
            "state dict must add their paths too, or be made with flatten_state_dict=False"
        ) from None
    parts = (described.names, described.structures, paths, peers)
    found = next((known for known, _ in _STRUCTURES.latest_first() if known.parts == parts), None)
    if found is None:
        found = KnownStructure(parts)
    _STRUCTURES.put(found, None)
    return found


class StateDictSource(ItemSource):
    """The values of a state dict, as items.

    Use it only for a planner with stock's ``lookup_object`` and ``resolve_data`` for tensors, because it does not call
    them if it knows the result. The caller has to switch grad mode off in its thread. Otherwise DTensors would be
    resolved through autograd.

    Args:
        items: the described items.
        structure: the structure of these items.
        kept: the places of the items that are written among ``structure.items``, in plan order.
        lookup: the planner's ``lookup_object``.
        resolve: the planner's ``resolve_data``.
    """

    def __init__(
        self,
        items: DescribedItems,
        structure: KnownStructure,
        kept: npt.NDArray[np.intp],
        lookup: Callable[[MetadataIndex], Resolved],
        resolve: Callable[[WriteItem], Resolved],
    ) -> None:
        self._places: list[int] = structure.order[kept].tolist()
        self._names = items.names
        self._structures = items.structures
        self._data: list[ItemData] = [items.data[place] for place in self._places]
        self._expected: list[Expected | None] = [structure.expected[place] for place in kept.tolist()]
        self.holds_wrappers = DTensor in set(map(type, self._data))
        self._lookup = lookup
        self._resolve = resolve

    def __len__(self) -> int:
        return len(self._places)

    def name(self, place: int) -> str:
        return self._names[self._places[place]]

    def expected(self, place: int) -> Expected | None:
        return self._expected[place]

    def chunk_offset(self, place: int) -> tuple[int, ...]:
        return self._structures[self._places[place]].offsets

    def resolve(self, place: int) -> Resolved:
        data = self._data[place]
        if isinstance(data, MetadataIndex):
            if self._expected[place] is None:
                return self._resolve(WriteItem(index=data, type=WriteItemType.BYTE_IO))
            return self._lookup(data)
        if type(data) is DTensor:
            local: torch.Tensor = data.to_local()
            return local
        return data

    def versions(self, places: Sequence[int]) -> list[int]:
        return [_version_of(self._data[place]) for place in places]


def _version_of(data: ItemData) -> int:
    if type(data) is DTensor:
        # A change of a DTensor counts there only, and a change of its local tensor only here.
        local = version_of(data._local_tensor)
        return -1 if local < 0 else local + data._version
    return -1 if isinstance(data, MetadataIndex) else version_of(data)


def digest_of(data: torch.Tensor | io.BytesIO) -> int:
    """A digest of what would be written for a value. It does not depend on where and how the value lies in memory.

    Equal objects may have different bytes in rare cases (the order of a set of strings). So a difference is a reason
    for a warning, and no proof.

    Returns:
        64 bits. 0 means that the bytes of this kind of tensor cannot be read; no digest is 0.
    """
    if isinstance(data, io.BytesIO):
        return int.from_bytes(hashlib.blake2b(data.getbuffer(), digest_size=8).digest(), "little") or 1
    if type(data) not in (torch.Tensor, torch.nn.Parameter) or data.layout is not torch.strided or data.is_meta:
        return 0
    if data.is_quantized or data.is_nested or data.is_conj() or data.is_neg():
        return 0
    flat = data.detach().reshape(-1)
    checksum = 0
    for piece in flat.split(max(1, _PIECE_NBYTES // flat.element_size())):
        checksum = crc32(on_cpu(piece).contiguous().view(torch.uint8).numpy().data, checksum)
    return 1 << 32 | checksum
