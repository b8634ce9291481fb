"""What stock says of a state dict, item by item: the measure of every way to say it faster."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from robust_dcp.plan.structure import Form, ItemKind, ItemStructure
from robust_dcp.storage.records.torch_zip import is_fixed_size, record_template

__all__ = ["stock_items", "stock_planner", "stock_structures"]


def stock_planner(state_dict: dict[str, Any], **options: Any) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(**options)
    planner.set_up_planner(state_dict, is_coordinator=True)
    return planner


def stock_items(planner: DefaultSavePlanner) -> list[WriteItem]:
    """The write items of the state dict that ``planner`` was given."""
    with torch.enable_grad():  # a DTensor's local tensor then has the flag of the DTensor
        return create_default_local_save_plan(planner.state_dict, True).items


def stock_structures(planner: DefaultSavePlanner) -> list[tuple[str, ItemStructure]]:
    """(name, structure) of each, in the order of the state dict."""
    return [(item.index.fqn, _structure(item, planner)) for item in stock_items(planner)]


def _structure(item: WriteItem, planner: DefaultSavePlanner) -> ItemStructure:
    if item.tensor_data is None:
        return ItemStructure(ItemKind.BYTES, Form.VARIABLE)
    properties, chunk = item.tensor_data.properties, item.tensor_data.chunk
    data = planner.lookup_object(item.index)
    template = record_template(properties.dtype, tuple(chunk.sizes))
    is_fixed = isinstance(data, torch.Tensor) and is_fixed_size(data) and template is not None
    return ItemStructure(
        kind=ItemKind.TENSOR if item.type == WriteItemType.TENSOR else ItemKind.SHARD,
        form=Form.FIXED if is_fixed else Form.VARIABLE,
        dtype=str(properties.dtype).split(".")[-1],
        layout=str(properties.layout).split(".")[-1],
        requires_grad=properties.requires_grad,
        shape=tuple(item.tensor_data.size),
        offsets=tuple(chunk.offsets),
        sizes=tuple(chunk.sizes),
    )
