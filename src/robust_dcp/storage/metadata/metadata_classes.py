"""The classes that a ``.metadata`` file may hold, whichever version of torch or Megatron-Core wrote it.

This module knows what differs between versions: names that moved, private names (used if this torch has them), and
states that grew. Only ``metadata_file`` calls it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan

from robust_dcp.storage.records.unpickling import all_of

__all__ = ["METADATA_CLASSES", "METADATA_STAND_INS", "StorageInfo", "reduce_tensor_properties"]

StorageInfo: Any = filesystem._StorageInfo
"""DCP's storage info of an item: ``StorageInfo(relative_path, offset, length)``.

The class is private in torch, but part of the file format: every ``.metadata`` since torch 2.0 names it.
"""

METADATA_CLASSES: Final = (
    all_of(
        "torch.distributed.checkpoint.metadata",
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorStorageMetadata",
    )
    # Megatron-Core keeps the ranks' plans in the metadata to compare later saves with them.
    | all_of(
        "torch.distributed.checkpoint.planner",
        "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
    )
    | all_of("torch.distributed.checkpoint.filesystem", "_StorageInfo _StoragePrefix")
    | all_of("torch.distributed.checkpoint._hf_utils", "_HFStorageInfo")
    | all_of("torch", "Size")
)


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
    """The result of torch's ``_MEM_FORMAT_ENCODING(encoding)``."""
    return _MEMORY_FORMATS[encoding]


def _layout(name: str) -> torch.layout:
    """The result of ``torch.serialization._get_layout(name)``: the layout of that name, for example
    ``torch.strided``.
    """
    layout = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(layout, torch.layout):
        raise ValueError(f"{name[:60]!r} is not a layout")
    return layout


class _MCoreMetadata(Metadata):
    """Stands in for Megatron-Core's class in its older checkpoints: becomes a ``Metadata`` with more attributes."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__class__ = Metadata  # type: ignore[assignment]


class _MCoreSavePlan(SavePlan):
    """Stands in for Megatron-Core's class: becomes a ``SavePlan`` with more attributes."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        object.__setattr__(self, "__class__", SavePlan)  # because SavePlan is frozen


def _stand_ins() -> Mapping[tuple[str, str], Any]:
    # The first home of TensorProperties, up to torch 2.2, and the present one.
    homes = ("torch.distributed._shard.sharded_tensor.metadata", "torch.distributed.checkpoint.metadata")
    megatron = "megatron.core.dist_checkpointing.strategies.torch"
    # storage_meta holds the path that the writer was given. It says where the checkpoint once was, on any system, and
    # nothing opens it. From Python 3.13 on, pathlib pickles its classes under another name.
    paths: dict[str, type[PurePath]] = {"PosixPath": PurePosixPath, "WindowsPath": PureWindowsPath}
    paths |= {"PurePosixPath": PurePosixPath, "PureWindowsPath": PureWindowsPath}
    return {
        **{(home, "TensorProperties"): _PortableTensorProperties for home in homes},
        **{(home, name): _memory_format for home in homes for name in ("MEM_FORMAT_ENCODING", "_MEM_FORMAT_ENCODING")},
        ("torch.serialization", "_get_layout"): _layout,
        **{(module, name): path for module in ("pathlib", "pathlib._local") for name, path in paths.items()},
        (megatron, "MCoreMetadata"): _MCoreMetadata,
        (megatron, "MCoreSavePlan"): _MCoreSavePlan,
    }


METADATA_STAND_INS: Final = _stand_ins()


def reduce_tensor_properties(properties: TensorProperties) -> tuple[Any, ...]:
    """Pickle ``properties`` with the five values that every torch can read, even if this torch would write more."""
    reduced: Any = properties.__reduce_ex__(4)
    function, arguments, state = reduced[:3]
    return function, arguments, tuple(state[:5])
