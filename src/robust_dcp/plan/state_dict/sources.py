"""The data of the items that this rank writes, taken directly from the state dict's values.

:class:`StateDictSource` is an ``ItemSource``. It asks the planner only if a value is not a plain tensor.
``RobustPlanner.source`` makes it, and the engine's threads call it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from robust_dcp.plan.state_dict.describe import DescribedItems, ItemData
from robust_dcp.plan.state_dict.known import Expected, KnownStructure
from robust_dcp.storage.writing.item_source import version_of

__all__ = ["StateDictSource"]

Resolved = torch.Tensor | io.BytesIO


class StateDictSource:
    """An :class:`~robust_dcp.storage.writing.item_source.ItemSource` over the values of a state dict.

    Use it only for a planner with stock's ``lookup_object`` and ``resolve_data`` for tensors, because it does not call
    them if it knows the result. The caller has to switch grad mode off in its thread. Otherwise DTensors would be
    resolved through autograd.

    Args:
        items: the described items.
        structure: the structure of these items.
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
