"""The data of the items that this rank writes, straight from the state dict's values.

Owns :class:`StateDictSource`, an ``ItemSource``; asks the planner only where the value is no plain tensor. Made by
``RobustPlanner.source``, called by the engine's threads.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from robust_dcp.plan.state_dict.describe import DescribedItems, ItemData
from robust_dcp.plan.state_dict.known import Expected, KnownStructure

__all__ = ["StateDictSource"]

Resolved = torch.Tensor | io.BytesIO


class StateDictSource:
    """:class:`~robust_dcp.storage.writing.item_source.ItemSource` over the values of a state dict.

    Only for a planner whose ``lookup_object`` and ``resolve_data`` are stock's for tensors: they are not called where
    the outcome is known. Grad mode is the caller's to switch off, since it belongs to the thread: a DTensor would else
    be resolved through autograd.

    Args:
        items: as described.
        structure: of these items.
        kept: places in the table of the items that are written, in plan order.
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
