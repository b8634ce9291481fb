"""The bytes of ``.metadata``: DCP's ``Metadata`` as stock pickles it, with a checksum behind.

Owns encoding, decoding and the checks of what was decoded. Never opens a file: the commit writes these bytes, the
reader reads them, and a coordinator may broadcast them.
"""

from __future__ import annotations

import copyreg
import gc
import io
import pickle
import pickletools
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
from robust_dcp.storage.checksum import crc32
from robust_dcp.storage.metadata_classes import (
    METADATA_CLASSES,
    METADATA_STAND_INS,
    StorageInfo,
    reduce_tensor_properties,
)
from robust_dcp.storage.paths import check_relative_path
from robust_dcp.storage.unpickling import RestrictedUnpickler

__all__ = ["FORMAT_VERSION", "StorageInfo", "decode_metadata", "encode_metadata", "referenced_files", "trailer_of"]

FORMAT_VERSION: Final = "1.0.0"
"""``filesystem.CURRENT_DCP_VERSION``: that of stock's file names and records, which ours are."""

_PROTOCOL: Final = 4  # what pickle.dump writes by default on Python 3.8 to 3.13, and all of them read
_MAGIC: Final = b"\nRDCPMD1"
# Behind the pickle, where pickle.load does not look: magic, length of the pickle, CRC-32 of the pickle.
_TRAILER: Final = struct.Struct("<8sQI")

# A file without checksum is scanned before it is unpickled, up to this size: about 1 s. Beyond, that is too dear.
_SCANNED_NBYTES: Final = 4 << 20

_HOW_TO_ALLOW: Final = (
    "if the planner that wrote it keeps objects of that class in planner_data and you trust the file, register the "
    "class with torch.serialization.add_safe_globals([...])"
)


def encode_metadata(metadata: Metadata) -> bytes:
    """Pickle ``metadata`` so that ``pickle.load`` of every supported torch reads it, and we notice each flipped bit."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table.copy()
    pickler.dispatch_table[TensorProperties] = reduce_tensor_properties
    pickler.dump(metadata)
    data = buffer.getvalue()
    return data + trailer_of(len(data), crc32(data))


def trailer_of(nbytes: int, crc: int) -> bytes:
    """What stands behind a pickle of ``nbytes`` bytes with CRC-32 ``crc``, so that we notice each flipped bit."""
    return _TRAILER.pack(_MAGIC, nbytes, crc)


def decode_metadata(data: bytes, file: str) -> Metadata:
    """Read the bytes of a ``.metadata`` file by us, by stock DCP or by Megatron-Core, from torch 2.0 on.

    Args:
        data: the whole file.
        file: its path, for errors.

    Raises:
        CorruptCheckpoint: the checksum does not match, or this is not the pickle of a ``Metadata`` whose values can be
            used. A file by stock has no checksum: damage that leaves a valid pickle may go unnoticed there.
        UnsafeCheckpoint: the pickle names classes that do not belong into metadata, or a path leaves the directory.
    """
    pickled = _checked(data, file)
    has_checksum = pickled is not data
    stream = io.BytesIO(pickled)
    unpickler = RestrictedUnpickler(
        stream,
        file=file,
        allowed=METADATA_CLASSES,
        stand_ins=METADATA_STAND_INS,
        how_to_allow=_HOW_TO_ALLOW,
    )
    try:
        if not has_checksum and len(pickled) <= _SCANNED_NBYTES:
            _check_memo(pickled)
        with _without_garbage_collection():
            metadata = unpickler.load()
    except UnsafeCheckpoint:
        raise
    except Exception as error:  # broken pickles raise almost anything
        found = f"{type(error).__name__}: {error}"
        raise _corrupt(file, "the pickle of a Metadata", found) from error
    if stream.tell() != len(pickled):
        # Neither stock nor we write anything there; a damaged trailer of ours ends up here.
        raise _corrupt(file, "nothing behind the pickle", f"{len(pickled) - stream.tell()} bytes")
    try:
        _validate(metadata, file)
    except (CorruptCheckpoint, UnsafeCheckpoint):
        raise
    except Exception as error:  # objects that were never given all of their attributes, or cannot even be printed
        raise _corrupt(file, "complete objects", f"{type(error).__name__}: {error}") from error
    return metadata  # type: ignore[no-any-return]


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Millions of objects are made, none of them garbage: looking for cycles takes most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def referenced_files(metadata: Metadata) -> set[str]:
    """The relative paths of the data files that hold the items of ``metadata``."""
    return {info.relative_path for info in (metadata.storage_data or {}).values()}


def _checked(data: bytes, file: str) -> bytes:
    """The pickle in ``data``, compared with the trailer if there is one."""
    if not data:
        raise _corrupt(file, "a pickle", "an empty file (a save that lost power before it was on disk)")
    if len(data) < _TRAILER.size or not data[-_TRAILER.size :].startswith(_MAGIC):
        return data
    _, nbytes, expected = _TRAILER.unpack(data[-_TRAILER.size :])
    pickled = data[: -_TRAILER.size]
    found = crc32(pickled)
    if nbytes != len(pickled) or found != expected:
        raise _corrupt(
            file, f"{nbytes} bytes with CRC-32 {expected:08x}", f"{len(pickled)} bytes with CRC-32 {found:08x}"
        )
    return pickled


def _check_memo(pickled: bytes) -> None:
    """Refuse a memo index that no pickle of this length can have; of a damaged byte it may make one of 4 billion, for
    which the unpickler would allocate, and fill, tens of GiB."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "LONG_BINPUT" and int(argument or 0) > len(pickled):
            raise ValueError(f"memo index {argument} in a pickle of {len(pickled)} bytes")


