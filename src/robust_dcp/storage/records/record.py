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
from functools import cache, cached_property, lru_cache
from math import prod
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.storage import TypedStorage, UntypedStorage

from robust_dcp.staging.blocks import is_plain
from robust_dcp.storage.records.kinds import expect
from robust_dcp.storage.records.torch_kinds import storage_of
from robust_dcp.storage.records.unpickler import Unpickler

DATA_ALIGNMENT: Final = 64
"""The data starts at a multiple of this from the start of the record, as in records of ``torch.save``."""

NOT_ALIKE: Final = -1
"""In the place of the CRC-32 of a record that is another one."""

ReadRange = Callable[[int, int], bytes]
"""``read(offset, nbytes)``: bytes of a record; fewer, or none, past its end."""

Int64 = npt.NDArray[np.int64]

_UINT32: Final = struct.Struct("<I")


class Record(msgspec.Struct, frozen=True, dict=True):
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

    @cached_property
    def frame(self) -> tuple[tuple[int, int, bytes], ...]:
        """The bytes that all records of this writer, dtype and shape have in common: (begin, end, bytes)."""
        parts = []
        for start, content in ((0, self.header), (self.nbytes - len(self.trailer), self.trailer)):
            at, end = start, start + len(content)
            for low, high in (*self.unread_at, (end, end)):
                if at < low <= end:
                    parts.append((at, low, content[at - start : low - start]))
                if start <= low < end:
                    at = high
        return tuple(parts)

    def is_at(self, memory: Any, at: int) -> bool:
        """Whether the record at ``at`` of ``memory`` differs from this one in checksums and data only."""
        for begin, end, part in self.frame:  # noqa: SIM110 (this is faster, and runs for each record)
            if bytes(memory[at + begin : at + end]) != part:  # a memoryview would be compared byte by byte
                return False
        return True

    def crc32s_in(self, data: npt.NDArray[np.uint8], starts: Int64) -> Int64:
        """The CRC-32 in each of the records that begin at ``starts``, 0 if it has none; ``NOT_ALIKE`` for a record that
        is not like this one, as :meth:`is_at` says.
        """
        alike = np.ones(len(starts), dtype=np.bool_)
        for begin, end, part in self.frame:
            alike &= (_windows(data, end - begin)[starts + begin] == np.frombuffer(part, dtype=np.uint8)).all(axis=1)
        crcs = _windows(data, _UINT32.size)[starts + self.crc32_at[-1]].view("<u4")[:, 0]
        return np.where(alike, crcs.astype(np.int64), np.int64(NOT_ALIKE))

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
    call = (function, (storage, *place, hooks, *rest))
    pickler = _Pickler(buffer, prod(shape), prod(shape) * dtype.itemsize, call)
    pickler.dump(pickler)
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


class _Pickler(pickle.Pickler):
    """Pickles as ``torch.save`` does: a storage by its class, number, device and length. Itself it pickles as ``call``,
    a function and its arguments, which is how a tensor is pickled.
    """

    def __init__(self, buffer: io.BytesIO, numel: int, nbytes: int, call: tuple[Any, ...] = ()) -> None:
        super().__init__(buffer, protocol=2)
        self._numel = numel
        self._nbytes = nbytes
        self._call = call

    def reducer_override(self, found: Any) -> Any:
        return self._call if found is self else NotImplemented

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
    """A member of a zip archive.

    Attributes:
        offset, nbytes: where its bytes lie.
        crc32: their CRC-32; 0 if none was computed.
        header_at: where its local header begins.
        crc32_at: where the CRC-32 stands in the directory of the archive.
    """

    offset: int
    nbytes: int
    crc32: int
    header_at: int
    crc32_at: int


