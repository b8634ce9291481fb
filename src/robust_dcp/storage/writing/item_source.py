"""The interface through which the engine asks for the data of a rank's items.

This module also checks that the data is what was planned, and makes errors name their item. Planners implement the
interface.
"""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch.distributed.checkpoint.planner import WriteItem

from robust_dcp.comm import Stopped
from robust_dcp.errors import PlanConflict, RobustCheckpointError
from robust_dcp.staging.blocks import on_cpu
from robust_dcp.staging.staging_buffers import TensorForm
from robust_dcp.storage.records.record import Record

Resolve = Callable[[WriteItem], "torch.Tensor | io.BytesIO"]


@dataclass(eq=False)
class ItemSource:
    """The items that a rank writes, in plan order. :meth:`resolve` is called from several threads at once.

    Attributes:
        names: the FQN of each item.
        expected: the dtype and local size that the plan gives to each tensor; ``None`` for an object.
        offsets: where each tensor item begins within the tensor of its name; ``()`` for an object.
        borrowed: the places of items that it has only for a while: somebody waits until they are written. They are
            written before all others.
        holds_wrappers: whether some of its tensors are parts of others, such as DTensors. Changes of these do not count
            in the parts.
    """

    names: Sequence[str]
    expected: Sequence[TensorForm | None]
    offsets: Sequence[tuple[int, ...]]
    borrowed: Sequence[int] = field(default=(), init=False)
    holds_wrappers: bool = field(default=False, init=False)

    def __len__(self) -> int:
        return len(self.names)

    def resolve(self, place: int) -> torch.Tensor | io.BytesIO:
        """The data of an item: a tensor on any device, or an object's bytes. Called once in each save, under
        ``no_grad``.
        """
        raise NotImplementedError

    def versions(self, places: Sequence[int]) -> list[int]:
        """For each item a number that grows with each change of its tensor in place; -1 if that is not known."""
        return [-1] * len(places)

    def give_back(self) -> None:
        """The borrowed items have been written: nobody reads their data any more."""
        return


def changed(source: ItemSource, place: int) -> PlanConflict:
    """The error for an item that was changed while it was saved."""
    name = source.names[place]
    return PlanConflict(
        f"{name!r} was changed while it was saved, so what was written is no state that it ever had: a side thread or "
        "a hook works on it; let that wait until the save has returned, or save a copy",
        key=name,
    )


class WriteItemSource(ItemSource):
    """:class:`ItemSource` over DCP's write items, as any ``SavePlanner`` gives them.

    Args:
        items: in plan order.
        resolve: ``SavePlanner.resolve_data``.
    """

    def __init__(self, items: Sequence[WriteItem], resolve: Resolve) -> None:
        planned = [item.tensor_data for item in items]
        super().__init__(
            [item.index.fqn for item in items],
            [None if each is None else (each.properties.dtype, each.chunk.sizes) for each in planned],
            [() if each is None else tuple(each.chunk.offsets) for each in planned],
        )
        self._items = items
        self._resolve = resolve
        # By weak references, so that a planner's own copies go as soon as they are written.
        self._resolved: dict[int, weakref.ref[torch.Tensor]] = {}

    def resolve(self, place: int) -> torch.Tensor | io.BytesIO:
        data = self._resolve(self._items[place])
        if isinstance(data, torch.Tensor):
            self._resolved[place] = weakref.ref(data)
        return data

    def versions(self, places: Sequence[int]) -> list[int]:
        resolved = [self._resolved.get(place) for place in places]
        return [-1 if found is None else version_of(found()) for found in resolved]


def version_of(tensor: torch.Tensor | None) -> int:
    """How often a tensor was changed in place; -1 if torch does not count that."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def planned_tensor(source: ItemSource, place: int, planned: Record) -> torch.Tensor:
    """The data of a tensor item, on whatever device it is.

    Raises:
        PlanConflict: the data is not a tensor of the planned dtype and shape.
    """
    data = source.resolve(place)
    if not isinstance(data, torch.Tensor):
        name = source.names[place]
        raise PlanConflict(f"the planner's resolve_data gave {type(data).__name__} for the tensor {name!r}", key=name)
    if data.dtype != planned.dtype or data.shape != planned.shape:
        name = source.names[place]
        raise PlanConflict(
            f"the planner's resolve_data gave {data.dtype} {list(data.shape)} for {name!r}, the plan "
            f"says {planned.dtype} {list(planned.shape)}; a DTensor of from_local has to have the shape that its "
            "placements give; a planner that derives from RobustPlanner transforms tensors in set_up_planner, and "
            "another one says so in create_local_plan",
            key=name,
        )
    return data


def saved_by_torch(tensor: torch.Tensor) -> io.BytesIO:
    """The record of a tensor that dtype, shape and data do not describe fully."""
    tensor = on_cpu(tensor.detach())
    if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save would write all of a larger shared storage
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer


def raise_named(error: Exception, source: ItemSource, place: int) -> NoReturn:
    """Raise ``error`` with the name of the item at which it happened. Our own errors name their item already."""
    if isinstance(error, (RobustCheckpointError, Stopped)):
        raise error
    name = source.names[place]
    raise RobustCheckpointError(f"cannot save {name!r}: {type(error).__name__}: {error}") from error
