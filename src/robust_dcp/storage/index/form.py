"""The format of ``.robust_dcp.index``: its sections, their order, its head, and the checksums of its slabs.

This module owns the bytes that docs/formats.md describes: how they are made of the columns that ``.metadata`` is made
of, how they are read, and the error for a damaged index. ``stored_index`` knows what they say.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import StorageMeta

from robust_dcp.errors import CorruptCheckpoint, StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.metadata.metadata_file import files_beside
from robust_dcp.storage.metadata.pickled import MetadataColumns
from robust_dcp.storage.records.checksum import crc32

Int64 = npt.NDArray[np.int64]

Fragment = bytes | memoryview

_MAGIC: Final = b"RDCPIDX\n"
_VERSION: Final = 2
_HEAD: Final = struct.Struct("<8sIIQII32s")
"""Magic, version, number of sections, bytes of the file, bytes of a slab, CRC-32 of the checksums, fit."""
_ENTRY: Final = struct.Struct("<16s4sIQQ")
"""For each section: name, type of its numbers, 0, where it begins, its length in bytes."""
_CRC: Final = struct.Struct("<I")

SLAB_NBYTES: Final = 1 << 16
MAX_NAME_NBYTES: Final = 1 << 14
"""A checkpoint with a longer name has no index. So a damaged or hostile index cannot make us read very long names."""

_ALIGNMENT: Final = 64
_TAIL_NBYTES: Final = 4096

_FIRST_READ_NBYTES: Final = 256 << 10
"""So much is read when an index is opened, which is all of most indices. Over a network each call takes its time,
however little it reads.
"""

SECTIONS: Final[Mapping[str, str]] = {
    "names": "|u1",
    "name_ends": "<u8",
    "name_chunks": "<u8",
    "name_properties": "<i4",
    "name_size": "<i4",
    "name_reach": "<i8",
    "path_parts": "<i4",
    "path_ends": "<u8",
    "size_counts": "<u8",
    "sizes": "<i8",
    "chunk_offset": "<i4",
    "chunk_size": "<i4",
    "chunk_file": "<i4",
    "chunk_start": "<i8",
    "chunk_nbytes": "<i8",
    "variable_rows": "<i8",
    "variable_places": "<i8",
    "files": "|u1",
    "file_ends": "<u8",
    "properties": "|u1",
    "meta": "|u1",
    "ranks": "<i8",
    "signatures": "|u1",
    "shares": "|u1",
    "share_ends": "<u8",
    "structures": "|u1",
    "checksums": "<u4",
}
"""The sections of version 2 in their order, and the type of the numbers in each. The last one holds the CRC-32 of each
slab.
"""


HEAD_NBYTES: Final = _HEAD.size + len(SECTIONS) * _ENTRY.size + _CRC.size
"""Length of the head, the directory of sections, and their checksum."""


class DamagedIndex(CorruptCheckpoint):
    """An index that is not what was written. Where it is found when a load begins, the load reads ``.metadata``."""

    def __init__(self, file: str, what: str) -> None:
        super().__init__(
            f"{file} is damaged: {what}; the checkpoint itself is not affected: remove this file, and load again from "
            ".metadata, which says the same",
            file=file,
            expected="an index as it was written",
            found=what,
        )


class Section(NamedTuple):
    """The bytes of one section, and the CRC-32 of each of its slabs."""

    data: Fragment
    checksums: tuple[int, ...]

    @classmethod
    def of(cls, name: str, values: Fragment | npt.NDArray[Any]) -> Section:
        """Make the section called ``name`` from its bytes or its numbers."""
        if isinstance(values, np.ndarray):
            values = np.ascontiguousarray(values, dtype=SECTIONS[name]).reshape(-1).view(np.uint8).data
        view = memoryview(values)
        slabs = range(0, len(view), SLAB_NBYTES)
        return cls(values, tuple(crc32(view[first : first + SLAB_NBYTES]) for first in slabs))


def encode_sections(sections: Mapping[str, Section], fit: bytes) -> tuple[Fragment, ...]:
    """The whole file, in parts that follow each other.

    Args:
        sections: all sections but the checksums. A missing section is empty.
        fit: the result of :func:`fit_of` for the ``.metadata`` that the index belongs to.
    """
    at, checksums, entries, fragments = HEAD_NBYTES, list[int](), list[bytes](), list[Fragment]()
    data: Fragment = b""
    for name, kind in SECTIONS.items():
        data = b""
        if name == "checksums":
            data = np.array(checksums, dtype="<u4").tobytes()
        elif name in sections:
            data = sections[name].data
            checksums += sections[name].checksums
        gap = -at % _ALIGNMENT
        at += gap
        entries.append(_ENTRY.pack(name.encode(), kind.encode(), 0, at, len(data)))
        fragments += filter(len, (bytes(gap), data))
        at += len(data)
    # ``data`` is that of the last section: the checksums.
    head = _HEAD.pack(_MAGIC, _VERSION, len(entries), at, SLAB_NBYTES, crc32(data), fit) + b"".join(entries)
    return (head + _CRC.pack(crc32(head)), *fragments)


class StoredMeta(msgspec.Struct, frozen=True):
    """DCP's ``StorageMeta``."""

    checkpoint_id: str | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: tuple[str, ...] = ()