def zip_members(
    source: bytes | ReadRange, nbytes: int, max_directory_nbytes: int = sys.maxsize
) -> tuple[dict[str, ZipMember], int]:
    """The members of a ``torch.save`` archive of ``nbytes`` bytes by name, without the archive's own folder.

    Args:
        source: the bytes of the archive, or what reads them.

    Returns:
        They, and where the directory begins, which extends to the end of the archive.

    Raises:
        ValueError: ``torch.save`` does not write such archives: members are compressed or encrypted, lie outside of the
            archive, overlap, or have the same name.
    """

    def bytes_at(offset: int, count: int) -> bytes:
        if not 0 <= offset <= offset + count <= nbytes:
            raise ValueError("it is cut off, or its directory is damaged")
        return source[offset : offset + count] if isinstance(source, bytes) else source(offset, count)

    members: dict[str, ZipMember] = {}
    try:
        end_at = nbytes - _END.size
        locator_at = end_at - _END64_LOCATOR.size
        magic, _, _, _, count, length, directory_at, comment = _END.unpack(bytes_at(end_at, _END.size))
        is_end = magic == b"PK\x05\x06" and not comment
        if locator_at >= 0:
            magic, _, end64_at, _ = _END64_LOCATOR.unpack(bytes_at(locator_at, _END64_LOCATOR.size))
            if magic == b"PK\x06\x07":
                magic, *_, count, length, directory_at = _END64.unpack(bytes_at(end64_at, _END64.size))
                is_end = is_end and magic == b"PK\x06\x06"
        expect(is_end, "it does not end as such an archive")
        expect(length <= max_directory_nbytes, "its directory is too long")
        directory, at = bytes_at(directory_at, length), 0
        for _ in range(count):
            magic, _, _, flags, method, _, _, crc32, stored, held, n_name, n_extra, n_comment, _, _, _, header_at = (
                _CENTRAL_HEADER.unpack_from(directory, at)
            )
            is_plain = magic == b"PK\x01\x02" and method == 0 and not flags & 1  # stored, and not encrypted
            expect(is_plain, "a member is compressed or encrypted")
            crc32_at, at = directory_at + at + _CENTRAL_CRC32_AT, at + _CENTRAL_HEADER.size
            name = directory[at : at + n_name].decode("ascii").partition("/")[2]
            if _UINT32_MAX in (held, stored, header_at):
                extra = directory[at + n_name : at + n_name + n_extra]
                held, stored, header_at = _with_zip64((held, stored, header_at), extra)
            # Of two with one name some readers take the first.
            expect(stored == held and name not in members, "a member has two lengths, or two members have one name")
            # Only the local header says where the bytes begin.
            magic, *_, n_local_name, n_local_extra = _LOCAL_HEADER.unpack(bytes_at(header_at, _LOCAL_HEADER.size))
            expect(magic == ZIP_MAGIC, "a member does not begin where the directory says")
            offset = header_at + _LOCAL_HEADER.size + n_local_name + n_local_extra
            members[name] = ZipMember(offset, held, crc32, header_at, crc32_at)
            at += n_name + n_extra + n_comment
        end = 0
        for member in sorted(members.values()):
            is_between = end <= member.offset and member.offset + member.nbytes <= nbytes
            expect(is_between, "its members lie over each other, or outside of it")
            end = member.offset + member.nbytes
    except (ValueError, struct.error) as error:
        raise ValueError(f"no zip archive as torch.save writes it: {error}") from None
    return members, directory_at


