"""DCP's ``Metadata`` to and from the bytes of ``.metadata``: pickled as DCP does it, followed by a checksum.

This module encodes, and checks what was decoded. ``stored_pickle`` owns the pickle and the checksum. It never opens a
file: the commit writes these bytes, the reader reads them, and a coordinator may broadcast them.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Collection
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.files.paths import check_relative_path
from robust_dcp.storage.metadata.metadata_classes import (
    METADATA_CLASSES,
    METADATA_STAND_INS,
    StorageInfo,
    reduce_tensor_properties,
)
from robust_dcp.storage.metadata.stored_pickle import corrupt, trailer_of, unpickled, without_garbage_collection
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.records.data.limits import text_of
from robust_dcp.storage.records.data.names import registered_by_user

__all__ = ["FORMAT_VERSION", "StorageInfo", "decode_metadata", "encode_metadata", "referenced_files"]

FORMAT_VERSION: Final = "1.0.0"
"""``filesystem.CURRENT_DCP_VERSION``: the version of DCP's file names and records, which we use as well."""

_PROTOCOL: Final = 4  # pickle.dump's default on Python 3.8 to 3.13; all of them can read it

_MAX_DIMENSIONS: Final = 64  # the most that torch allows

# A pickle names values of these types as it names classes, but they can neither be called nor changed.
_CONSTANT_TYPES: Final = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)


def encode_metadata(metadata: Metadata) -> bytes:
    """Pickle ``metadata``. ``pickle.load`` of every supported torch can read it, and we notice each flipped bit."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table.copy()
    pickler.dispatch_table[TensorProperties] = reduce_tensor_properties
    pickler.dump(metadata)
    data = buffer.getvalue()
    return data + trailer_of(len(data), crc32(data))


def decode_metadata(data: bytes, file: str) -> Metadata:
    """Decode a ``.metadata`` file by us, by DCP or by Megatron-Core, from torch 2.0 on.

    Args:
        data: the whole file.
        file: its path, for errors.

    Raises:
        CorruptCheckpoint: the checksum does not match, or this is not the pickle of a ``Metadata`` with usable values.
            A file by DCP has no checksum: if it is damaged and still a valid pickle, that may go unnoticed.
        UnsafeCheckpoint: the pickle names classes that do not belong into metadata, or a path leaves the directory.
    """
    metadata = unpickled(
        data,
        file,
        allowed=METADATA_CLASSES,
        stand_ins=METADATA_STAND_INS,
        registered=registered_by_user(),
        other=_constant,
    )
    try:
        with without_garbage_collection():
            _validate(metadata, file)
    except (CorruptCheckpoint, UnsafeCheckpoint):
        raise
    except Exception as error:  # objects may lack attributes, or fail even when they are printed
        raise corrupt(file, "complete objects", f"{type(error).__name__}: {error!s:.300}") from error
    return metadata  # type: ignore[no-any-return]


def _constant(module: str, name: str) -> Any:
    """A dtype of torch, or the like; ``None`` for any other name."""
    found = getattr(torch, name, None) if module == "torch" else None
    return found if isinstance(found, _CONSTANT_TYPES) else None


def referenced_files(metadata: Metadata) -> set[str]:
    """The relative paths of the data files that hold the items of ``metadata``."""
    return {info.relative_path for info in (metadata.storage_data or {}).values()}


def _validate(metadata: Any, file: str) -> None:
    """Check every value that a reader uses in a computation or opens."""
    _expect(isinstance(metadata, Metadata), file, "a Metadata", metadata)
    _expect(isinstance(metadata.state_dict_metadata, dict), file, "a dict", metadata.state_dict_metadata)
    for fqn, entry in metadata.state_dict_metadata.items():
        if not isinstance(fqn, str):
            raise _unexpected(file, "a string as FQN", fqn)
        if isinstance(entry, TensorStorageMetadata):
            _validate_tensor(fqn, entry, file)
        elif not isinstance(entry, BytesStorageMetadata):
            raise _unexpected(file, f"storage metadata for {fqn}", entry)
    if metadata.storage_data is None:
        return
    _expect(isinstance(metadata.storage_data, dict), file, "a dict as storage_data", metadata.storage_data)
    checked_paths: set[str] = set()
    # Make the text of an error only if there is an error: printing an index takes longer than all checks.
    for index, info in metadata.storage_data.items():
        if not (isinstance(index, MetadataIndex) and isinstance(index.fqn, str)):
            raise _unexpected(file, "a MetadataIndex", index)
        if not isinstance(info, StorageInfo):
            raise _unexpected(file, f"storage info for {index.fqn}", info)
        if info.relative_path not in checked_paths:
            checked_paths.add(check_relative_path(info.relative_path, file=file))
        offset, length = info.offset, info.length
        if not (type(offset) is int and type(length) is int and offset >= 0 and length >= 0):
            raise _unexpected(file, f"offset and length of {index.fqn}", info)
        descriptors = getattr(info, "transform_descriptors", None)  # torch 2.6 and older have no such attribute
        if descriptors and not all(isinstance(d, str) for d in descriptors):
            raise _unexpected(file, "names of transforms", descriptors)


def _validate_tensor(fqn: str, entry: TensorStorageMetadata, file: str) -> None:
    properties, size, chunks = entry.properties, entry.size, entry.chunks
    if not isinstance(properties, TensorProperties):
        raise _unexpected(file, f"properties of {fqn}", properties)
    if not isinstance(properties.dtype, torch.dtype):
        raise _unexpected(file, f"a dtype for {fqn}", properties.dtype)
    if not _are_sizes(size):
        raise _unexpected(file, f"the size of {fqn}", size)
    if not isinstance(chunks, list):
        raise _unexpected(file, f"a list of chunks for {fqn}", chunks)
    for chunk in chunks:
        if not isinstance(chunk, ChunkStorageMetadata):
            raise _unexpected(file, f"a chunk of {fqn}", chunk)
        offsets, sizes = chunk.offsets, chunk.sizes
        if not (_are_sizes(offsets) and _are_sizes(sizes) and len(offsets) == len(sizes)):
            raise _unexpected(file, f"offsets and sizes of a chunk of {fqn}", chunk)


def _are_sizes(values: Collection[Any]) -> bool:
    # A loop is faster than a generator, and this runs three times for each item.
    if len(values) > _MAX_DIMENSIONS:
        return False
    for value in values:  # noqa: SIM110
        if type(value) is not int or value < 0:
            return False
    return True


def _expect(valid: bool, file: str, expected: str, found: Any) -> None:
    if not valid:
        raise _unexpected(file, expected, found)


def _unexpected(file: str, expected: str, found: Any) -> CorruptCheckpoint:
    return corrupt(file, expected, f"{type(found).__name__} {text_of(found)}")
