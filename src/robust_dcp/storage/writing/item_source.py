"""Where the data of a rank's items comes from, as the engine asks for it.

Owns the interface between planners and the engine, the check that what comes is what was planned, and how an error
names the item it is about. Implemented by planners; called by ``engine``, ``pack`` and ``write_order``.
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

__all__ = ["BorrowingSource", "ItemSource", "NamedErrors", "Resolve", "WriteItemSource", "planned_tensor"]

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
        """The data of an item: a tensor on any device, or an object's bytes. Called once a save, without grad mode."""


@runtime_checkable
class BorrowingSource(Protocol):
    """An :class:`ItemSource` that has some of its data only for a while: somebody waits until it is written."""

    @property
    def borrowed(self) -> Sequence[int]:
        """Places of these items, which are written before all others."""

    def give_back(self) -> None:
        """They have been written: nobody reads their data any more."""


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
        PlanConflict: it is not a tensor of the planned dtype and shape.
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
    """A ``with`` block in which whatever goes wrong names the item in hand.

    A loop within moves :attr:`place` on: a block for each item would cost as much as the item does.

    Args:
        source: knows the names.
        place: of the item in hand at first.
    """

    __slots__ = ("_source", "place")

    def __init__(self, source: ItemSource, place: int) -> None:
        self._source = source
        self.place = place

    def __enter__(self) -> NamedErrors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # Ours say what they are about; what is no Exception (an interrupt) is about no item.
        if isinstance(error, Exception) and not isinstance(error, (RobustCheckpointError, Stopped)):
            name = self._source.name(self.place)
            raise RobustCheckpointError(f"cannot save {name!r}: {type(error).__name__}: {error}") from error
