"""The bytes of one tensor as a ``torch.save`` record: a zip archive framed around the raw data.

This module makes header and trailer, and knows their lengths. It never touches a file and never copies the data. The
layout asks it for lengths, the writer for bytes, and the reader recognises its headers. ``parse_record`` reads records
of other writers.

A record is ``header + payload + trailer``::

    archive/data.pkl  | archive/version | archive/byteorder | header of archive/data/0 | payload | directory, end
    <------------------- header_nbytes, a multiple of 64 ------------------------------>           <- trailer ->

``torch.load`` (also with ``weights_only=True`` and ``mmap=True``) and ``FileSystemReader`` read it. It has the members
that ``torch.save`` writes, except those that only help a reader to guess offsets. All lengths depend on dtype, shape
and ``requires_grad`` alone, so every place in a file is known before there is any data.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any, Final, NamedTuple

import torch

__all__ = [
    "PAYLOAD_ALIGNMENT",
    "RecordTemplate",
    "contiguous_strides",
    "is_fixed_size",
    "payload_view",
    "raw_frame",
    "record_template",
    "sample_pickle",
    "template_of",
]

PAYLOAD_ALIGNMENT: Final = 64
"""The payload starts at a multiple of this from the start of the record, as in records of ``torch.save``."""

_PREFIX: Final = "archive/"  # the folder in the archive when torch.save writes to a stream
_DATA_NAME: Final = b"archive/data/0"
_PICKLE_NAME: Final = "data.pkl"
_UINT32_MAX: Final = 0xFFFFFFFF
_DOS_DATE: Final = 0x0021  # 1980-01-01, the first date of the zip format; torch.save writes 0, which is not a date

# The structures of a zip file, from APPNOTE.TXT 4.3.7, 4.5.3, 4.3.12, 4.3.14 to 4.3.16.
_LOCAL_HEADER: Final = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL_HEADER: Final = struct.Struct("<4sHHHHHHIIIHHHHHII")
_ZIP64_EXTRA: Final = struct.Struct("<HHQQ")
_END64: Final = struct.Struct("<4sQHHIIQQQQ")
_END64_LOCATOR: Final = struct.Struct("<4sIQI")
_END: Final = struct.Struct("<4sHHHHIIH")
_CRC: Final = struct.Struct("<I")
_LOCAL_CRC_AT: Final = 14
_LOCAL_SIZE_AT: Final = 18
_CENTRAL_CRC_AT: Final = 16
_VERSION_NEEDED: Final = 45  # zip64
_PADDING_ID: Final = 0x4246  # "FB": the extra field that PyTorch's own writer pads with


@dataclass(frozen=True)
class RecordTemplate:
    """The frame of every record of one dtype and shape. Only the data and its CRC-32 are missing.

    Attributes:
        dtype, shape, requires_grad: those that a reader gets back. The strides are those of a contiguous tensor.
        header_nbytes: bytes before the payload, a multiple of :data:`PAYLOAD_ALIGNMENT`.
        payload_nbytes: bytes of the tensor's data.
        trailer_nbytes: bytes after the payload.
        blank_header, blank_trailer: the bytes before and after the payload, with 0 in place of its CRC-32.
        header_crc_at, trailer_crc_at: where the CRC-32 goes in each of them: 4 bytes, little-endian.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    header_nbytes: int
    payload_nbytes: int
    trailer_nbytes: int
    blank_header: bytes
    blank_trailer: bytes
    header_crc_at: int
    trailer_crc_at: int

    @property
    def nbytes(self) -> int:
        """Length of the whole record in bytes."""
        return self.header_nbytes + self.payload_nbytes + self.trailer_nbytes

    @property
    def crc_at(self) -> tuple[int, ...]:
        """Where the CRC-32 of the payload goes, in bytes from the start of the record."""
        if not self.header_nbytes:
            return ()
        return self.header_crc_at, self.header_nbytes + self.payload_nbytes + self.trailer_crc_at

    def header(self, crc32: int) -> bytes:
        """The bytes before the payload; ``crc32`` is ``zlib.crc32`` of the payload."""
        before, after = _cut(self.blank_header, self.header_crc_at)
        return before + _CRC.pack(crc32) + after

    def trailer(self, crc32: int) -> bytes:
        """The bytes after the payload."""
        before, after = _cut(self.blank_trailer, self.trailer_crc_at)
        return before + _CRC.pack(crc32) + after

    def crc32_of_header(self, header: bytes | bytearray | memoryview) -> int | None:
        """The CRC-32 in ``header``, if it is this template's header with any CRC; else ``None``."""
        before, after = _cut(self.blank_header, self.header_crc_at)
        end = len(before) + _CRC.size
        if len(header) != self.header_nbytes or header[: len(before)] != before or header[end:] != after:
            return None
        return int(_CRC.unpack_from(header, len(before))[0])


