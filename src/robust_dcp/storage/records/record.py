"""The record of one tensor: a zip archive of ``torch.save`` around the tensor's bytes, which is emitted or parsed here.

A record that we write is ``header + data + trailer``::

    archive/data.pkl  | archive/version | archive/byteorder | header of archive/data/0 | data | directory, end
    <-------------------- data_offset, a multiple of 64 ----------------------------->         <- trailer ->

``torch.load`` (also with ``weights_only=True`` and ``mmap=True``) and ``FileSystemReader`` read it. It has the members
that ``torch.save`` writes, except those that only help a reader to guess offsets. All lengths depend on dtype and
shape alone, so every place in a file is known before there is any data.

A record that is parsed may be of any writer. What is no plain tensor in a plain zip gives ``None``. It is not said to
be damaged: the reader gives it to ``objects``.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch.storage import TypedStorage, UntypedStorage

from robust_dcp.storage.records.torch_kinds import storage_of
from robust_dcp.storage.records.unpickler import Unpickler

__all__ = [
    "DATA_ALIGNMENT",
    "ZIP_MAGIC",
    "KnownRecords",
    "ReadRange",
    "Record",
    "ZipMember",
    "bytes_of",
    "contiguous_strides",
    "framed_record",
    "is_fixed_size",
    "parsed_record",
    "raw_record",
    "zip_members",
]

DATA_ALIGNMENT: Final = 64
"""The data starts at a multiple of this from the start of the record, as in records of ``torch.save``."""

ReadRange = Callable[[int, int], bytes]
"""``read(offset, nbytes)``: bytes of a record; fewer, or none, past its end."""

_UINT32: Final = struct.Struct("<I")


@dataclass(frozen=True)
class Record:
    """A tensor in an item: what it is, where its data lies, and the bytes around the data.

    Attributes:
        dtype, shape, stride, storage_offset: as ``torch.load`` would return them. Strides and offset are
            in elements.
        nbytes: the length of the item.
        data_offset, data_nbytes: where the bytes of the tensor's storage lie in it.
        crc32: the CRC-32 of the data; ``None`` if none is known.
        header, trailer: the bytes at the beginning and at the end of the item that say all this; none in a file whose
            head says it. A CRC-32 that is not known yet is 0.
        crc32_at: where the CRC-32 of the data goes: 4 bytes, little-endian, in the header and in the trailer.
        unread_at: ranges of header and trailer that say nothing about the tensor: checksums of its data, and of members
            that nobody reads.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    data_offset: int
    data_nbytes: int
    stride: tuple[int, ...]
    storage_offset: int = 0
    crc32: int | None = None
    header: bytes = b""
    trailer: bytes = b""
    crc32_at: tuple[int, ...] = ()
    unread_at: tuple[tuple[int, int], ...] = ()

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the storage holds the tensor's elements in order and nothing else."""
        is_all = self.data_nbytes == prod(self.shape) * self.dtype.itemsize
        return is_all and self.storage_offset == 0 and self.stride == contiguous_strides(self.shape)

    def around(self, crc32: int) -> tuple[bytes, bytes]:
        """The bytes before and after the data, if that is its CRC-32."""
        header, trailer = bytearray(self.header), bytearray(self.trailer)
        if self.crc32_at:
            _UINT32.pack_into(header, self.crc32_at[0], crc32)
            _UINT32.pack_into(trailer, self.crc32_at[1] - self.nbytes + len(trailer), crc32)
        return bytes(header), bytes(trailer)

    @cached_property
    def frame(self) -> tuple[tuple[int, int, bytes], ...]:
        """The bytes that all records of this writer, dtype and shape have in common: (begin, end, bytes)."""
        parts = []
        for start, content in ((0, self.header), (self.nbytes - len(self.trailer), self.trailer)):
            at, end = start, start + len(content)
            for low, high in (*((low, high) for low, high in self.unread_at if start <= low < end), (end, end)):
                parts.append((at, low, content[at - start : low - start]))
                at = high
        return tuple(part for part in parts if part[2])

    def crc32_in(self, memory: Any, at: int) -> int | None:
        """The CRC-32 in the record that begins at ``at``, 0 if it has none; ``None`` if that record differs from this
        one in other bytes than checksums and data.
        """
        return self.crc32s_in(memory, [at])[0]

    def crc32s_in(self, memory: Any, starts: Sequence[int]) -> list[int | None]:
        """:meth:`crc32_in` for many records, in a third of the time for each."""
        alike = [True] * len(starts)
        for begin, end, part in self.frame:  # copies, because a memoryview would be compared byte by byte
            alike = [
                same and bytes(memory[at + begin : at + end]) == part for same, at in zip(alike, starts, strict=True)
            ]
        crc32s = [_UINT32.unpack_from(memory, at + self.crc32_at[-1])[0] for at in starts]
        return [crc32 if same else None for same, crc32 in zip(alike, crc32s, strict=True)]

    def crc32_in_header(self, header: bytes) -> int | None:
        """The CRC-32 in ``header``, if it is this record's header with any CRC-32; else ``None``."""
        at = self.crc32_at[0]
        end = at + _UINT32.size
        if len(header) != len(self.header) or header[:at] != self.header[:at] or header[end:] != self.header[end:]:
            return None
        return int(_UINT32.unpack_from(header, at)[0])


