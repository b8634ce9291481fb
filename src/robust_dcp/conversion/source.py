"""What is converted: a checkpoint of any kind, or one file of ``torch.save``. Nothing in it is executed."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.pieces import NamedTensor, Piece, PieceReader, is_plain
from robust_dcp.storage.records.objects import load_object

Path = tuple[str | int, ...]
"""The keys of an item in the nested state dict, as DCP has them."""

_BLOCK_NBYTES: Final = 8 << 20


class Source(msgspec.Struct, frozen=True):
    """What is converted.

    Attributes:
        tensors: by name, in order.
        objects: the names of other items.
        paths: the keys of items in the nested state dict, where they are known.
        load: gives objects by their names, in their order.
        read: gives the data of pieces of tensors.
        mapped: the tensors that lie in a mapped file, so that they take no memory before they are used.
    """

    tensors: dict[str, NamedTensor]
    objects: tuple[str, ...]
    paths: dict[str, Path]
    load: Callable[[Sequence[str]], Iterator[Any]]
    read: Callable[[Sequence[Piece]], list[torch.Tensor]]
    mapped: dict[str, torch.Tensor]


def box_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The part of a whole tensor that a piece is."""
    for dimension, (offset, length) in enumerate(zip(piece.offsets, piece.lengths, strict=True)):
        tensor = tensor.narrow(dimension, offset, length)
    return tensor


def open_source(path: str, buffer_nbytes: int) -> Source:
    """Open what is to be converted.

    Raises:
        StorageError, CorruptCheckpoint, UnsafeCheckpoint: it cannot be read, or is no data.
    """
    return _file_of_torch_save(path) if os.path.isfile(path) else _checkpoint(path, buffer_nbytes)


def _checkpoint(path: str, buffer_nbytes: int) -> Source:
    reader = PieceReader(path, buffer_nbytes=buffer_nbytes)
    entries: dict[str, Any] = reader.metadata.state_dict_metadata
    paths = reader.metadata.planner_data or {}  # a dict, or an index, which looks paths up one by one

    def load(names: Sequence[str]) -> Iterator[Any]:
        for name, data in reader.objects(names):
            try:
                value = load_object(data, file=path, item=name)
            except UnsafeCheckpoint as error:
                error.message = f"{error.message}. Or leave it out: --exclude {name!r}"
                raise
            yield value

    return Source(
        tensors=reader.tensors,
        objects=tuple(name for name in entries if name not in reader.tensors),
        paths={name: paths[name] for name in entries if name in paths},
        load=load,
        read=reader.read,
        mapped={},
    )


def _file_of_torch_save(path: str) -> Source:
    loaded = _loaded(path)
    if not isinstance(loaded, dict):
        raise CorruptCheckpoint(
            f"{path} holds a {type(loaded).__name__}: expected a dict, as state_dict() gives it", file=path
        )
    flat, paths = flatten_state_dict(loaded)
    values = {
        name: value.detach().resolve_conj().resolve_neg() if isinstance(value, torch.Tensor) else value
        for name, value in flat.items()
    }
    mapped = {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and is_plain(value)}
    return Source(
        tensors={name: NamedTensor(name, value.dtype, tuple(value.shape)) for name, value in mapped.items()},
        objects=tuple(name for name in values if name not in mapped),
        paths=dict(paths),
        load=lambda names: map(values.__getitem__, names),
        read=lambda pieces: [box_of(mapped[piece.tensor.name], piece) for piece in pieces],
        mapped=mapped,
    )


def _loaded(path: str) -> Any:
    """What a file of ``torch.save`` holds, its tensors mapped. torch compares no checksums, so that is done here.

    A record has the checksum 0 after ``torch.serialization.set_crc32_options(False)``.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                with archive.open(info) as record:
                    while info.CRC and record.read(_BLOCK_NBYTES):
                        pass
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        # What torch says of the file, without the advice around it, which is to load it with less care.
        text = str(error).rpartition("WeightsUnpickler error:")[2].rpartition("trusted source.")[2].strip()
        reason = text.partition("\n")[0]
        if isinstance(error, pickle.UnpicklingError) and "Unsupported operand" not in reason:
            message = f"{path} asks for a class that is not plain data, and is refused: {reason:.300}"
            raise UnsafeCheckpoint(message, file=path) from error
        message = f"{path} cannot be used: expected a file of torch.save, found {type(error).__name__}: {reason:.300}"
        raise CorruptCheckpoint(message, file=path) from error
