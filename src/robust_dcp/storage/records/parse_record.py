"""Finds the data of a ``torch.save`` record of one plain tensor, with its dtype and shape, without ``torch.load``.

This module takes records by us and by DCP's writers: zip archives as ``torch.save`` writes them. It never says that a
record is damaged. If a record is not a plain tensor in a plain zip, the result is ``None``, and the reader gives it to
``torch.load``. It reads archives that need not be in memory, by two small reads if they are usual ones.
"""

from __future__ import annotations

import pickletools
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import torch

from robust_dcp.storage.records.torch_zip import contiguous_strides, sample_pickle

__all__ = [
    "NotTorchZip",
    "ParsedRecord",
    "PickledTensor",
    "ReadRange",
    "ZipArchive",
    "ZipEntry",
    "ZipMember",
    "parse_record",
    "read_tensor_pickle",
    "zip_members",
    "zip_members_in",
]

ReadRange = Callable[[int, int], bytes]
"""``read(offset, nbytes)``: bytes of the archive; fewer, or none, past its end."""

_AHEAD_NBYTES: Final = 1024  # enough for data.pkl and the small members of a usual record, and for its directory
_MAX_CONTENTS_NBYTES: Final = 1 << 16

_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_CENTRAL_HEADER: Final = struct.Struct("<4s4xHH4xIIIHHH8xI")
_LOCAL_CRC32_AT: Final = 14
_CENTRAL_CRC32_AT: Final = 16
_END64: Final = struct.Struct("<4s28xQQQ")
_END64_LOCATOR: Final = struct.Struct("<4s4xQ4x")
_END: Final = struct.Struct("<4s6xHIIH")


class NotTorchZip(ValueError):
    """This is no archive as ``torch.save`` writes it."""


class ZipMember(NamedTuple):
    """A member of a zip archive: where its bytes lie, and their CRC-32 (0 if none was computed)."""

    offset: int
    nbytes: int
    crc32: int


def zip_members(data: bytes) -> dict[str, ZipMember]:
    """The members of a ``torch.save`` archive by name, without the archive's own folder.

    Raises:
        ValueError: ``torch.save`` does not write such archives: members are compressed or encrypted, lie outside of the
            archive, overlap, or have the same name.
    """
    return zip_members_in(lambda offset, nbytes: data[offset : offset + nbytes], len(data))


def zip_members_in(read: ReadRange, nbytes: int) -> dict[str, ZipMember]:
    """As :func:`zip_members`, of an archive of ``nbytes`` bytes that need not be in memory."""
    try:
        archive = ZipArchive(read, nbytes, max_directory_nbytes=nbytes)
        members = {
            name: ZipMember(archive.data_offset(entry), entry.nbytes, entry.crc32)
            for name, entry in archive.entries.items()
        }
    except (NotTorchZip, struct.error, IndexError) as error:
        text = str(error) or "it is cut off, or its directory is damaged"
        raise ValueError(f"no zip archive as torch.save writes it: {text}") from None
    end = 0
    for member in sorted(members.values()):
        if member.offset < end or member.offset + member.nbytes > nbytes:
            raise ValueError(
                "no zip archive as torch.save writes it: its members lie over each other, or outside of it"
            )
        end = member.offset + member.nbytes
    return members


class ZipEntry(NamedTuple):
    """A member as the archive's directory has it.

    Attributes:
        header_at: where the member begins, with its local header.
        nbytes, crc32: of its bytes.
        crc32_at: where the CRC-32 is in the directory: 4 bytes, little-endian.
    """

    header_at: int
    nbytes: int
    crc32: int
    crc32_at: int

    @property
    def local_crc32_at(self) -> int:
        """Where the CRC-32 is in the local header."""
        return self.header_at + _LOCAL_CRC32_AT