def _validate(metadata: Any, file: str) -> None:
    """Check every value that a reader computes with or opens."""
    _expect(isinstance(metadata, Metadata), file, "a Metadata", metadata)
    _expect(isinstance(metadata.state_dict_metadata, dict), file, "a dict", metadata.state_dict_metadata)
    for fqn, entry in metadata.state_dict_metadata.items():
        _expect(isinstance(fqn, str), file, "a string as FQN", fqn)
        if isinstance(entry, TensorStorageMetadata):
            _validate_tensor(fqn, entry, file)
        else:
            _expect(isinstance(entry, BytesStorageMetadata), file, f"storage metadata for {fqn}", entry)
    if metadata.storage_data is None:
        return
    _expect(isinstance(metadata.storage_data, dict), file, "a dict as storage_data", metadata.storage_data)
    checked_paths: set[str] = set()
    for index, info in metadata.storage_data.items():
        _expect(isinstance(index, MetadataIndex) and isinstance(index.fqn, str), file, "a MetadataIndex", index)
        _expect(isinstance(info, StorageInfo), file, f"storage info for {index}", info)
        if info.relative_path not in checked_paths:
            checked_paths.add(check_relative_path(info.relative_path, file=file))
        _expect(_are_sizes((info.offset, info.length)), file, f"offset and length of {index}", info)
        descriptors = getattr(info, "transform_descriptors", None) or ()  # torch 2.6 and older have none
        _expect(all(isinstance(d, str) for d in descriptors), file, "names of transforms", descriptors)


def _validate_tensor(fqn: str, entry: TensorStorageMetadata, file: str) -> None:
    properties = entry.properties
    _expect(isinstance(properties, TensorProperties), file, f"properties of {fqn}", properties)
    _expect(isinstance(properties.dtype, torch.dtype), file, f"a dtype for {fqn}", properties.dtype)
    _expect(_are_sizes(entry.size), file, f"the size of {fqn}", entry.size)
    _expect(isinstance(entry.chunks, list), file, f"a list of chunks for {fqn}", entry.chunks)
    for chunk in entry.chunks:
        _expect(isinstance(chunk, ChunkStorageMetadata), file, f"a chunk of {fqn}", chunk)
        valid = _are_sizes(chunk.offsets) and _are_sizes(chunk.sizes) and len(chunk.offsets) == len(chunk.sizes)
        _expect(valid, file, f"offsets and sizes of a chunk of {fqn}", chunk)


def _are_sizes(values: Iterable[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _expect(valid: bool, file: str, expected: str, found: Any) -> None:
    if not valid:
        raise _corrupt(file, expected, f"{type(found).__name__} {found!r:.200}")


def _corrupt(file: str, expected: str, found: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{file} cannot be used: expected {expected}, found {found}; take another checkpoint, or restore the file",
        file=file,
        expected=expected,
        found=found,
    )
