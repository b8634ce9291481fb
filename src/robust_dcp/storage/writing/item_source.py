"""The interface through which the engine asks for the data of a rank's items.

This module also checks that the data is what was planned, and makes errors name their item. Planners implement the
interface; ``engine``, ``pack`` and ``write_order`` call it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint.planner import WriteItem

from robust_dcp.comm import Stopped
from robust_dcp.errors import PlanConflict, RobustCheckpointError
from robust_dcp.storage.layouts import Frame

__all__ = [
    "BorrowingSource",
    "ItemSource",
    "MadeWhenAsked",
    "NamedErrors",
    "Resolve",
    "WriteItemSource",
    "planned_tensor",
]

Resolve = Callable[[WriteItem], "torch.Tensor | io.BytesIO"]


class ItemSource(Protocol):
    """The items that a rank writes, in plan order. :meth:`resolve` is called from several threads at once."""

    def __len__(self) -> int: ...

    def name(self, place: int) -> str:
        """The FQN of an item, for errors."""

    def expected(self, place: int) -> tuple[torch.dtype, torch.Size] | None:
        """The dtype and local size that the plan gives to a tensor; ``None`` for an object."""

    def chunk_offset(self, place: int) -> tuple[int, ...]:
        """Where a tensor item begins within the tensor of its name; ``()`` for an object."""

    def resolve(self, place: int) -> torch.Tensor | io.BytesIO:
        """The data of an item: a tensor on any device, or an object's bytes. Called once in each save, under
        ``no_grad``.
        """


@runtime_checkable
class BorrowingSource(Protocol):
    """An :class:`ItemSource` that has some of its data only for a while: somebody waits until that is written."""

    @property
    def borrowed(self) -> Sequence[int]:
        """The places of these items. They are written before all others."""

    def give_back(self) -> None:
        """These items have been written: nobody reads their data any more."""


@runtime_checkable
class MadeWhenAsked(Protocol):
    """An :class:`ItemSource` whose data is in memory only from :meth:`~ItemSource.resolve` on. The engine then writes
    one file after the other, because it has at least one item of each file in work in memory.
    """

    is_made_when_asked: bool


class WriteItemSource:
    """:class:`ItemSource` over DCP's write items, as any ``SavePlanner`` gives them.

    Args:
        items: in plan order.
        resolve: ``SavePlanner.resolve_data``.
    """

    def __init__(self, items: Sequence[WriteItem], resolve: Resolve) -> None:
        self._items = items
        self._resolve = resolve

    def __len__(self) -> int:
        return len(self._items)

    def name(self, place: int) -> str:
        return self._items[place].index.fqn

    def expected(self, place: int) -> tuple[torch.dtype, torch.Size] | None:
        planned = self._items[place].tensor_data
        return None if planned is None else (planned.properties.dtype, planned.chunk.sizes)

    def chunk_offset(self, place: int) -> tuple[int, ...]:
        planned = self._items[place].tensor_data
        return () if planned is None else tuple(planned.chunk.offsets)

    def resolve(self, place: int) -> torch.Tensor | io.BytesIO:
        return self._resolve(self._items[place])


def planned_tensor(source: ItemSource, place: int, planned: Frame) -> torch.Tensor:
    """The data of a tensor item, on whatever device it is.

    Raises:
        PlanConflict: the data is not a tensor of the planned dtype and shape.
    """
    data = source.resolve(place)
    if not isinstance(data, torch.Tensor):
        name = source.name(place)
        raise PlanConflict(f"the planner's resolve_data gave {type(data).__name__} for the tensor {name!r}", key=name)
    if data.dtype != planned.dtype or data.shape != planned.shape:
        name = source.name(place)
        raise PlanConflict(
            f"the planner's resolve_data gave {data.dtype} {list(data.shape)} for {name!r}, the plan "
            f"says {planned.dtype} {list(planned.shape)}; a planner that transforms tensors must say so in "
            "create_local_plan",
            key=name,
        )
    return data


class NamedErrors:
    """A ``with`` block that names the current item in each error that leaves the block.

    A loop inside the block moves :attr:`place` on. A block for each item would cost as much as the item itself.

    Args:
        source: knows the names.
        place: the place of the first item.
    """

    __slots__ = ("_source", "place")

    def __init__(self, source: ItemSource, place: int) -> None:
        self._source = source
        self.place = place

    def __enter__(self) -> NamedErrors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # Our own errors name their item already. Ctrl-C and the like are not about an item.
        if isinstance(error, Exception) and not isinstance(error, (RobustCheckpointError, Stopped)):
            name = self._source.name(self.place)
            raise RobustCheckpointError(f"cannot save {name!r}: {type(error).__name__}: {error}") from error