class IndexMeta(msgspec.Struct, frozen=True):
    """The fields of ``Metadata`` other than its items, in JSON.

    Attributes:
        version: the version of DCP's format.
        has_paths: whether names have a place in a nested state dict (``planner_data``).
        storage_meta: what the writer gave.
        files_beside: the digests of the files that the save has committed beside the data, by name.
    """

    version: str | None
    has_paths: bool
    storage_meta: StoredMeta | None
    files_beside: dict[str, str] = {}


# --- which .metadata an index belongs to


def fit_of(metadata: Sequence[Fragment]) -> bytes:
    """The digest (32 bytes) of a ``.metadata`` that consists of these fragments, one after the other.

    It covers the length of ``.metadata`` and its last 4096 bytes. These hold the id of the save, which the emitter
    writes after all items, and the CRC-32 of the whole file. So a ``.metadata`` of another save or another tool has
    another digest. And nobody has to read all of a file that grows with the job.
    """
    tail = b""
    for fragment in reversed(metadata):
        tail = bytes(fragment[-_TAIL_NBYTES:]) + tail
        if len(tail) >= _TAIL_NBYTES:
            break
    nbytes = sum(map(len, metadata))
    return hashlib.sha256(nbytes.to_bytes(8, "little") + tail[-_TAIL_NBYTES:]).digest()


def fit_of_file(disk: Disk, path: str) -> bytes:
    """The digest of a ``.metadata`` on disk.

    Raises:
        StorageError: it cannot be read.
    """
    nbytes, tail = disk.read_end(path, _TAIL_NBYTES)
    return hashlib.sha256(nbytes.to_bytes(8, "little") + tail).digest()


# --- what is written: most of it depends on the plan alone, and is made once


class IndexTemplate:
    """The common part of the indices of all checkpoints that one plan writes. Several threads may use it at once.

    Args:
        columns: what the plan determines. They are not kept.

    Attributes:
        nbytes: bytes of memory that this object keeps.

    Raises:
        ValueError: a name is too long.
    """

    def __init__(self, columns: MetadataColumns) -> None:
        self._has_paths = columns.paths is not None
        values: dict[str, Any] = {
            **_names(columns),
            **_paths(columns),
            "size_counts": np.bincount(list(map(len, columns.sizes)), minlength=1),
            "sizes": np.fromiter(chain.from_iterable(columns.sizes), dtype=np.int64),
            "chunk_offset": columns.offset,
            "chunk_size": columns.size,
            "chunk_file": columns.file,
            "chunk_start": columns.start,
            "chunk_nbytes": columns.nbytes,
            "variable_rows": np.flatnonzero(columns.start < 0),
            "properties": msgspec.json.encode([_in_words(*each) for each in columns.properties]),
        }
        self._constant = {name: Section.of(name, each) for name, each in values.items()}
        self.nbytes = sum(len(section.data) for section in self._constant.values())

    def encode(
        self,
        metadata: Sequence[Fragment],
        file_names: Sequence[str],
        places: Int64,
        storage_meta: StorageMeta | None,
        version: str | None,
        plan: Mapping[str, Section],
    ) -> tuple[Fragment, ...]:
        """The index of one checkpoint, in parts that follow each other.

        Args:
            metadata: the ``.metadata`` that it belongs to.
            file_names: the data files, relative to the checkpoint.
            places: int64 ``[V, 2]``, start and length of each item of variable size, in bytes.
            storage_meta: written into the file as it is.
            version: the version of DCP's format.
            plan: the sections that ``plan.plan`` makes; empty if the plan is not stored.
        """
        names, ends = _joined(file_names)
        meta: dict[str, Any] = {"version": version, "has_paths": self._has_paths, "storage_meta": storage_meta}
        if beside := files_beside(storage_meta):
            meta["files_beside"] = beside
        values: dict[str, Any] = {
            "variable_places": places,
            "files": names,
            "file_ends": ends,
            "meta": msgspec.json.encode(meta, enc_hook=os.fsdecode),  # the checkpoint's path may be a Path
        }
        own = {name: Section.of(name, each) for name, each in values.items()}
        return encode_sections({**self._constant, **own, **plan}, fit_of(metadata))


def _in_words(dtype: Any, layout: Any, requires_grad: bool) -> tuple[str, str, bool]:
    return str(dtype).removeprefix("torch."), str(layout).removeprefix("torch."), requires_grad


