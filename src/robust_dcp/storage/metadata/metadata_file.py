"""DCP's ``Metadata``: from the bytes of ``.metadata`` and to them, or from the heads of safetensors files.

The file is pickled as DCP does it, followed by a checksum. This module knows the classes that it may hold, whichever
version of torch or Megatron-Core wrote it: names that moved, private names, and states that grew. It checks what was
decoded. ``stored_pickle`` owns the pickle and the checksum; ``pickled`` makes the same bytes from columns.

A directory of safetensors files without ``.metadata`` is a checkpoint, too: of torch's ``HuggingFaceStorageWriter``, or
a plain model of Hugging Face.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import os
import pickle
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from robust_dcp.collector import without_garbage_collection
from robust_dcp.coverage import Coverage, columns_of
from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, SAFETENSORS_SUFFIX, check_relative_path, locate
from robust_dcp.storage.layouts.safetensors import StoredTensor, check_model, read_head
from robust_dcp.storage.metadata.stored_pickle import trailer_of
from robust_dcp.storage.metadata.unpickling import unpickled
from robust_dcp.storage.records.checksum import crc32

FORMAT_VERSION: Final = "1.0.0"
"""``filesystem.CURRENT_DCP_VERSION``: the version of DCP's file names and records, which we use as well."""

_PROTOCOL: Final = 4  # pickle.dump's default on Python 3.8 to 3.13; all of them can read it

_MAX_DIMENSIONS: Final = 64  # the most that torch allows, as are these numbers
_MAX_NUMBER: Final = (1 << 63) - 1

# The classes in a .metadata.

StorageInfo: Any = filesystem._StorageInfo
"""DCP's storage info of an item: ``StorageInfo(relative_path, offset, length)``.

The class is private in torch, but part of the file format: every ``.metadata`` since torch 2.0 names it.
"""


def reduce_tensor_properties(properties: TensorProperties) -> tuple[Any, ...]:
    """Pickle ``properties`` with the five values that every torch can read, even if this torch would write more."""
    reduced: Any = properties.__reduce_ex__(4)
    function, arguments, state = reduced[:3]
    return function, arguments, tuple(state[:5])


# The file.


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
    metadata = unpickled(data, file)
    try:
        with without_garbage_collection():
            _validate(metadata, file)
    except (CorruptCheckpoint, UnsafeCheckpoint):
        raise
    except Exception as error:  # objects may lack attributes, or fail even when they are printed
        raise CorruptCheckpoint.of_file(file, "complete objects", f"{type(error).__name__}: {error!s:.300}") from error
    return metadata  # type: ignore[no-any-return]


def referenced_files(metadata: Metadata) -> set[str]:
    """The relative paths of the data files that hold the items of ``metadata``."""
    return {info.relative_path for info in (metadata.storage_data or {}).values()}


_BESIDE: Final = "files_beside"
"""An attribute of our own on DCP's ``StorageMeta``. Other readers keep it, and do not look at it."""


def digest_beside(data: bytes) -> str:
    """The digest of a file beside the data, as ``.metadata`` and the index hold it."""
    return hashlib.sha256(data).hexdigest()


def note_files_beside(storage_meta: StorageMeta, digests: Mapping[str, str]) -> None:
    """Put the digests of the files that a checkpoint has beside its data, by name, into its ``StorageMeta``."""
    if digests:
        vars(storage_meta)[_BESIDE] = dict(digests)


def files_beside(storage_meta: StorageMeta | None) -> dict[str, str]:
    """The digests of the files beside the data, by name; empty if the save has not said which there are."""
    return dict(getattr(storage_meta, _BESIDE, {}))


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
    beside = getattr(metadata.storage_meta, _BESIDE, {})
    is_named = isinstance(beside, dict) and all(isinstance(each, str) for pair in beside.items() for each in pair)
    _expect(is_named, file, "names and digests of the files beside the data", beside)
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
        are_numbers = type(offset) is int and type(length) is int and offset >= 0 and length >= 0
        if not are_numbers or offset + length > _MAX_NUMBER:
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
        if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
            return False
    return True