@lru_cache(maxsize=4096)
def record_template(dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool = False) -> RecordTemplate | None:
    """The frame for contiguous tensors of ``dtype`` and ``shape``.

    Args:
        dtype: any dtype; ``shape``: sizes, ``()`` for a scalar, zeros allowed.
        requires_grad: the default is ``False``, because DCP saves detached tensors.

    Returns:
        ``None`` if this torch pickles tensors of ``dtype`` in a way that we do not know (quantized dtypes).
        ``torch.save`` writes such an item, and it has no fixed size.
    """
    pickle_parts = _pickle_parts(dtype)
    if pickle_parts is None:
        return None
    return _framed(pickle_parts.pickle_of(shape, requires_grad), dtype, tuple(shape), requires_grad)


@lru_cache(maxsize=4096)
def raw_frame(dtype: torch.dtype, shape: tuple[int, ...]) -> RecordTemplate:
    """The frame of nothing but the data. The head of the file holds the CRC-32."""
    return RecordTemplate(dtype, tuple(shape), False, 0, prod(shape) * dtype.itemsize, 0, b"", b"", 0, 0)


def template_of(header: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> RecordTemplate | None:
    """The frame of a record that another version of torch pickled, by the pickle at the beginning of its ``header``.

    Returns:
        ``None`` if the header does not begin with a pickle as :func:`record_template` places it.
    """
    at = _LOCAL_HEADER.size + len(_PREFIX + _PICKLE_NAME)
    if len(header) < at or header[_LOCAL_HEADER.size : at] != (_PREFIX + _PICKLE_NAME).encode():
        return None
    (nbytes,) = struct.unpack_from("<I", header, _LOCAL_SIZE_AT)
    return _framed(header[at : at + nbytes], dtype, shape, requires_grad=False)


def _framed(pickled: bytes, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> RecordTemplate:
    payload_nbytes = prod(shape) * dtype.itemsize
    members = [
        (_PICKLE_NAME, pickled),
        ("version", b"3\n"),  # version of the archive format, as torch.save writes it and readers expect it
        ("byteorder", sys.byteorder.encode()),
    ]
    header = bytearray()
    directory = bytearray()
    for name, data in members:
        path = (_PREFIX + name).encode()
        directory += _central_entry(path, zlib.crc32(data), len(data), len(header))
        header += _local_header(path, zlib.crc32(data), len(data), b"") + data
    header_at, entry_at = len(header), len(directory)
    directory += _central_entry(_DATA_NAME, 0, payload_nbytes, header_at)
    header += _data_header(header_at, payload_nbytes)

    directory_at = len(header) + payload_nbytes
    trailer = bytes(directory) + _end(len(members) + 1, directory_at, len(directory))
    return RecordTemplate(
        dtype=dtype,
        shape=shape,
        requires_grad=requires_grad,
        header_nbytes=len(header),
        payload_nbytes=payload_nbytes,
        trailer_nbytes=len(trailer),
        blank_header=bytes(header),
        blank_trailer=trailer,
        header_crc_at=header_at + _LOCAL_CRC_AT,
        trailer_crc_at=entry_at + _CENTRAL_CRC_AT,
    )


def is_fixed_size(tensor: torch.Tensor) -> bool:
    """Whether a record of ``tensor`` (made contiguous, if it is not) can be framed by :func:`record_template`.

    ``False`` for tensors that dtype, shape and data do not describe fully: sparse, quantized, nested and other layouts,
    pending conjugation or negation, tensor subclasses, and meta tensors. A ``Parameter`` is saved as its data, as DCP
    does.
    """
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and tensor.device.type != "meta"
        and record_template(tensor.dtype, tuple(tensor.shape)) is not None
    )


def payload_view(tensor: torch.Tensor) -> memoryview:
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


class _PickleParts(NamedTuple):
    """``data.pkl`` of a tensor of one dtype, cut at the storage size, at shape and strides, and at requires_grad."""

    before_storage_size: bytes
    storage_size_per_element: int
    before_shape: bytes
    before_requires_grad: bytes
    rest: bytes

    def pickle_of(self, shape: tuple[int, ...], requires_grad: bool) -> bytes:
        strides = contiguous_strides(shape)
        return b"".join(
            (
                self.before_storage_size,
                _pickled_int(prod(shape) * self.storage_size_per_element),
                self.before_shape,
                _pickled_ints(shape),
                _pickled_ints(strides),
                self.before_requires_grad,
                pickle.NEWTRUE if requires_grad else pickle.NEWFALSE,
                self.rest,
            )
        )


# These numbers occur nowhere else in the sample's pickle.
_SAMPLE_SHAPE: Final = (11, 13)


@cache
def _pickle_parts(dtype: torch.dtype) -> _PickleParts | None:
    """Learn how this torch pickles tensors of ``dtype`` from one ``torch.save`` of a small tensor.

    So we need no table of dtypes and storage classes. ``None`` if the pickle does not have the known form.
    """
    data = sample_pickle(dtype)
    if data is None:
        return None
    # Opcodes that only fill the memo are left out. The memo's values for shape and strides are never used again.
    ops = [op for op in _positions(data) if "PUT" not in op.name and op.name != "MEMOIZE"]
    names = [op.name for op in ops]
    if names.count("BINPERSID") != 1:
        return None
    at = names.index("BINPERSID")
    size_op, requires_grad_op = ops[at - 2], ops[at + 8]
    rows, columns = _SAMPLE_SHAPE
    tensor_arguments = [(op.name, op.value) for op in ops[at - 1 : at + 9]]
    known_form = tensor_arguments == [
        ("TUPLE", None),
        ("BINPERSID", None),
        ("BININT1", 0),  # storage offset
        *(("BININT1", rows), ("BININT1", columns), ("TUPLE2", None)),
        *(("BININT1", columns), ("BININT1", 1), ("TUPLE2", None)),
        ("NEWFALSE", None),  # requires_grad
    ]
    # The size of a storage is in elements, or in bytes if the storage is untyped.
    size_per_element = {rows * columns: 1, rows * columns * dtype.itemsize: dtype.itemsize}.get(size_op.value)
    if not known_form or size_per_element is None:
        return None
    return _PickleParts(
        before_storage_size=data[: size_op.start],
        storage_size_per_element=size_per_element,
        before_shape=data[size_op.end : ops[at + 2].start],
        before_requires_grad=data[ops[at + 7].end : requires_grad_op.start],
        rest=data[requires_grad_op.end :],
    )


def sample_pickle(dtype: torch.dtype) -> bytes | None:
    """``data.pkl`` as ``torch.save`` writes it for a small tensor of ``dtype``; ``None`` if torch cannot save one."""
    buffer = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # torch may warn that a dtype is experimental or deprecated, but the user has not used it
            torch.save(torch.empty(_SAMPLE_SHAPE, dtype=dtype), buffer)
    except Exception:  # torch cannot make or save such a tensor; the error depends on version and dtype
        return None
    with zipfile.ZipFile(buffer) as archive:
        return archive.read(_PREFIX + "data.pkl")


class _Opcode(NamedTuple):
    name: str
    value: Any
    start: int
    end: int


def _positions(data: bytes) -> list[_Opcode]:
    found: list[tuple[str, Any, int]] = [
        (opcode.name, value, start or 0) for opcode, value, start in pickletools.genops(data)
    ]
    ends: Iterator[int] = iter([start for _, _, start in found[1:]] + [len(data)])
    return [_Opcode(name, value, start, next(ends)) for name, value, start in found]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, that torch gives to a new tensor of ``shape``."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _pickled_int(value: int) -> bytes:
    # pickle.dumps writes PROTO (2 bytes), the number, and STOP. torch.save's pickler writes the number in the same way.
    return pickle.dumps(value, protocol=2)[2:-1]


def _pickled_ints(values: tuple[int, ...]) -> bytes:
    if not values:
        return pickle.EMPTY_TUPLE
    return pickle.MARK + b"".join(map(_pickled_int, values)) + pickle.TUPLE


def _local_header(name: bytes, crc32: int, nbytes: int, extra: bytes) -> bytes:
    size = min(nbytes, _UINT32_MAX)
    fields = (_VERSION_NEEDED, 0, 0, 0, _DOS_DATE, crc32, size, size, len(name), len(extra))
    return _LOCAL_HEADER.pack(b"PK\x03\x04", *fields) + name + extra


def _data_header(start: int, payload_nbytes: int) -> bytes:
    """The local header of the payload, padded so that the payload is aligned."""
    zip64 = _ZIP64_EXTRA.pack(1, 16, payload_nbytes, payload_nbytes) if payload_nbytes >= _UINT32_MAX else b""
    unpadded = start + _LOCAL_HEADER.size + len(_DATA_NAME) + len(zip64) + 4  # 4: id and length of the padding
    padding = -unpadded % PAYLOAD_ALIGNMENT
    extra = zip64 + struct.pack("<HH", _PADDING_ID, padding) + b"Z" * padding
    return _local_header(_DATA_NAME, 0, payload_nbytes, extra)


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


def _cut(data: bytes, at: int) -> tuple[bytes, bytes]:
    """Cut out the CRC-32 at ``at``: the bytes before it and those after it."""
    return data[:at], data[at + _CRC.size :]