def _joined(texts: Sequence[str]) -> tuple[bytes, Int64]:
    """All texts in UTF-8, one after the other, and where each of them ends."""
    text = "".join(texts)
    if text.isascii():
        return text.encode(), np.cumsum(np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)))
    encoded = [each.encode("utf-8", "surrogatepass") for each in texts]
    return b"".join(encoded), np.cumsum(np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)))


def _names(columns: MetadataColumns) -> dict[str, Any]:
    names, ends = _joined(columns.names)
    if int(np.diff(ends, prepend=0).max(initial=0)) > MAX_NAME_NBYTES:
        raise ValueError(f"names of an index have at most {MAX_NAME_NBYTES} bytes, and one of these has more")
    first_rows = np.searchsorted(columns.name, np.arange(len(columns.names)))
    extent = np.array([*(size[0] if size else 0 for size in columns.sizes), 0], dtype=np.int64)
    return {
        "names": names,
        "name_ends": ends,
        "name_chunks": np.append(first_rows[1:], len(columns.name)) if len(first_rows) else first_rows,
        "name_properties": columns.name_properties,
        "name_size": columns.name_size,
        "name_reach": np.maximum.reduceat(extent[columns.size], first_rows) if len(first_rows) else first_rows,
    }


def _paths(columns: MetadataColumns) -> dict[str, Any]:
    paths = columns.paths
    if paths is None:
        return {}
    # One pass over all parts, without a list for each name. A path spells its name, so the lengths suffice.
    lengths = [-len(str(part)) if isinstance(part, int) else len(part) for part in chain.from_iterable(paths)]
    ends = np.cumsum(np.fromiter(map(len, paths), dtype=np.int64, count=len(paths)))
    return {"path_parts": np.array(lengths, dtype=np.int32), "path_ends": ends}


# --- an open index