# Records that we write.

_DATA_NAME: Final = b"archive/data/0"
_PICKLE_NAME: Final = b"archive/data.pkl"
_UINT32_MAX: Final = 0xFFFFFFFF
_DOS_DATE: Final = 0x0021  # 1980-01-01, the first date of the zip format; torch.save writes 0, which is not a date

# The structures of a zip file, from APPNOTE.TXT 4.3.7, 4.5.3, 4.3.12, 4.3.14 to 4.3.16.
ZIP_MAGIC: Final = b"PK\x03\x04"
_LOCAL_HEADER: Final = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL_HEADER: Final = struct.Struct("<4sHHHHHHIIIHHHHHII")
_ZIP64_EXTRA: Final = struct.Struct("<HHQQ")
_END64: Final = struct.Struct("<4sQHHIIQQQQ")
_END64_LOCATOR: Final = struct.Struct("<4sIQI")
_END: Final = struct.Struct("<4sHHHHIIH")
_LOCAL_CRC32_AT: Final = 14
_LOCAL_SIZE_AT: Final = 18
_CENTRAL_CRC32_AT: Final = 16
_VERSION_NEEDED: Final = 45  # zip64
_PADDING_ID: Final = 0x4246  # "FB": the extra field that PyTorch's own writer pads with


@lru_cache(maxsize=4096)
def framed_record(dtype: torch.dtype, shape: tuple[int, ...]) -> Record | None:
    """The record of contiguous tensors of ``dtype`` and ``shape``, without data and CRC-32.

    Args:
        dtype: any dtype; ``shape``: sizes, ``()`` for a scalar, zeros allowed.

    Returns:
        ``None`` if this torch pickles tensors of ``dtype`` in a way that we do not know (quantized dtypes).
        ``torch.save`` writes such an item, and it has no fixed size.
    """
    reduced = _reduced(dtype)
    if reduced is None:
        return None
    function, (storage, _, _, _, _, hooks, *rest) = reduced
    buffer = io.BytesIO()
    place = (0, tuple(shape), contiguous_strides(shape), False)  # DCP saves detached tensors
    _Pickler(buffer, prod(shape), prod(shape) * dtype.itemsize).dump(_Call(function, (storage, *place, hooks, *rest)))
    return _framed(buffer.getvalue(), dtype, shape)


@lru_cache(maxsize=4096)
def raw_record(dtype: torch.dtype, shape: tuple[int, ...]) -> Record:
    """The record of nothing but the data. The head of the file holds the CRC-32."""
    nbytes = prod(shape) * dtype.itemsize
    return Record(dtype, tuple(shape), nbytes, 0, nbytes, contiguous_strides(shape))


