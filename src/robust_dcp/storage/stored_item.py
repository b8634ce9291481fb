"""The bytes of one stored item, and the tensor (or the part of one) that they hold.

Owns reading and checking of a single item, whoever wrote it: bounds, checksums, only the bytes that are needed,
straight into the target where that is possible. Knows nothing of plans and planners; called from several threads.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final, Protocol

import torch

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.storage.checksum import crc32
from robust_dcp.storage.disk import Disk, OpenFile
from robust_dcp.storage.objects import load_object
from robust_dcp.storage.parse_record import ParsedRecord, parse_record
from robust_dcp.storage.torch_zip import contiguous_strides, payload_view, record_template

__all__ = ["ItemBytes", "ItemInFile", "ItemInMemory", "check_members", "read_tensor", "takes_bytes"]

# Read and checked in pieces of this size, so that the checksum finds its data in the processor's cache.
_BLOCK_NBYTES: Final = 2 << 20


class ItemBytes(Protocol):
    """An item as it is stored: ``nbytes`` bytes, and what to call them in an error.

    ``read`` and ``read_into`` take offsets from the start of the item, and raise :class:`CorruptCheckpoint` if the
    item or the file ends before what was asked for.
    """

    file: str
    item: str
    nbytes: int

    def read(self, offset: int, nbytes: int) -> bytes: ...

    def read_into(self, view: memoryview, offset: int) -> None: ...


class ItemInFile:
    """An item at ``offset`` of an open file. ``check_stop`` is called before each read, and raises to give up."""

    def __init__(
        self, disk: Disk, opened: OpenFile, item: str, offset: int, nbytes: int, check_stop: Callable[[], None]
    ) -> None:
        self.file = opened.path
        self.item = item
        self.nbytes = nbytes
        self._disk = disk
        self._opened = opened
        self._offset = offset
        self._check_stop = check_stop

    def read(self, offset: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def read_into(self, view: memoryview, offset: int) -> None:
        self._check_stop()
        _check_bounds(self, offset, view.nbytes)
        found = self._disk.pread_into(self._opened, view, self._offset + offset)
        if found != view.nbytes:
            raise _corrupt(
                self,
                f"{view.nbytes} bytes at offset {self._offset + offset}",
                f"a file that ends after {found} of them",
            )


class ItemInMemory:
    """An item whose stored bytes had to be transformed (decompressed, say) as a whole."""

    def __init__(self, file: str, item: str, data: bytes) -> None:
        self.file = file
        self.item = item
        self.nbytes = len(data)
        self._data = memoryview(data)

    def read(self, offset: int, nbytes: int) -> bytes:
        _check_bounds(self, offset, nbytes)
        return bytes(self._data[offset : offset + nbytes])

    def read_into(self, view: memoryview, offset: int) -> None:
        _check_bounds(self, offset, view.nbytes)
        view[:] = self._data[offset : offset + view.nbytes]


def takes_bytes(target: torch.Tensor) -> bool:
    """Whether the bytes of a tensor can be read straight into ``target``."""
    return (
        type(target) in (torch.Tensor, torch.nn.Parameter)
        and target.device.type == "cpu"
        and target.layout == torch.strided
        and not (target.is_quantized or target.is_conj() or target.is_neg())
        and target.is_contiguous()
    )


def read_tensor(
    stored: ItemBytes,
    offsets: Sequence[int],
    lengths: Sequence[int],
    *,
    into: torch.Tensor | None = None,
    expected: tuple[torch.dtype, tuple[int, ...]] | None = None,
    verify_checksum: bool = True,
    trusted: bool = False,
) -> torch.Tensor | None:
    """Read the box of ``lengths`` at ``offsets`` of a stored tensor.

    Only the bytes from its first to its last element are read: for a slice along dimension 0 exactly its own, for
    other boxes the rows that they touch. The checksum is verified if these are all bytes of the tensor, since it
    covers them all.

    Args:
        into: a tensor of size ``lengths`` for which :func:`takes_bytes` holds. It is read into if it has the stored
            dtype and the box is stored in one piece, and holds garbage if that fails.
        expected: dtype and shape according to the metadata. A record that we wrote of these is recognised at once.
        trusted: passed to :func:`load_object` for records of anything but a plain tensor.

    Returns:
        ``None`` if ``into`` has been filled; else a CPU tensor of size ``lengths`` and of the stored dtype.

    Raises:
        CorruptCheckpoint: no such tensor, or its bytes are not those that were written.
        UnsafeCheckpoint: the record names classes that are not known to be data.
        StorageError: a read failed.
    """
    record = _recognised(stored, expected) or parse_record(stored.read, stored.nbytes)
    if record is None:
        whole = _loaded(stored, verify_checksum, trusted)
        _check_box(stored, whole.shape, offsets, lengths)
        for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            if length != whole.shape[dimension]:  # not every kind of tensor can be narrowed, and few need it
                whole = whole.narrow(dimension, offset, length)
        return whole

    _check_box(stored, record.shape, offsets, lengths)
    if prod(lengths) == 0:
        return torch.empty(tuple(lengths), dtype=record.dtype)
    first = record.storage_offset + sum(o * s for o, s in zip(offsets, record.stride, strict=True))
    count = 1 + sum((n - 1) * s for n, s in zip(lengths, record.stride, strict=True))
    straight = into is not None and into.dtype == record.dtype and _in_one_piece(lengths, record.stride)
    buffer = into if into is not None and straight else torch.empty(count, dtype=record.dtype)
    view = payload_view(buffer)
    whole_storage = first == 0 and view.nbytes == record.data_nbytes
    if whole_storage and verify_checksum and record.crc32 is not None:
        _read_checked(stored, view, record.data_offset, record.crc32)
    else:
        stored.read_into(view, record.data_offset + first * record.dtype.itemsize)
    return None if straight else buffer.as_strided(tuple(lengths), record.stride)


def _recognised(stored: ItemBytes, expected: tuple[torch.dtype, tuple[int, ...]] | None) -> ParsedRecord | None:
    """The record, if its header is, byte for byte, the one that we write for a tensor as the metadata describes it."""
    template = None if expected is None else record_template(*expected)
    if template is None or template.nbytes != stored.nbytes:
        return None
    crc = template.crc32_of_header(stored.read(0, template.header_nbytes))
    if crc is None:
        return None
    return ParsedRecord(
        dtype=template.dtype,
        shape=template.shape,
        stride=contiguous_strides(template.shape),
        storage_offset=0,
        requires_grad=False,
        data_offset=template.header_nbytes,
        data_nbytes=template.payload_nbytes,
        crc32=crc,
    )


def _loaded(stored: ItemBytes, verify_checksum: bool, trusted: bool) -> torch.Tensor:
    """The tensor of a record that only ``torch.load`` understands: quantized, sparse, compressed, of an old format."""
    data = stored.read(0, stored.nbytes)
    if verify_checksum:
        check_members(stored, data)
    loaded: Any = load_object(data, file=stored.file, item=stored.item, trusted=trusted)
    if not isinstance(loaded, torch.Tensor):
        raise _corrupt(stored, "a tensor", f"a {type(loaded).__name__}")
    return loaded.detach()


def check_members(stored: ItemBytes, data: bytes) -> None:
    """Compare the members of ``data``, if it is a zip, with their checksums; ``torch.load`` does not.

    Raises:
        CorruptCheckpoint: one does not match, or the archive is broken.
    """
    if not data.startswith(b"PK\x03\x04"):
        return
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.infolist():
                if member.CRC:  # 0 where torch.serialization.set_crc32_options(False) was set
                    archive.read(member)
    except Exception as error:  # zipfile raises many kinds for broken archives
        raise _corrupt(stored, "an intact zip archive", str(error)) from error


def _read_checked(stored: ItemBytes, view: memoryview, offset: int, expected: int) -> None:
    found = 0
    for start in range(0, view.nbytes, _BLOCK_NBYTES):
        block = view[start : start + _BLOCK_NBYTES]
        stored.read_into(block, offset + start)
        found = crc32(block, found)
    if found != expected:
        raise _corrupt(stored, f"data with CRC-32 {expected:08x}", f"{found:08x}")


def _in_one_piece(lengths: Sequence[int], stride: Sequence[int]) -> bool:
    step = 1
    for length, stored_step in zip(reversed(lengths), reversed(stride), strict=True):
        if length != 1 and stored_step != step:
            return False
        step *= length
    return True


def _check_box(stored: ItemBytes, shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> None:
    inside = len(shape) == len(offsets) == len(lengths) and all(
        min(offset, length) >= 0 and offset + length <= size
        for size, offset, length in zip(shape, offsets, lengths, strict=True)
    )
    if not inside:
        box = f"a tensor with a box of {list(lengths)} at {list(offsets)}"
        raise _corrupt(stored, box, f"one of shape {list(shape)}")


def _check_bounds(stored: ItemBytes, offset: int, nbytes: int) -> None:
    if offset < 0 or offset + nbytes > stored.nbytes:
        raise _corrupt(stored, f"{nbytes} bytes at {offset}", f"an item of {stored.nbytes} bytes")


def _corrupt(stored: ItemBytes, expected: str, found: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"item {stored.item!r} in {stored.file} is damaged: expected {expected}, found {found}",
        file=stored.file,
        item=stored.item,
        expected=expected,
        found=found,
    )
