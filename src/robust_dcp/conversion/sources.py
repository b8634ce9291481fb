"""What is converted: a checkpoint of any kind, or one file of ``torch.save``.

Nothing in it is executed. A checkpoint is read in pieces and compared with its checksums. A file of ``torch.save`` is
mapped into memory, by ``torch.load(weights_only=True, mmap=True)``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.pieces import NamedTensor, Piece, PieceReader
from robust_dcp.storage.records.objects import load_object

__all__ = ["Path", "Source", "open_source"]

Path = tuple[str | int, ...]
"""The keys of an item in the nested state dict."""


class Source(Protocol):
    """What is converted.

    Attributes:
        tensors: by name, in order.
        objects: the names of other items.
        paths: the keys of items in the nested state dict, where they are known.
    """

    tensors: dict[str, NamedTensor]
    objects: tuple[str, ...]
    paths: dict[str, Path]

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """The data of pieces. Their tensors have the names, dtypes and shapes of :attr:`tensors`."""

    def load(self, name: str) -> Any:
        """An object."""


def open_source(path: str, buffer_nbytes: int) -> Source:
    """Open what is to be converted.

    Raises:
        StorageError, CorruptCheckpoint, UnsafeCheckpoint: it cannot be read, or is no data.
    """
    return _TorchFile(path) if os.path.isfile(path) else _Checkpoint(path, buffer_nbytes)


class _Checkpoint:
    def __init__(self, path: str, buffer_nbytes: int) -> None:
        self._path = path
        self._reader = PieceReader(path, buffer_nbytes=buffer_nbytes)
        entries = self._reader.metadata.state_dict_metadata
        self.tensors = {
            name: NamedTensor(name, entry.properties.dtype, tuple(entry.size))
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.objects = tuple(name for name in entries if name not in self.tensors)
        paths = self._reader.metadata.planner_data
        self.paths = (
            {name: paths[name] for name in entries if name in paths}
            if isinstance(paths, dict)
            else _by_path(paths, entries)
        )

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        return self._reader.read(pieces)

    def load(self, name: str) -> Any:
        return load_object(self._reader.object_bytes(name), file=self._path, item=name)


def _by_path(paths: Any, names: Any) -> dict[str, Path]:
    """Those of an index, which looks them up one by one; none where there are none."""
    return {} if paths is None else {name: paths[name] for name in names if name in paths}


class _TorchFile:
    def __init__(self, path: str) -> None:
        self._path = path
        loaded = self._loaded()
        if not isinstance(loaded, dict):
            raise CorruptCheckpoint(
                f"{path} holds a {type(loaded).__name__}: expected a dict, as state_dict() gives it", file=path
            )
        flat, paths = flatten_state_dict(loaded)
        self._values = {
            name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in flat.items()
        }
        self.tensors = {
            name: NamedTensor(name, value.dtype, tuple(value.shape))
            for name, value in self._values.items()
            if isinstance(value, torch.Tensor) and value.layout is torch.strided
        }
        self.objects = tuple(name for name in self._values if name not in self.tensors)
        self.paths = dict(paths)

    def _loaded(self) -> Any:
        with open(self._path, "rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        try:
            # The format of before torch 1.6 cannot be mapped.
            return torch.load(self._path, map_location="cpu", weights_only=True, mmap=is_zip)
        except Exception as error:
            if "weights_only" in str(error).lower() or "Unsupported" in str(error):
                raise UnsafeCheckpoint(
                    f"{self._path} asks for a class that is not plain data, and is refused: {error!s:.300}",
                    file=self._path,
                ) from error
            raise CorruptCheckpoint(
                f"{self._path} cannot be used: expected a file of torch.save, found {type(error).__name__}: "
                f"{error!s:.300}",
                file=self._path,
            ) from error

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        found = []
        for piece in pieces:
            value = self._values[piece.tensor.name]
            for dimension, (offset, length) in enumerate(zip(piece.offsets, piece.lengths, strict=True)):
                value = value.narrow(dimension, offset, length)
            found.append(value)
        return found

    def load(self, name: str) -> Any:
        return self._values[name]