@cache
def _reduced(dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]] | None:
    """How this torch pickles a tensor of ``dtype``: a function and its arguments; ``None`` if in another way."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch may warn of a dtype that the user has not used
            function, arguments, *_ = torch.empty(0, dtype=dtype).__reduce_ex__(2)
        _Pickler(io.BytesIO(), 0, 0).dump(arguments)
    except Exception:  # torch cannot make or pickle such a tensor; the error depends on version and dtype
        return None
    is_known = function in (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3)
    return (function, arguments) if is_known else None


class _Call(NamedTuple):
    """Is pickled as a call, as tensors are."""

    function: Any
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


class _Pickler(pickle.Pickler):
    """Pickles as ``torch.save`` does: a storage by its class, number, device and length."""

    def __init__(self, buffer: io.BytesIO, numel: int, nbytes: int) -> None:
        super().__init__(buffer, protocol=2)
        self._numel = numel
        self._nbytes = nbytes

    def persistent_id(self, found: Any) -> Any:
        if isinstance(found, TypedStorage):
            return "storage", getattr(torch, found._pickle_storage_type()), "0", "cpu", self._numel
        if isinstance(found, UntypedStorage):
            return "storage", UntypedStorage, "0", "cpu", self._nbytes
        return None


def _framed(pickled: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Record:
    data_nbytes = prod(shape) * dtype.itemsize
    members = [
        (_PICKLE_NAME, pickled),
        (b"archive/version", b"3\n"),  # of the archive format, as torch.save writes it and readers expect it
        (b"archive/byteorder", sys.byteorder.encode()),
    ]
    header = bytearray()
    directory = bytearray()
    for name, data in members:
        directory += _central_entry(name, zlib.crc32(data), len(data), len(header))
        header += _local_header(name, zlib.crc32(data), len(data), b"") + data
    header_at, entry_at = len(header), len(directory)
    directory += _central_entry(_DATA_NAME, 0, data_nbytes, header_at)
    header += _data_header(header_at, data_nbytes)

    directory_at = len(header) + data_nbytes
    trailer = bytes(directory) + _end(len(members) + 1, directory_at, len(directory))
    crc32_at = header_at + _LOCAL_CRC32_AT, directory_at + entry_at + _CENTRAL_CRC32_AT
    return Record(
        dtype=dtype,
        shape=tuple(shape),
        nbytes=directory_at + len(trailer),
        data_offset=len(header),
        data_nbytes=data_nbytes,
        stride=contiguous_strides(shape),
        header=bytes(header),
        trailer=trailer,
        crc32_at=crc32_at,
        unread_at=tuple((at, at + _UINT32.size) for at in crc32_at),
    )


def _local_header(name: bytes, crc32: int, nbytes: int, extra: bytes) -> bytes:
    size = min(nbytes, _UINT32_MAX)
    fields = (_VERSION_NEEDED, 0, 0, 0, _DOS_DATE, crc32, size, size, len(name), len(extra))
    return _LOCAL_HEADER.pack(ZIP_MAGIC, *fields) + name + extra


def _data_header(start: int, data_nbytes: int) -> bytes:
    """The local header of the data, padded so that the data is aligned."""
    zip64 = _ZIP64_EXTRA.pack(1, 16, data_nbytes, data_nbytes) if data_nbytes >= _UINT32_MAX else b""
    unpadded = start + _LOCAL_HEADER.size + len(_DATA_NAME) + len(zip64) + 4  # 4: id and length of the padding
    padding = -unpadded % DATA_ALIGNMENT
    extra = zip64 + struct.pack("<HH", _PADDING_ID, padding) + b"Z" * padding
    return _local_header(_DATA_NAME, 0, data_nbytes, extra)


def _central_entry(name: bytes, crc32: int, nbytes: int, header_at: int) -> bytes:
    size = min(nbytes, _UINT32_MAX)
    extra = _ZIP64_EXTRA.pack(1, 16, nbytes, nbytes) if nbytes >= _UINT32_MAX else b""
    versions = (_VERSION_NEEDED, _VERSION_NEEDED)
    fields = (*versions, 0, 0, 0, _DOS_DATE, crc32, size, size, len(name), len(extra), 0, 0, 0, 0, header_at)
    return _CENTRAL_HEADER.pack(b"PK\x01\x02", *fields) + name + extra


def _end(members: int, directory_at: int, directory_nbytes: int) -> bytes:
    """The end of the archive. It always has the zip64 form, as PyTorch writes it, so its length is constant."""
    versions = (_VERSION_NEEDED, _VERSION_NEEDED)
    numbers = (members, members, directory_nbytes, directory_at)
    end64 = _END64.pack(b"PK\x06\x06", _END64.size - 12, *versions, 0, 0, *numbers)
    locator = _END64_LOCATOR.pack(b"PK\x06\x07", 0, directory_at + directory_nbytes, 1)
    end = _END.pack(b"PK\x05\x06", 0, 0, members, members, directory_nbytes, min(directory_at, _UINT32_MAX), 0)
    return end64 + locator + end


# Archives of any writer.

_AHEAD_NBYTES: Final = 1024  # enough for data.pkl and the small members of a usual record, and for its directory
_MAX_CONTENTS_NBYTES: Final = 1 << 16
_MAX_DIRECTORY_NBYTES: Final = 1 << 16
_MAX_FRAME_NBYTES: Final = 1 << 14


class ZipMember(NamedTuple):
    """A member of a zip archive: where its bytes lie, and their CRC-32 (0 if none was computed)."""

    offset: int
    nbytes: int
    crc32: int


class _Entry(NamedTuple):
    """A member as the archive's directory has it: where its local header begins, its length and CRC-32, and where the
    CRC-32 stands in the directory.
    """

    header_at: int
    nbytes: int
    crc32: int
    crc32_at: int


class _Archive:
    """An archive of which the directory was read. Its beginning and its end are each read only once.

    Attributes:
        entries: the members by name, without the archive's own folder.
        directory_at: where the directory begins. It extends to the end of the archive.

    Raises:
        ValueError, struct.error, IndexError: this is not such an archive, or it is damaged.
    """

    def __init__(self, read: ReadRange, nbytes: int, max_directory_nbytes: int) -> None:
        self.nbytes = nbytes
        self._read = read
        self._tail_at = max(0, nbytes - _AHEAD_NBYTES)
        self._tail = read(self._tail_at, nbytes - self._tail_at)
        self._head = read(0, min(nbytes, _AHEAD_NBYTES)) if self._tail_at else self._tail
        self.entries: dict[str, _Entry] = {}
        self.directory_at = self._read_directory(max_directory_nbytes)

    def bytes_at(self, offset: int, nbytes: int) -> bytes:
        """Some bytes of the archive."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError("it is cut off, or its directory is damaged")
        if offset + nbytes <= len(self._head):
            return self._head[offset : offset + nbytes]
        if offset >= self._tail_at:
            return self._tail[offset - self._tail_at : offset - self._tail_at + nbytes]
        return self._read(offset, nbytes)

    def data_offset(self, entry: _Entry) -> int:
        """Where the bytes of a member begin. It is known from the member's local header only."""
        header = self.bytes_at(entry.header_at, _LOCAL_HEADER.size)
        magic, *_, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
        if magic != ZIP_MAGIC:
            raise ValueError("a member does not begin where the directory says")
        return int(entry.header_at + _LOCAL_HEADER.size + name_nbytes + extra_nbytes)

    def contents(self, entry: _Entry) -> bytes:
        """The bytes of a small member, which have its CRC-32."""
        data = self.bytes_at(self.data_offset(entry), min(entry.nbytes, _MAX_CONTENTS_NBYTES + 1))
        if entry.nbytes > _MAX_CONTENTS_NBYTES or (entry.crc32 and zlib.crc32(data) != entry.crc32):
            raise ValueError("a member is too long, or damaged")
        return data

    def _read_directory(self, max_nbytes: int) -> int:
        end_at = self.nbytes - _END.size
        magic, _, _, _, count, nbytes, at, comment = _END.unpack(self.bytes_at(end_at, _END.size))
        if magic != b"PK\x05\x06" or comment:
            raise ValueError("it does not end as such an archive")
        locator_at = end_at - _END64_LOCATOR.size
        if locator_at >= 0:
            magic, _, end64_at, _ = _END64_LOCATOR.unpack(self.bytes_at(locator_at, _END64_LOCATOR.size))
            if magic == b"PK\x06\x07":
                magic, *_, count, nbytes, at = _END64.unpack(self.bytes_at(end64_at, _END64.size))
                if magic != b"PK\x06\x06":
                    raise ValueError("it does not end as such an archive")
        if nbytes > max_nbytes:
            raise ValueError("its directory is too long")
        directory, first = self.bytes_at(at, nbytes), 0
        for _ in range(count):
            first = self._read_entry(directory, first, at)
        return int(at)

    def _read_entry(self, directory: bytes, at: int, directory_at: int) -> int:
        magic, _, _, flags, method, _, _, crc32, stored_nbytes, nbytes, *lengths, _, _, _, header_at = (
            _CENTRAL_HEADER.unpack_from(directory, at)
        )
        if magic != b"PK\x01\x02" or method != 0 or flags & 1:  # stored, not compressed; not encrypted
            raise ValueError("a member is compressed or encrypted")
        crc32_at = directory_at + at + _CENTRAL_CRC32_AT
        ends = [at := at + length for length in (_CENTRAL_HEADER.size, *lengths)]
        name = directory[ends[0] : ends[1]].decode("ascii").partition("/")[2]
        large = _zip64_values(directory[ends[1] : ends[2]])
        nbytes, stored_nbytes, header_at = (
            large.pop(0) if value == _UINT32_MAX else value for value in (nbytes, stored_nbytes, header_at)
        )
        if nbytes != stored_nbytes or name in self.entries:  # of two with one name some readers take the first
            raise ValueError("a member has two lengths, or two members have one name")
        self.entries[name] = _Entry(header_at, nbytes, crc32, crc32_at)
        return at


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


