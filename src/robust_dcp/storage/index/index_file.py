"""An open index. It reads only the slabs of sections that are asked for, and checks each of them.

Slabs are read into memory and not mapped: if somebody truncated a mapped file, the process would die. What was read
stays in memory for a while, up to a few MiB. ``stored_index`` calls this module.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from threading import Lock
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.index.form import SECTIONS, SLAB_NBYTES, DamagedIndex, Head, first_slabs, head_nbytes
from robust_dcp.storage.records.checksum import crc32

__all__ = ["Column", "IndexFile"]

_SLABS_KEPT: Final = 64

_FIRST_READ_NBYTES: Final = 256 << 10
"""So much is read at first and kept, which is all of most indices. Over a network each call takes its time, however
little it reads.
"""


class IndexFile:
    """An open index. Several threads may use it at once. The file is closed when nobody refers to it any more.

    Args:
        disk: the file system.
        path: the path of the file.

    Attributes:
        path: the path of the file.
        fit: the digest of the ``.metadata`` that the index belongs to.
        identity: 32 bytes. Two files with the same identity have the same contents.

    Raises:
        StorageError: the file cannot be read.
        DamagedIndex: its head or its checksums are not what was written.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self.path = path
        self._disk = disk
        self._file = disk.open_read(path)
        weakref.finalize(self, _close, disk, self._file)
        nbytes = disk.size(self._file)
        self._beginning = b""
        self._beginning = self._read(0, min(_FIRST_READ_NBYTES, nbytes))
        data = self._beginning[: head_nbytes()]
        head = Head.decode(data, nbytes, path)
        self.fit = head.fit
        self.identity = hashlib.sha256(data).digest()
        self._places = head.places
        self._first_slab = first_slabs(head.places)
        start, checksums_nbytes = head.places["checksums"]
        if checksums_nbytes != 4 * self._first_slab["checksums"]:
            raise self.damaged(f"it has {checksums_nbytes} bytes of checksums")
        checksums = self._read(start, checksums_nbytes)
        if crc32(checksums) != head.checksum:
            raise self.damaged("its checksums do not have their CRC-32")
        self._checksums = np.frombuffer(checksums, dtype="<u4")
        self._slabs: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = Lock()

    def damaged(self, what: str) -> DamagedIndex:
        """The error for damage in this file."""
        return DamagedIndex(self.path, what)

    def nbytes(self, section: str) -> int:
        """Length of a section in bytes."""
        return self._places[section][1]

    def column(self, section: str) -> Column:
        """The numbers of a section."""
        return Column(self, section)

    def slab(self, section: str, number: int) -> bytes:
        """The bytes of one slab. It must be a slab of the section.

        Raises:
            StorageError: the slab cannot be read.
            DamagedIndex: its bytes are not what was written.
        """
        with self._lock:
            kept = self._slabs.get((section, number))
            if kept is not None:
                self._slabs.move_to_end((section, number))
                return kept
        start, nbytes = self._places[section]
        first = number * SLAB_NBYTES
        data = self._read(start + first, min(SLAB_NBYTES, nbytes - first))
        if crc32(data) != int(self._checksums[self._first_slab[section] + number]):
            raise self.damaged(f"slab {number} of {section} does not have its CRC-32")
        with self._lock:
            self._slabs[section, number] = data
            while len(self._slabs) > _SLABS_KEPT:
                self._slabs.popitem(last=False)
        return data

    def read(self, section: str, start: int, end: int) -> bytes:
        """Bytes ``start`` to ``end`` of a section.

        Raises:
            DamagedIndex: the section has no such bytes, or they are not what was written.
        """
        if not 0 <= start <= end <= self.nbytes(section):
            raise self.damaged(f"{section} has no bytes {start} to {end}")
        if start == end:
            return b""
        first, last = start // SLAB_NBYTES, (end - 1) // SLAB_NBYTES
        data = b"".join(self.slab(section, number) for number in range(first, last + 1)) if first < last else b""
        data = data or self.slab(section, first)
        return data[start - first * SLAB_NBYTES : end - first * SLAB_NBYTES]

    def check_all(self) -> None:
        """Compare the whole file with its checksums, and the gaps between sections with zeros.

        Raises:
            StorageError: it cannot be read.
            DamagedIndex: its bytes are not what was written.
        """
        end = head_nbytes()
        for section, (start, nbytes) in sorted(self._places.items(), key=lambda entry: entry[1]):
            if start > end and any(self._read(end, start - end)):
                raise self.damaged(f"the gap before {section} holds something")
            if section != "checksums":  # compared with their own CRC-32 when the file was opened
                for number in range(-(-nbytes // SLAB_NBYTES)):
                    self.slab(section, number)
            end = max(end, start + nbytes)

    def _read(self, offset: int, nbytes: int) -> bytes:
        if offset + nbytes <= len(self._beginning):
            return self._beginning[offset : offset + nbytes]
        buffer = bytearray(nbytes)
        found = self._disk.pread_into(self._file, buffer, offset) if nbytes else 0
        if found != nbytes:
            raise self.damaged(f"it ends after {offset + found} bytes")
        return bytes(buffer)

    def __deepcopy__(self, memo: Any) -> IndexFile:
        return self  # the contents never change


def _close(disk: Disk, file: OpenFile) -> None:
    try:
        disk.close(file)
    except StorageError:
        return  # the file was only read


class Column:
    """The numbers of a section, one by one or several in a row. It keeps the slab that was used last."""

    __slots__ = ("_file", "_held", "_kind", "_length", "_mask", "_section", "_shift")

    def __init__(self, file: IndexFile, section: str) -> None:
        self._file = file
        self._section = section
        self._kind = np.dtype(SECTIONS[section])
        self._length = file.nbytes(section) // self._kind.itemsize
        per_slab = SLAB_NBYTES // self._kind.itemsize  # a power of two
        self._shift, self._mask = per_slab.bit_length() - 1, per_slab - 1
        self._held: tuple[int, memoryview] = (-1, memoryview(b""))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> int:
        held, values = self._held
        number = row >> self._shift
        if number != held:
            values = self._hold(number, row)
        try:
            value: int = values[row & self._mask]
        except IndexError:
            raise self._no_such(row) from None
        return value

    def _hold(self, number: int, row: int) -> memoryview:
        if not 0 <= row < self._length:
            raise self._no_such(row)
        values = self._numbers(self._file.slab(self._section, number)).data
        self._held = number, values
        return values

    def _no_such(self, row: int) -> DamagedIndex:
        return self._file.damaged(f"{self._section} has {self._length} rows, and row {row} is referred to")

    def rows(self, first: int, end: int) -> npt.NDArray[Any]:
        """Rows ``first`` to ``end``."""
        nbytes = self._kind.itemsize
        return self._numbers(self._file.read(self._section, first * nbytes, end * nbytes))

    def _numbers(self, data: bytes) -> npt.NDArray[Any]:
        return np.frombuffer(data, dtype=self._kind).astype(self._kind.newbyteorder("="), copy=False)
