"""DCP's ``WriteItem`` and our ``ItemStructure``, one made from the other.

Owns which fields of the one stand for which of the other. Called by ``describe`` for values that only stock can
describe, and by ``save`` for stock's hooks, which hand write items to storage writers.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from robust_dcp.plan.structure import Form, ItemKind, ItemStructure

__all__ = ["structure_of", "write_item_of"]

_KINDS = {
    WriteItemType.TENSOR: ItemKind.TENSOR,
    WriteItemType.SHARD: ItemKind.SHARD,
    WriteItemType.BYTE_IO: ItemKind.BYTES,
}
_TYPES = {kind: item_type for item_type, kind in _KINDS.items()}


def structure_of(item: WriteItem, form: Form) -> ItemStructure:
    """What ``item`` says, but for its name."""
    data = item.tensor_data
    if data is None:
        return ItemStructure(kind=_KINDS[item.type], form=form)
    return ItemStructure(
        kind=_KINDS[item.type],
        form=form,
        dtype=str(data.properties.dtype).removeprefix("torch."),
        layout=str(data.properties.layout).removeprefix("torch."),
        requires_grad=bool(data.properties.requires_grad),
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
    )


def write_item_of(index: MetadataIndex, structure: ItemStructure) -> WriteItem:
    """The write item of ``structure``, as stock's planner makes it.

    ``pin_memory`` and ``memory_format`` of its properties, which torch has deprecated and no reader looks at, are the
    defaults.
    """
    if structure.kind == ItemKind.BYTES:
        return WriteItem(index=index, type=WriteItemType.BYTE_IO)
    return WriteItem(
        index=index,
        type=_TYPES[structure.kind],
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(structure.offsets), sizes=torch.Size(structure.sizes)),
            properties=TensorProperties(
                dtype=getattr(torch, structure.dtype),
                layout=getattr(torch, structure.layout),
                requires_grad=structure.requires_grad,
            ),
            size=torch.Size(structure.shape),
        ),
    )