def zip_members(read: ReadRange, nbytes: int) -> dict[str, ZipMember]:
    """The members of a ``torch.save`` archive of ``nbytes`` bytes by name, without the archive's own folder.

    Raises:
        ValueError: ``torch.save`` does not write such archives: members are compressed or encrypted, lie outside of the
            archive, overlap, or have the same name.
    """
    wrong = "no zip archive as torch.save writes it"
    try:
        archive = _Archive(read, nbytes, max_directory_nbytes=nbytes)
        members = {
            name: ZipMember(archive.data_offset(entry), entry.nbytes, entry.crc32)
            for name, entry in archive.entries.items()
        }
    except (ValueError, struct.error, IndexError) as error:
        raise ValueError(f"{wrong}: {error}") from None
    end = 0
    for member in sorted(members.values()):
        if member.offset < end or member.offset + member.nbytes > nbytes:
            raise ValueError(f"{wrong}: its members lie over each other, or outside of it")
        end = member.offset + member.nbytes
    return members


@lru_cache(maxsize=1024)  # tensors of one dtype and shape have the same pickle
def _pickled_tensor(pickled: bytes) -> tuple[torch.Tensor, int] | None:
    """The tensor of a pickle, without its data, and the length of its storage; ``None`` if it is no plain tensor."""
    storages = []

    def load_storage(persistent_id: Any) -> TypedStorage:
        key, nbytes, dtype = storage_of(persistent_id)
        storages.append((key, nbytes))
        return TypedStorage(wrap_storage=UntypedStorage(nbytes, device="meta"), dtype=dtype, _internal=True)

    try:
        tensor = Unpickler(pickled, load_storage).load()
    except Exception:  # broken pickles raise all kinds of errors
        return None
    if type(tensor) is not torch.Tensor or not _is_strided(tensor) or [key for key, _ in storages] != ["0"]:
        return None
    return tensor, storages[0][1]


