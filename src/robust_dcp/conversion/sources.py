"""What is converted: a checkpoint of any kind, or one file of ``torch.save``. Nothing in it is executed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from robust_dcp.conversion.outline import Outline, Path
from robust_dcp.conversion.torch_file import TorchFile
from robust_dcp.storage.pieces import NamedTensor, Piece, PieceReader
from robust_dcp.storage.records.objects import load_object

__all__ = ["OUTLINE_ATTRIBUTE", "Source", "open_source"]

OUTLINE_ATTRIBUTE: Final = "robust_dcp_outline"
"""The attribute of a checkpoint's ``Metadata`` that holds an outline, as the bytes of ``torch.save``."""


class Source(Protocol):
    """What is converted.

    Attributes:
        tensors: by name, in order.
        objects: the names of other items.
        paths: the keys of items in the nested state dict, where they are known.
        outline: how items are nested, where more is known of it than the paths.
    """

    tensors: dict[str, NamedTensor]
    objects: tuple[str, ...]
    paths: dict[str, Path]
    outline: Outline | None

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """The data of pieces. Their tensors have the names, dtypes and shapes of :attr:`tensors`."""

    def load(self, name: str) -> Any:
        """An object."""


def open_source(path: str, buffer_nbytes: int) -> Source:
    """Open what is to be converted.

    Raises:
        StorageError, CorruptCheckpoint, UnsafeCheckpoint: it cannot be read, or is no data.
    """
    return TorchFile(path) if os.path.isfile(path) else _Checkpoint(path, buffer_nbytes)


class _Checkpoint:
    def __init__(self, path: str, buffer_nbytes: int) -> None:
        self._path = path
        self._reader = PieceReader(path, buffer_nbytes=buffer_nbytes)
        metadata = self._reader.metadata
        self.tensors = self._reader.tensors
        self.objects = tuple(name for name in metadata.state_dict_metadata if name not in self.tensors)
        paths = metadata.planner_data or {}  # a dict, or an index, which looks paths up one by one
        self.paths = {name: paths[name] for name in metadata.state_dict_metadata if name in paths}
        outline = getattr(metadata, OUTLINE_ATTRIBUTE, None)
        self.outline = load_object(outline, file=path, item=OUTLINE_ATTRIBUTE) if outline else None

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        return self._reader.read(pieces)

    def load(self, name: str) -> Any:
        return load_object(self._reader.object_bytes(name), file=self._path, item=name)