class IndexFile:
    """An open index. Several threads may use it at once. The file is closed when nobody refers to it any more.

    It reads only the slabs of sections that are asked for, and compares each of them with its checksum. Slabs are read
    into memory and not mapped: if somebody truncated a mapped file, the process would die.

    Args:
        disk: the file system.
        path: the path of the file.

    Attributes:
        path: the path of the file.
        fit: the digest of the ``.metadata`` that the index belongs to.
        identity: 32 bytes. Two files with the same identity have the same contents.
        data: uint8, the bytes of the file. Those of slabs that were not loaded mean nothing.
        places: where each section begins, and its length in bytes.
        is_read: for each slab, whether it is in memory and is what was written.
        first_slab: the number of the first slab of each section.

    Raises:
        StorageError: the file cannot be read.
        DamagedIndex: its head or its checksums are not what was written.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self.path = path
        self._disk = disk
        self._file = disk.open_read(path)
        weakref.finalize(self, _close, disk, self._file)
        nbytes = self._file.nbytes
        # As long as the file, but memory is taken only for what is read.
        self.data = np.empty(nbytes, dtype=np.uint8)
        self._n_first = 0
        self._fill(0, min(_FIRST_READ_NBYTES, nbytes))
        self._n_first = min(_FIRST_READ_NBYTES, nbytes)
        data = self.data[:HEAD_NBYTES].tobytes()
        self.identity = hashlib.sha256(data).digest()
        if len(data) != HEAD_NBYTES or not data.startswith(_MAGIC):
            raise self.damaged(f"it begins with {data[:8]!r}")
        _, version, n_sections, expected_nbytes, slab_nbytes, checksum, self.fit = _HEAD.unpack_from(data)
        if version != _VERSION:
            raise self.damaged(f"it is of version {version}, and this robust_dcp reads version {_VERSION}")
        if _CRC.unpack(data[-_CRC.size :])[0] != crc32(data[: -_CRC.size]):
            raise self.damaged("its head does not have its CRC-32")
        if (n_sections, slab_nbytes, expected_nbytes) != (len(SECTIONS), SLAB_NBYTES, nbytes):
            raise self.damaged(f"it has {n_sections} sections, slabs of {slab_nbytes} bytes, and {nbytes} bytes in all")
        self.places: dict[str, tuple[int, int]] = {}
        self.first_slab: dict[str, int] = {}
        end, n_slabs = len(data), 0
        for number, (section, kind) in enumerate(SECTIONS.items()):
            found_name, found_kind, _, start, section_nbytes = _ENTRY.unpack_from(
                data, _HEAD.size + number * _ENTRY.size
            )
            named = (found_name.rstrip(b"\0"), found_kind.rstrip(b"\0")) == (section.encode(), kind.encode())
            fits = end <= start and start % _ALIGNMENT == 0 and start + section_nbytes <= nbytes
            if not (named and fits) or section_nbytes % int(kind[-1]):
                raise self.damaged(f"its section {section} is not where it can be")
            self.places[section], end = (start, section_nbytes), start + section_nbytes
            self.first_slab[section] = n_slabs
            n_slabs += -(-section_nbytes // SLAB_NBYTES) if section != "checksums" else 0
        start, checksums_nbytes = self.places["checksums"]
        if checksums_nbytes != 4 * n_slabs:
            raise self.damaged(f"it has {checksums_nbytes} bytes of checksums")
        self._fill(start, checksums_nbytes)
        checksums = self.data[start : start + checksums_nbytes]
        if crc32(checksums.data) != checksum:
            raise self.damaged("its checksums do not have their CRC-32")
        self._checksums = checksums.view("<u4")
        self.is_read = bytearray(n_slabs)
        self._lock = threading.Lock()

    def damaged(self, what: str) -> DamagedIndex:
        """The error for damage in this file."""
        return DamagedIndex(self.path, what)

    def load(self, section: str, first: int, end: int) -> None:
        """Make sure that slabs ``first`` to ``end`` of a section are in memory, and are what was written.

        Raises:
            StorageError: they cannot be read.
            DamagedIndex: their bytes are not what was written.
        """
        start, nbytes = self.places[section]
        before = self.first_slab[section]
        with self._lock:
            while first < end and self.is_read[before + first]:
                first += 1
            while first < end and self.is_read[before + end - 1]:
                end -= 1
            if first >= end:
                return
            at, stop = first * SLAB_NBYTES, min(end * SLAB_NBYTES, nbytes)
            self._fill(start + at, stop - at)
            for number in range(first, end):
                slab = self.data[start + number * SLAB_NBYTES : start + min((number + 1) * SLAB_NBYTES, nbytes)]
                if crc32(slab.data) != int(self._checksums[before + number]):
                    raise self.damaged(f"slab {number} of {section} does not have its CRC-32")
                self.is_read[before + number] = 1

    def check_all(self) -> None:
        """Read the whole file. Compare it with its checksums, and the gaps between sections with zeros.

        Raises:
            StorageError: it cannot be read.
            DamagedIndex: its bytes are not what was written.
        """
        self._fill(0, len(self.data))
        end, self._n_first = HEAD_NBYTES, len(self.data)
        for section, (start, nbytes) in self.places.items():
            if self.data[end:start].any():
                raise self.damaged(f"the gap before {section} holds something")
            if section != "checksums":  # compared with their own CRC-32 when the file was opened
                self.load(section, 0, -(-nbytes // SLAB_NBYTES))
            end = start + nbytes

    def _fill(self, offset: int, nbytes: int) -> None:
        """Read bytes of the file to their place in memory, unless they were among the first."""
        if offset + nbytes > self._n_first:
            found = self._disk.pread_into(self._file, self.data[offset : offset + nbytes].data, offset)
            if found != nbytes:
                raise self.damaged(f"it ends after {offset + found} bytes")


def _close(disk: Disk, file: OpenFile) -> None:
    with contextlib.suppress(StorageError):  # the file was only read
        disk.close(file)


class Column:
    """The numbers or the bytes of a section, one by one or several at once.

    Raises:
        DamagedIndex: a row is not there, or its slab is not what was written.
    """

    __slots__ = ("_file", "_is_read", "_section", "_shift", "_values")

    def __init__(self, file: IndexFile, section: str) -> None:
        self._file = file
        self._section = section
        start, nbytes = file.places[section]
        self._values = file.data[start : start + nbytes].view(SECTIONS[section])
        self._shift = (SLAB_NBYTES // self._values.itemsize).bit_length() - 1  # there is a power of two in a slab
        self._is_read = memoryview(file.is_read)[file.first_slab[section] :]

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> int:
        if not (0 <= row < len(self._values) and self._is_read[row >> self._shift]):
            self.rows(row, row + 1)
        value: int = self._values.item(row)
        return value

    def rows(self, first: int = 0, end: int | None = None) -> npt.NDArray[Any]:
        """Rows ``first`` to ``end``."""
        end = len(self._values) if end is None else end
        if not 0 <= first <= end <= len(self._values):
            raise self._no_such(end - 1)
        if first < end:
            self._file.load(self._section, first >> self._shift, (end - 1 >> self._shift) + 1)
        return self._values[first:end]

    def at(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The number in each of ``rows``. There may be most of an index between two of them."""
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self._values):
            raise self._no_such(int(rows.max()))
        for slab in np.flatnonzero(np.bincount(rows >> self._shift)).tolist():
            self._file.load(self._section, slab, slab + 1)
        return self._values[rows].astype(np.int64)

    def _no_such(self, row: int) -> DamagedIndex:
        return self._file.damaged(f"{self._section} has {len(self._values)} rows, and row {row} is referred to")