_READ_MEMBERS: Final = ("data.pkl", "byteorder")


def parsed_record(read: ReadRange, nbytes: int) -> Record | None:
    """Find the tensor in a record of ``nbytes`` bytes, in two small reads if it is a usual one.

    Returns:
        ``None`` if this is not an uncompressed zip with one tensor as ``torch.save`` writes it, in this machine's byte
        order. Then ``objects`` has to find out whether it is something else, or damaged.
    """
    try:
        return _parsed(_Archive(read, nbytes, _MAX_DIRECTORY_NBYTES))
    except (struct.error, ValueError, IndexError):  # bytes that are not such a record raise one of these
        return None


def _parsed(archive: _Archive) -> Record | None:
    entries = archive.entries
    pickled, data = entries.get("data.pkl"), entries.get("data/0")
    # With a second storage, or the members of a TorchScript archive, this is more than one tensor.
    if pickled is None or data is None or any(name.startswith(("data/1", "code/", "constants")) for name in entries):
        return None
    order = entries.get("byteorder")
    if (archive.contents(order) if order else b"little") != sys.byteorder.encode():
        return None
    found = _pickled_tensor(archive.contents(pickled))
    data_offset, end = archive.data_offset(data), archive.nbytes
    if found is None or data_offset + data.nbytes > end or found[1] != data.nbytes:
        return None
    tensor = found[0]
    trailer_nbytes = end - archive.directory_at
    # What was read to find this must lie before the data or in the directory, to be compared in other records.
    is_framed = archive.directory_at >= data_offset + data.nbytes and all(
        entries[name].header_at < data.header_at for name in _READ_MEMBERS if name in entries
    )
    is_framed = is_framed and data_offset + trailer_nbytes <= _MAX_FRAME_NBYTES
    crc32_at = (data.header_at + _LOCAL_CRC32_AT, data.crc32_at)
    unread = [entry.crc32_at for name, entry in entries.items() if name not in _READ_MEMBERS]
    unread += [crc32_at[0]] if crc32_at[0] + _UINT32.size <= data_offset else []
    return Record(
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        nbytes=end,
        data_offset=data_offset,
        data_nbytes=data.nbytes,
        stride=tensor.stride(),
        storage_offset=int(tensor.storage_offset()),
        crc32=data.crc32 or None,  # torch.save writes 0 after torch.serialization.set_crc32_options(False)
        header=archive.bytes_at(0, data_offset) if is_framed else b"",
        trailer=archive.bytes_at(archive.directory_at, trailer_nbytes) if is_framed else b"",
        crc32_at=crc32_at,
        unread_at=tuple((at, at + _UINT32.size) for at in sorted(unread)),
    )


