"""A file of ``torch.save`` as the source of a conversion.

The state dict comes from ``torch.load(weights_only=True, mmap=True)``, which executes nothing and reads no data.
Tensors whose elements lie one after the other are then read from their places in the file, and so take no more memory
than a piece. The others are read through the mapping. Bytes are compared with the CRC-32 that the zip archive has of
each record (``torch/serialization.py``, ``_save``).
"""

from __future__ import annotations

import sys
import zipfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from robust_dcp.conversion.outline import outline_of
from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.pieces import NamedTensor, Piece
from robust_dcp.storage.records.checksum import crc32, crc32_of_both

__all__ = ["TorchFile"]

_BLOCK_NBYTES: Final = 8 << 20


class _Place(NamedTuple):
    """Where the elements of a tensor begin in the file, and the record that holds them."""

    offset: int
    record: _Record
    is_whole_record: bool


class TorchFile:
    """See :class:`robust_dcp.conversion.sources.Source`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._disk: Disk = PosixDisk()
        with open(path, "rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"  # the format of before torch 1.6 is none, and cannot be mapped
        loaded = self._loaded(mmap=is_zip)
        if not isinstance(loaded, dict):
            raise CorruptCheckpoint(
                f"{path} holds a {type(loaded).__name__}: expected a dict, as state_dict() gives it", file=path
            )
        flat, paths = flatten_state_dict(loaded)
        self._values = {
            name: value.detach().resolve_conj().resolve_neg() if isinstance(value, torch.Tensor) else value
            for name, value in flat.items()
        }
        self.tensors = {
            name: NamedTensor(name, value.dtype, tuple(value.shape))
            for name, value in self._values.items()
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized
        }
        self.objects = tuple(name for name in self._values if name not in self.tensors)
        self.paths = dict(paths)
        self.outline = outline_of(loaded, flat, self.paths)
        self._file = self._disk.open_read(path)
        self._places: dict[str, _Place] = {}
        if is_zip:
            self._find_places()

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        return [self._read(piece) for piece in pieces]

    def load(self, name: str) -> Any:
        return self._values[name]

    def _loaded(self, **how: Any) -> Any:
        try:
            return torch.load(self._path, **{"map_location": "cpu", **how}, weights_only=True)
        except Exception as error:
            reason = _reason(error)
            is_no_pickle = "Unsupported operand" in reason
            if not is_no_pickle and ("weights_only" in str(error).lower() or "Unsupported" in reason):
                raise UnsafeCheckpoint(
                    f"{self._path} asks for a class that is not plain data, and is refused: {reason:.300}",
                    file=self._path,
                ) from error
            raise CorruptCheckpoint(
                f"{self._path} cannot be used: expected a file of torch.save, found {type(error).__name__}: "
                f"{reason:.300}",
                file=self._path,
            ) from error

    def _find_places(self) -> None:
        """Find the places of tensors in the file, and compare at once the records whose tensors have none."""
        records = _Records(self._path, self._disk)
        storages = self._offsets_of_storages() if records.byte_order == sys.byteorder else {}
        users = Counter(storages.values())
        for name, offset in storages.items():
            value, record = self._values[name], records.at(offset)
            if record is None or not value.is_contiguous():
                continue
            is_whole = users[offset] == 1 and value.nbytes == record.nbytes
            self._places[name] = _Place(offset + int(value.storage_offset()) * value.itemsize, record, is_whole)
        read_in_pieces = {place.record for place in self._places.values() if place.is_whole_record}
        for record in records.all:
            if record not in read_in_pieces:
                record.compare(self._disk, self._file)

    def _offsets_of_storages(self) -> dict[str, int]:
        """Where in the file the storages of tensors begin; of none with a torch that does not say it."""
        found = {}
        try:
            flat, _ = flatten_state_dict(self._loaded(map_location="meta"))
        except (CorruptCheckpoint, UnsafeCheckpoint):  # not everything that torch can load can be loaded without data
            # torch 2.7 fails when it checks sparse tensors without data, and would check them again in its next load.
            getattr(torch._utils, "_sparse_tensors_to_validate", []).clear()
        else:
            for name in self.tensors:
                offset = getattr(flat[name].untyped_storage(), "_checkpoint_offset", None)
                if offset is not None and not flat[name].is_conj() and not flat[name].is_neg():
                    found[name] = offset
        return found

    def _read(self, piece: Piece) -> torch.Tensor:
        place = self._places.get(piece.tensor.name)
        if place is None:
            value = self._values[piece.tensor.name]
            for dimension, (offset, length) in enumerate(zip(piece.offsets, piece.lengths, strict=True)):
                value = value.narrow(dimension, offset, length)
            return value
        found = torch.empty(piece.lengths, dtype=piece.tensor.dtype)
        if piece.nbytes:
            strides = [prod(piece.tensor.shape[dimension + 1 :]) for dimension in range(len(piece.offsets))]
            begin = sum(map(int.__mul__, piece.offsets, strides)) * piece.tensor.dtype.itemsize
            data = memoryview(found.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            if self._disk.pread_into(self._file, data, place.offset + begin) < piece.nbytes:
                raise _damaged(self._path, f"{place.record.name} is cut off")
            if place.is_whole_record:
                place.record.add(begin, data)
        return found


class _Record:
    """A member of the archive. Its CRC-32 is put together from those of its pieces, which may come in any order."""

    def __init__(self, file: str, info: zipfile.ZipInfo, offset: int) -> None:
        self.name = info.filename
        self.offset = offset
        self.nbytes = info.file_size
        self._file = file
        # torch.save writes 0 after torch.serialization.set_crc32_options(False).
        self._expected = info.CRC or None
        self._pieces: list[tuple[int, int, int]] = []
        self._left = self.nbytes

    def add(self, begin: int, data: memoryview) -> None:
        """Take a piece, from byte ``begin`` on. The last one that was missing is compared with the others.

        Raises:
            CorruptCheckpoint: the record is not what was written.
        """
        self._pieces.append((begin, len(data), crc32(data)))
        self._left -= len(data)
        if self._left:
            return
        found = 0
        for _, nbytes, value in sorted(self._pieces):
            found = crc32_of_both(found, value, nbytes)
        self._compare(found)

    def compare(self, disk: Disk, file: Any) -> None:
        """Read the whole record, and compare it.

        Raises:
            CorruptCheckpoint: it is not what was written.
        """
        if self._expected is None:
            return
        found = at = 0
        buffer = memoryview(bytearray(min(_BLOCK_NBYTES, self.nbytes)))
        while at < self.nbytes:
            part = buffer[: self.nbytes - at]
            if disk.pread_into(file, part, self.offset + at) < len(part):
                raise _damaged(self._file, f"{self.name} is cut off")
            found = crc32(part, found)
            at += len(part)
        self._compare(found)

    def _compare(self, found: int) -> None:
        if self._expected not in (None, found):
            raise _damaged(self._file, f"{self.name} has the CRC-32 {found:08x} instead of {self._expected:08x}")


class _Records:
    """The records of the archive.

    Attributes:
        all: in the order of the file.
        byte_order: of the elements of tensors.

    Raises:
        CorruptCheckpoint: the archive is damaged.
    """

    def __init__(self, path: str, disk: Disk) -> None:
        try:
            with zipfile.ZipFile(path) as archive:
                infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
                self.all = [_Record(path, info, _offset_of(archive, info)) for info in infos]
                self.byte_order = "little"  # of files that do not say it
                for record in self.all:
                    if record.name.split("/", 1)[-1] == "byteorder":
                        self.byte_order = _read_at(archive, record.offset, record.nbytes).decode()
        except (zipfile.BadZipFile, ValueError, EOFError) as error:
            raise _damaged(path, f"{error}") from error
        self._offsets = [record.offset for record in self.all]

    def at(self, offset: int) -> _Record | None:
        """The record whose data begins there."""
        place = bisect_left(self._offsets, offset)
        found = self.all[place] if place < len(self.all) else None
        return found if found is not None and found.offset == offset else None


def _offset_of(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """Where the data of a member begins: behind its local header, which ends with its name and extra fields."""
    lengths = _read_at(archive, info.header_offset + 26, 4)
    return info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def _read_at(archive: zipfile.ZipFile, offset: int, nbytes: int) -> bytes:
    file: Any = archive.fp
    file.seek(offset)
    return bytes(file.read(nbytes))


def _damaged(path: str, found: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{path} is damaged: {found}; take another file, or write it anew", file=path, found=found)


def _reason(error: Exception) -> str:
    """What torch says of the file, without the advice around it, which is to load it with less care."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].rpartition("trusted source.")[2].strip()
    return text.partition("\n")[0]
