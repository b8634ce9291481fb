"""Classes of ``torch.distributed`` that are data: those of a ``.metadata``, and the placements of DTensors.

A ``.metadata`` of any torch from 2.0 on is read by any other. So where the form of a class has changed, an object is
made by a class of ours that takes every form of the state, and then becomes what it stands for.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import suppress
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from robust_dcp.storage.records.kinds import Budget, Builder, Pending, Trusted, exactly, expect, set_attributes

_CLASSES: Final = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorStorageMetadata"
    ),
    # Megatron-Core keeps the ranks' plans in the metadata to compare later saves with them.
    "torch.distributed.checkpoint.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint._hf_utils": "_HFStorageInfo",
}
"""Dataclasses of DCP, by their module. They have no code that runs when an object is made, except that torch 2.8 and
newer give ``_StorageInfo`` a ``__getstate__`` for the way out."""


class _PortableTensorProperties(TensorProperties):
    """Becomes a plain ``TensorProperties`` once it has its state, whatever the length of the state.

    torch 2.14 and older write five values, later versions may write more, and each refuses the other's.
    """

    def __setstate__(self, state: Any) -> None:
        self.dtype, self.layout, self.requires_grad, self.memory_format, self.pin_memory = state[:5]
        for place, field in enumerate(dataclasses.fields(TensorProperties)[5:], start=5):
            setattr(self, field.name, state[place] if place < len(state) else field.default)
        self.__class__ = TensorProperties  # type: ignore[assignment]


_MEMORY_FORMATS: Final = (torch.contiguous_format, torch.channels_last, torch.preserve_format)


def _memory_format(encoding: int) -> torch.memory_format:
    """The result of torch's ``_MEM_FORMAT_ENCODING``."""
    return _MEMORY_FORMATS[encoding]


def _stand_in_for(kind: Any) -> Any:
    """Stands in for a class of Megatron-Core in its older checkpoints: becomes a ``kind`` with more attributes."""

    def set_state(self: Any, state: Any) -> None:
        set_attributes(self, state)
        object.__setattr__(self, "__class__", kind)  # a SavePlan is frozen

    return type(kind.__name__, (kind,), {"__setstate__": set_state})


_MCORE_METADATA: Final = _stand_in_for(Metadata)
_MCORE_SAVE_PLAN: Final = _stand_in_for(SavePlan)


def _made_as(kind: Any) -> Trusted:
    """An object of ``kind`` without code of the class. Only the classes of ours have a ``__setstate__``."""
    fill = getattr(kind, "__setstate__", set_attributes)
    return Trusted(new=exactly(lambda: object.__new__(kind), (), of=f"a {kind.__name__}"), fill=fill, as_native=kind)


def _placement(kind: Any, **fields: type) -> Trusted:
    """A placement of a DTensor, made from its fields: ``Shard(dim=0)``. It is written in C++ since torch 2.10."""

    def complete(state: Any, _: Budget) -> Any:
        is_right = type(state) is dict and {name: type(value) for name, value in state.items()} == fields
        expect(is_right, f"the state of a {kind.__name__} is not {', '.join(fields) or 'empty'}")
        return kind(**state)

    new: Builder = exactly(lambda: Pending(complete) if fields else kind(), (), of=f"a {kind.__name__}")
    return Trusted(new=new, fill=lambda _, state: expect(not state, f"a {kind.__name__} has a state"))


with suppress(ImportError):  # a torch that has no files of Hugging Face
    import torch.distributed.checkpoint._hf_utils

_OF_DCP: Final = {
    (module, name): vars(sys.modules[module])[name]
    for module, names in _CLASSES.items()
    for name in names.split()
    if name in vars(sys.modules.get(module, object))
}

TRUSTED: Final[dict[Any, Trusted]] = {
    **{kind: _made_as(kind) for kind in (*_OF_DCP.values(), _MCORE_METADATA, _MCORE_SAVE_PLAN)},
    TensorProperties: _made_as(_PortableTensorProperties),
    _PortableTensorProperties: _made_as(_PortableTensorProperties),
    _memory_format: Trusted(exactly(_memory_format, (int,)), makes_constants=True),
    Shard: _placement(Shard, dim=int),
    _StridedShard: _placement(_StridedShard, dim=int, split_factor=int),
    Replicate: _placement(Replicate),
    Partial: _placement(Partial, reduce_op=str),
}

# The first home of TensorProperties, up to torch 2.2, and the present one.
_HOMES: Final = ("torch.distributed._shard.sharded_tensor.metadata", "torch.distributed.checkpoint.metadata")
_MEGATRON: Final = "megatron.core.dist_checkpointing.strategies.torch"

NAMED: Final[dict[tuple[str, str], Any]] = {
    **_OF_DCP,
    **{(home, "TensorProperties"): TensorProperties for home in _HOMES},
    **{(home, f"{mark}MEM_FORMAT_ENCODING"): _memory_format for home in _HOMES for mark in ("", "_")},
    (_MEGATRON, "MCoreMetadata"): _MCORE_METADATA,
    (_MEGATRON, "MCoreSavePlan"): _MCORE_SAVE_PLAN,
}
"""Names of classes and functions besides their own: those that they had, and of what they stand for."""