def _with_zip64(numbers: tuple[int, ...], extra: bytes) -> list[int]:
    """Size, stored size and offset of a member. Those that do not fit into 4 bytes are in its zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            large = iter(struct.unpack_from(f"<{nbytes // 8}Q", extra, at + 4))
            return [next(large, number) if number == _UINT32_MAX else number for number in numbers]
        at += 4 + nbytes
    return list(numbers)


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
    if type(tensor) is not torch.Tensor or not is_plain(tensor) or [key for key, _ in storages] != ["0"]:
        return None
    return tensor, storages[0][1]


def parsed_record(read: ReadRange, nbytes: int) -> Record | None:
    """Find the tensor in a record of ``nbytes`` bytes, in two small reads if it is a usual one.

    Returns:
        ``None`` if this is not an uncompressed zip with one tensor as ``torch.save`` writes it, in this machine's byte
        order. Then ``objects`` has to find out whether it is something else, or damaged.
    """
    tail_at = max(0, nbytes - _AHEAD_NBYTES)
    tail = read(tail_at, nbytes - tail_at)
    head = read(0, _AHEAD_NBYTES) if tail_at else tail

    def bytes_at(offset: int, count: int) -> bytes:
        if offset + count <= len(head):
            return head[offset : offset + count]
        return tail[offset - tail_at : offset - tail_at + count] if offset >= tail_at else read(offset, count)

    def contents(member: ZipMember) -> bytes | None:
        """The bytes of a small member; ``None`` if it is too long, or damaged."""
        data = bytes_at(member.offset, min(member.nbytes, _MAX_CONTENTS_NBYTES))
        return data if len(data) == member.nbytes and member.crc32 in (0, zlib.crc32(data)) else None

    try:
        members, directory_at = zip_members(bytes_at, nbytes, _MAX_DIRECTORY_NBYTES)
    except ValueError:
        return None
    pickled, data, order = (members.get(name) for name in ("data.pkl", "data/0", "byteorder"))
    # With a second storage, or the members of a TorchScript archive, this is more than one tensor.
    if pickled is None or data is None or any(name.startswith(("data/1", "code/", "constants")) for name in members):
        return None
    if (contents(order) if order else b"little") != sys.byteorder.encode():
        return None
    found = _pickled_tensor(contents(pickled) or b"")
    if found is None or found[1] != data.nbytes:
        return None
    tensor, trailer_nbytes = found[0], nbytes - directory_at
    # What was read to find this must lie before the data or in the directory, to be compared in other records.
    is_framed = directory_at >= data.offset + data.nbytes and data.offset + trailer_nbytes <= _MAX_FRAME_NBYTES
    is_framed = is_framed and all(each is None or each.header_at < data.header_at for each in (pickled, order))
    crc32_at = (data.header_at + _LOCAL_CRC32_AT, data.crc32_at)
    unread = [member.crc32_at for member in members.values() if member not in (pickled, order)]
    unread += [crc32_at[0]] if crc32_at[0] + _UINT32.size <= data.offset else []
    return Record(
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        nbytes=nbytes,
        data_offset=data.offset,
        data_nbytes=data.nbytes,
        stride=tensor.stride(),
        storage_offset=int(tensor.storage_offset()),
        crc32=data.crc32 or None,  # torch.save writes 0 after torch.serialization.set_crc32_options(False)
        header=bytes_at(0, data.offset) if is_framed else b"",
        trailer=bytes_at(directory_at, trailer_nbytes) if is_framed else b"",
        crc32_at=crc32_at,
        unread_at=tuple((at, at + _UINT32.size) for at in sorted(unread)),
    )


_MOST_KNOWN: Final = 1024
"""Each known record takes 1 to 2 KiB. A load with more has few of each, so to know them gains little."""


KnownRecords = dict[tuple[int, torch.dtype, tuple[int, ...]], "Record | None"]
"""By length, dtype and shape: the record that we write, or the first one that was found, which was parsed; ``None`` if
that is not the usual record of a contiguous tensor.
"""


def known_record(
    known: KnownRecords, memory: Any, at: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[Record, int] | None:
    """The record of ``nbytes`` bytes at ``at`` of ``memory``, and its CRC-32 (0 if it has none). It is recognised by a
    known one, if all their bytes outside of data and checksums are equal.

    Returns:
        ``None`` if it is not the usual record of a contiguous tensor of ``dtype`` and ``shape``.
    """
    key = (nbytes, dtype, shape)
    record = known.get(key)
    if record is None and key not in known:  # other threads may clear it meanwhile
        if len(known) >= _MOST_KNOWN:
            known.clear()
        record = framed_record(dtype, tuple(shape))
        if record is None or record.nbytes != nbytes or not record.is_at(memory, at):
            record = parsed_record(lambda begin, count: bytes(memory[at + begin : at + begin + count]), nbytes)
            is_usual = record is not None and record.is_contiguous and bool(record.header)
            if record is None or not is_usual or (record.dtype, record.shape) != (dtype, tuple(shape)):
                record = None
        known[key] = record
    if record is None or not record.is_at(memory, at):
        return None
    return record, int(_UINT32.unpack_from(memory, at + record.crc32_at[-1])[0])


def _windows(data: npt.NDArray[np.uint8], nbytes: int) -> npt.NDArray[np.uint8]:
    """uint8 ``[n, nbytes]``: the bytes from each place in ``data`` on, without a copy."""
    return np.ndarray((len(data) - nbytes + 1, nbytes), np.uint8, data, 0, (1, 1))


# Tensors.


def is_fixed_size(tensor: torch.Tensor) -> bool:
    """Whether a record of ``tensor`` (made contiguous, if it is not) can be framed by :func:`framed_record`.

    ``False`` for tensors that dtype, shape and data do not describe fully: sparse, quantized, nested and other layouts,
    pending conjugation or negation, tensor subclasses, and meta tensors. A ``Parameter`` is saved as its data, as DCP
    does.
    """
    return is_plain(tensor) and not tensor.is_meta and _reduced(tensor.dtype) is not None


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