def _expect(valid: bool, file: str, expected: str, found: Any) -> None:
    if not valid:
        raise _unexpected(file, expected, found)


def _unexpected(file: str, expected: str, found: Any) -> CorruptCheckpoint:
    kind, text = type(found), ""
    if kind in (bool, float, type(None)) or (kind is int and abs(found) < 1 << 64):
        text = f" {found}"
    elif kind in (str, bytes):
        text = f" {found[:60]!r}"
    return CorruptCheckpoint.of_file(file, expected, f"{kind.__name__}{text}")  # other values may be nested without end


# Directories of safetensors files without .metadata.


def shards_in(disk: Disk, directory: str) -> list[str]:
    """The sorted names of the safetensors files in a directory; none if the directory does not exist.

    Raises:
        CorruptCheckpoint: the index of a Hugging Face model is damaged, or files that it names are missing.
    """
    names = disk.list_directory(directory) if disk.exists(directory) else []
    check_model(disk, directory, names)
    return [name for name in names if name.endswith(SAFETENSORS_SUFFIX)]


def metadata_of_shards(disk: Disk, directory: str, files: list[str]) -> Metadata:
    """The metadata of the tensors in ``files``.

    Args:
        files: names in ``directory``.

    Raises:
        CorruptCheckpoint: a head is damaged; the files belong to a save that was not committed; two files hold the same
            chunk; or the chunks do not make up a whole tensor.
        StorageError: a file cannot be read.
        UnsafeCheckpoint: a name leads out of the directory.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, StorageInfo] = {}
    for file in files:
        head = read_head(disk, locate(disk, directory, file, file=directory))
        if head.is_of_checkpoint:
            expected = f"{METADATA_NAME} beside {file}"
            raise CorruptCheckpoint.of_file(directory, expected, "none: the save was not committed, or it is lost")
        for name, stored in head.tensors.items():
            index = _add(tensors, name, stored, os.path.join(directory, file))
            if index in places:
                raise CorruptCheckpoint.of_file(
                    directory, "each chunk once", f"it in {places[index].relative_path} and {file}", item=name
                )
            places[index] = StorageInfo(file, stored.offset, stored.nbytes)
    _check_coverage(tensors, directory)
    return Metadata(state_dict_metadata=dict(tensors), storage_data=places)


def _add(tensors: dict[str, TensorStorageMetadata], name: str, stored: StoredTensor, file: str) -> MetadataIndex:
    offset, shape = torch.Size(stored.chunk_offset), torch.Size(stored.shape)
    end = torch.Size([o + s for o, s in zip(offset, shape, strict=True)])
    tensor = tensors.get(name)
    if tensor is None:
        tensor = tensors[name] = TensorStorageMetadata(TensorProperties(dtype=stored.dtype), end, [])
    if tensor.properties.dtype != stored.dtype or len(tensor.size) != len(end):
        expected = f"chunks of {tensor.properties.dtype} with {len(tensor.size)} dimensions"
        raise CorruptCheckpoint.of_file(file, expected, f"one of {stored.dtype} with {len(end)}", item=name)
    tensor.size = torch.Size(map(max, tensor.size, end))
    tensor.chunks.append(ChunkStorageMetadata(offset, shape))
    return MetadataIndex(name, offset, len(tensor.chunks) - 1)


def _check_coverage(tensors: Mapping[str, TensorStorageMetadata], directory: str) -> None:
    chunks = [chunk for tensor in tensors.values() for chunk in tensor.chunks]
    number_of = np.repeat(np.arange(len(tensors)), [len(tensor.chunks) for tensor in tensors.values()])
    offset, size = columns_of([each.offsets for each in chunks], 0), columns_of([each.sizes for each in chunks], 1)
    coverage = Coverage(number_of, offset, size, columns_of([tensor.size for tensor in tensors.values()], 1))
    for number, (name, tensor) in enumerate(tensors.items()):
        problem = coverage.problem(number, len(tensor.size))
        if problem is not None:
            raise CorruptCheckpoint.of_file(directory, *problem, item=name)