_MOST_KNOWN: Final = 1024
"""Each known record takes 1 to 2 KiB. A load with more has few of each, so to know them gains little."""


class KnownRecords:
    """Recognises records in memory: by the one that we write, or by the first of each length, dtype and shape, which is
    parsed. Others are like it only if all their bytes outside of data and checksums are equal.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.dtype, tuple[int, ...]], Record | None] = {}

    def find(
        self, memory: Any, at: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> tuple[Record, int] | None:
        """The record of ``nbytes`` bytes at ``at``, and its CRC-32 (0 if it has none).

        Returns:
            ``None`` if it is not the usual record of a contiguous tensor of ``dtype`` and ``shape``.
        """
        key = (nbytes, dtype, shape)
        if key in self._known:
            record = self._known[key]
        else:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            record = framed_record(dtype, tuple(shape))
            if record is None or record.nbytes != nbytes or record.crc32_in(memory, at) is None:
                record = parsed_record(lambda begin, count: bytes(memory[at + begin : at + begin + count]), nbytes)
                is_usual = record is not None and record.is_contiguous and bool(record.header)
                if record is None or not is_usual or (record.dtype, record.shape) != (dtype, tuple(shape)):
                    record = None
            self._known[key] = record
        if record is None:
            return None
        crc32 = record.crc32_in(memory, at)
        return None if crc32 is None else (record, crc32)


# Tensors.


def _is_strided(tensor: torch.Tensor) -> bool:
    is_odd = tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg()
    return tensor.layout == torch.strided and not is_odd


def is_fixed_size(tensor: torch.Tensor) -> bool:
    """Whether a record of ``tensor`` (made contiguous, if it is not) can be framed by :func:`framed_record`.

    ``False`` for tensors that dtype, shape and data do not describe fully: sparse, quantized, nested and other layouts,
    pending conjugation or negation, tensor subclasses, and meta tensors. A ``Parameter`` is saved as its data, as DCP
    does.
    """
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and _is_strided(tensor)
        and tensor.device.type != "meta"
        and _reduced(tensor.dtype) is not None
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The data of ``tensor`` as writable bytes, without a copy. The view keeps the memory alive.

    Args:
        tensor: contiguous, on the CPU, of any dtype and shape (also 0-dimensional or empty).

    Raises:
        ValueError: ``tensor`` is not contiguous, or not on the CPU, so its bytes are not one readable range.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous CPU tensor, got {tensor.device}, strides {tensor.stride()}")
    if tensor.numel() == 0:
        return memoryview(bytearray())
    # Not reshape(-1): a contiguous tensor may have any stride where its size is 1, and reshape keeps that stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, that torch gives to a new tensor of ``shape``."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