class ZipArchive:
    """An archive of ``nbytes`` bytes whose directory was read.

    Args:
        max_directory_nbytes: refuse a longer directory.

    Attributes:
        entries: the members by name, without the archive's own folder.
        directory_at: where the directory begins. It extends to the end of the archive.

    Raises:
        NotTorchZip, struct.error, IndexError, UnicodeDecodeError: this is not such an archive, or it is damaged.
    """

    def __init__(self, read: ReadRange, nbytes: int, max_directory_nbytes: int) -> None:
        self.nbytes = nbytes
        self._window = _Window(read, nbytes)
        self.entries, self.directory_at = _entries(self._window, max_directory_nbytes)

    def data_offset(self, entry: ZipEntry) -> int:
        """Where the bytes of a member begin. It is known from the member's local header only."""
        header = self._window.bytes_at(entry.header_at, 30)
        magic, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
        if magic != b"PK\x03\x04":
            raise NotTorchZip
        return int(entry.header_at + 30 + name_nbytes + extra_nbytes)

    def contents(self, entry: ZipEntry) -> bytes:
        """The bytes of a small member, which have its CRC-32."""
        if entry.nbytes > _MAX_CONTENTS_NBYTES:
            raise NotTorchZip
        data = self._window.bytes_at(self.data_offset(entry), entry.nbytes)
        if entry.crc32 and zlib.crc32(data) != entry.crc32:
            raise NotTorchZip
        return data


class _Window:
    """The archive's bytes. Its beginning and its end are each read only once."""

    def __init__(self, read: ReadRange, nbytes: int) -> None:
        self.nbytes = nbytes
        self._read = read
        self._tail_at = max(0, nbytes - _AHEAD_NBYTES)
        self._tail = read(self._tail_at, nbytes - self._tail_at)
        self._head = read(0, min(nbytes, _AHEAD_NBYTES)) if self._tail_at else self._tail

    def bytes_at(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise NotTorchZip
        if offset + nbytes <= len(self._head):
            return self._head[offset : offset + nbytes]
        if offset >= self._tail_at:
            return self._tail[offset - self._tail_at : offset - self._tail_at + nbytes]
        data = self._read(offset, nbytes)
        if len(data) != nbytes:
            raise NotTorchZip
        return data


def _entries(window: _Window, max_directory_nbytes: int) -> tuple[dict[str, ZipEntry], int]:
    """The members in the archive's directory, by name without the archive's own folder, and where the directory
    begins.
    """
    end_at = window.nbytes - _END.size
    magic, count, directory_nbytes, directory_at, comment = _END.unpack(window.bytes_at(end_at, _END.size))
    if magic != b"PK\x05\x06" or comment:
        raise NotTorchZip
    locator_at = end_at - _END64_LOCATOR.size
    if locator_at >= 0:
        magic, end64_at = _END64_LOCATOR.unpack(window.bytes_at(locator_at, _END64_LOCATOR.size))
        if magic == b"PK\x06\x07":
            end64 = _END64.unpack(window.bytes_at(end64_at, _END64.size))
            magic, count, directory_nbytes, directory_at = end64
            if magic != b"PK\x06\x06":
                raise NotTorchZip
    if directory_nbytes > max_directory_nbytes:
        raise NotTorchZip
    directory = window.bytes_at(directory_at, directory_nbytes)
    entries: dict[str, ZipEntry] = {}
    at = 0
    for _ in range(count):
        name, entry, at = _directory_entry(directory, at, directory_at)
        if name in entries:  # some readers take the first, some the last
            raise NotTorchZip("two members have one name")
        entries[name] = entry
    return entries, directory_at


def _directory_entry(directory: bytes, at: int, directory_at: int) -> tuple[str, ZipEntry, int]:
    fields = _CENTRAL_HEADER.unpack_from(directory, at)
    magic, flags, method, crc32, stored_nbytes, nbytes, name_nbytes, extra_nbytes, comment_nbytes, header_at = fields
    if magic != b"PK\x01\x02" or method != 0 or flags & 1:  # stored, not compressed; not encrypted
        raise NotTorchZip("a member is compressed or encrypted")
    crc32_at = directory_at + at + _CENTRAL_CRC32_AT
    at += _CENTRAL_HEADER.size
    name = directory[at : at + name_nbytes].decode("ascii").partition("/")[2]
    at += name_nbytes
    large = _zip64_values(directory[at : at + extra_nbytes])
    nbytes, stored_nbytes, header_at = (
        large.pop(0) if value == 0xFFFFFFFF else value for value in (nbytes, stored_nbytes, header_at)
    )
    if nbytes != stored_nbytes:
        raise NotTorchZip
    return name, ZipEntry(header_at, nbytes, crc32, crc32_at), at + extra_nbytes + comment_nbytes


def _zip64_values(extra: bytes) -> list[int]:
    """The 8-byte numbers of the zip64 extra field: those of size, stored size and offset that did not fit into 4
    bytes.
    """
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            return list(struct.unpack_from(f"<{nbytes // 8}Q", extra, at + 4))
        at += 4 + nbytes
    return []


class PickledTensor(NamedTuple):
    """A tensor as its pickle describes it. ``storage_offset`` and ``stride`` are in elements."""

    dtype: torch.dtype
    storage_nbytes: int
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool


class _NotPlain(ValueError):
    pass


class _Global(NamedTuple):
    module: str
    name: str


class _Storage(NamedTuple):
    kind: _Global
    size: int


_MARK: Final = object()
_ORDERED_DICT: Final = object()


@lru_cache(maxsize=1024)  # tensors of one dtype and shape have the same pickle
def read_tensor_pickle(data: bytes) -> PickledTensor:
    """Run the dozen opcodes of a pickled tensor on a stack of plain values.

    Raises:
        ValueError, IndexError, KeyError: this is not the pickle of one plain tensor.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"):
            stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_Global(*argument.split(" ")))
        elif name in ("NEWTRUE", "NEWFALSE"):
            stack.append(name == "NEWTRUE")
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name == "TUPLE":
            start = len(stack) - 1 - stack[::-1].index(_MARK)
            stack[start:] = [tuple(stack[start + 1 :])]
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            start = len(stack) - int(name[-1])
            stack[start:] = [tuple(stack[start:])]
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(_reduced(stack.pop(), arguments))
        elif name == "STOP":
            break
        elif name != "PROTO":
            raise _NotPlain
    (result,) = stack
    if not isinstance(result, PickledTensor):
        raise _NotPlain
    return result


def _storage(persistent_id: Any) -> _Storage:
    # ("storage", storage class, key, location, size); the location does not matter: we read into CPU memory.
    if not (isinstance(persistent_id, tuple) and len(persistent_id) == 5):
        raise _NotPlain
    tag, kind, key, _, size = persistent_id
    if tag != "storage" or key != "0" or not isinstance(kind, _Global) or not _is_size(size):
        raise _NotPlain
    return _Storage(kind, size)


def _reduced(function: Any, arguments: Any) -> Any:
    if function == _Global("collections", "OrderedDict") and arguments == ():
        return _ORDERED_DICT  # the backward hooks, which are always empty
    if function == _Global("torch._utils", "_rebuild_tensor_v2"):
        return _tensor(arguments, None)
    if function == _Global("torch._utils", "_rebuild_tensor_v3"):
        *arguments, dtype = arguments
        return _tensor(arguments, dtype)
    raise _NotPlain


def _tensor(arguments: Any, dtype_name: Any) -> PickledTensor:
    storage, storage_offset, shape, stride, requires_grad, hooks = arguments
    valid = (
        isinstance(storage, _Storage)
        and _is_size(storage_offset)
        and all(isinstance(values, tuple) and all(map(_is_size, values)) for values in (shape, stride))
        and len(shape) == len(stride)
        and isinstance(requires_grad, bool)
        and hooks is _ORDERED_DICT
    )
    if not valid:
        raise _NotPlain
    if dtype_name is None:
        dtype = _dtypes_of_storages()[storage.kind]
        unit_nbytes = dtype.itemsize
    else:
        dtype = _dtype_named(dtype_name)
        unit_nbytes = 1  # _rebuild_tensor_v3 takes an untyped storage, which counts its size in bytes
        if storage.kind != _Global("torch.storage", "UntypedStorage"):
            raise _NotPlain
    storage_nbytes = storage.size * unit_nbytes
    elements = 0
    if 0 not in shape:
        elements = 1 + storage_offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if elements * dtype.itemsize > storage_nbytes:
        raise _NotPlain
    return PickledTensor(dtype, storage_nbytes, storage_offset, shape, stride, requires_grad)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _dtype_named(name: Any) -> torch.dtype:
    if not (isinstance(name, _Global) and name.module == "torch"):
        raise _NotPlain
    dtype = getattr(torch, name.name, None)
    if not isinstance(dtype, torch.dtype):
        raise _NotPlain
    return dtype


@cache
def _dtypes_of_storages() -> dict[_Global, torch.dtype]:
    """The dtype of each typed storage class, learnt from how this torch pickles each dtype."""
    found: dict[_Global, torch.dtype] = {}
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        data = sample_pickle(dtype)
        if data is None:
            continue
        names = [str(argument) for opcode, argument, _ in pickletools.genops(data) if opcode.name == "GLOBAL"]
        storage = next((_Global(*name.split(" ")) for name in names if name.endswith("Storage")), None)
        if storage is not None and storage.name != "UntypedStorage":
            found[storage] = dtype
    return found


_MAX_DIRECTORY_NBYTES: Final = 1 << 16
_READ_MEMBERS: Final = ("data.pkl", "byteorder")


@dataclass(frozen=True)
class ParsedRecord:
    """A tensor in a record.

    Attributes:
        dtype, shape, stride, requires_grad: as ``torch.load`` would return them; strides in elements.
        storage_offset: place of the tensor's first element in its storage, in elements.
        data_offset: where the storage's bytes begin, from the start of the record.
        data_nbytes: length of the storage in bytes.
        crc32: CRC-32 of the storage's bytes; ``None`` if it is 0, because ``torch.save`` writes 0 after
            ``torch.serialization.set_crc32_options(False)``.
        directory_at: where the archive's directory begins. It extends to the end of the record.
        crc32_at: where the CRC-32 is in the directory: 4 bytes, little-endian.
        unread_at: start and end of each range, in the directory or before the data, that says nothing about the tensor:
            checksums of its data, and of members that nobody reads.
        is_framed: whether all bytes that were read to find this lie before the data or in the directory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    requires_grad: bool
    data_offset: int
    data_nbytes: int
    crc32: int | None
    directory_at: int = field(default=0, compare=False)
    crc32_at: int = field(default=0, compare=False)
    unread_at: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    is_framed: bool = field(default=False, compare=False)

    @property
    def is_contiguous(self) -> bool:
        """Whether the storage holds the tensor's elements in order and nothing else."""
        return self.storage_offset == 0 and self.stride == contiguous_strides(self.shape)


def parse_record(read: ReadRange, nbytes: int) -> ParsedRecord | None:
    """Find the tensor in a record of ``nbytes`` bytes, in two small reads if it is a usual one.

    Returns:
        ``None`` if this is not an uncompressed zip with one tensor as ``torch.save`` writes it, in this machine's byte
        order. Then ``torch.load`` has to find out whether it is something else, or damaged.
    """
    try:
        return _parse(ZipArchive(read, nbytes, _MAX_DIRECTORY_NBYTES))
    except (struct.error, ValueError, IndexError, KeyError):
        # Bytes that are not such a record raise one of these, in zip_members, tensor_pickle or pickletools.
        return None


def _parse(archive: ZipArchive) -> ParsedRecord | None:
    entries = archive.entries
    pickled, storage = entries.get("data.pkl"), entries.get("data/0")
    # With a second storage, or the members of a TorchScript archive, this is more than one tensor.
    if pickled is None or storage is None or any(name.startswith(("data/1", "code/", "constants")) for name in entries):
        return None
    order = entries.get("byteorder")
    if (archive.contents(order) if order else b"little") != sys.byteorder.encode():
        return None
    tensor = read_tensor_pickle(archive.contents(pickled))
    data_offset = archive.data_offset(storage)
    if data_offset + storage.nbytes > archive.nbytes or tensor.storage_nbytes != storage.nbytes:
        return None
    return ParsedRecord(
        dtype=tensor.dtype,
        shape=tensor.shape,
        stride=tensor.stride,
        storage_offset=tensor.storage_offset,
        requires_grad=tensor.requires_grad,
        data_offset=data_offset,
        data_nbytes=storage.nbytes,
        crc32=storage.crc32 or None,
        directory_at=archive.directory_at,
        crc32_at=storage.crc32_at,
        unread_at=_unread(entries, data_offset),
        is_framed=archive.directory_at >= data_offset + storage.nbytes
        and all(entry.header_at < storage.header_at for name, entry in entries.items() if name in _READ_MEMBERS),
    )


def _unread(entries: dict[str, ZipEntry], data_offset: int) -> tuple[tuple[int, int], ...]:
    starts = [entry.crc32_at for name, entry in entries.items() if name not in _READ_MEMBERS]
    local_crc32_at = entries["data/0"].local_crc32_at
    if local_crc32_at + 4 <= data_offset:
        starts.append(local_crc32_at)
    return tuple(sorted((start, start + 4) for start in starts))
