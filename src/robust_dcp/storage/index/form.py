"""The format of ``.robust_dcp.index``: its head, a block for each rank, and sections for the whole job.

This module owns the bytes that docs/formats.md describes: how they are made of what ``.metadata`` is made of, how they
are read, and the error for a damaged index. ``stored_index`` knows what they say.

A rank makes its block from its share: what it writes, and where. The coordinator makes the head and the sections:
names, and which ranks have the chunks of each. A load reads the blocks of the ranks that have what it needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import StorageMeta

from robust_dcp.errors import CorruptCheckpoint, StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.metadata.metadata_file import FORMAT_VERSION, files_beside
from robust_dcp.storage.metadata.pickled import END_NBYTES, PAGE_NBYTES, Names, StoredRows, used_sizes
from robust_dcp.storage.records.checksum import crc32

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

Fragment = bytes | memoryview

_MAGIC: Final = b"RDCPIDX\n"
_VERSION: Final = 3
_HEAD: Final = struct.Struct("<8sIIQII32s")
"""Magic, version, number of sections, bytes of the file, bytes of a slab, CRC-32 of the checksums, fit."""
_ENTRY: Final = struct.Struct("<16s4sIQQ")
"""For each section: name, type of its numbers, 0, where it begins, its length in bytes."""
_CRC: Final = struct.Struct("<I")

SLAB_NBYTES: Final = 1 << 16
MAX_NAME_NBYTES: Final = 1 << 14
"""A checkpoint with a longer name has no index. So a damaged or hostile index cannot make us read very long names."""

_ALIGNMENT: Final = 64

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
    "name_writers": "<u8",
    "writers": "<i4",
    "path_parts": "<i4",
    "path_ends": "<u8",
    "size_counts": "<u8",
    "sizes": "<i8",
    "files": "|u1",
    "file_ends": "<u8",
    "rank_files": "<u8",
    "block_ends": "<u8",
    "properties": "|u1",
    "meta": "|u1",
    "ranks": "<i8",
    "signatures": "|u1",
    "shares": "|u1",
    "share_ends": "<u8",
    "structures": "|u1",
    "checksums": "<u4",
}
"""The sections of version 3 in their order, and the type of the numbers in each. The last one holds the CRC-32 of each
slab.
"""


HEAD_NBYTES: Final = _HEAD.size + len(SECTIONS) * _ENTRY.size + _CRC.size
"""Length of the head, the directory of sections, and their checksum."""

BLOCKS_AT: Final = -(-HEAD_NBYTES // PAGE_NBYTES) * PAGE_NBYTES
"""Where the block of the first rank begins. Blocks fill whole pages, because two clients of a network file system must
not write to one page.
"""


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


def encode_sections(sections: Mapping[str, Section], fit: bytes, sections_at: int) -> tuple[tuple[int, bytes], ...]:
    """The head, and the sections; each with where it begins in the file.

    Args:
        sections: all sections but the checksums. A missing section is empty.
        fit: the result of :func:`fit_of` for the ``.metadata`` that the index belongs to.
        sections_at: where the blocks of the ranks end.
    """
    at, checksums, entries, fragments = sections_at, list[int](), list[bytes](), list[Fragment]()
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
    head = (head + _CRC.pack(crc32(head))).ljust(BLOCKS_AT, b"\0")
    return (0, head), (sections_at, b"".join(fragments))


# --- the block of a rank


_BLOCK: Final = struct.Struct("<IIIIIIQ")
"""CRC-32 of all that follows in the block; how many items, jumps and sizes it has; 0, 0; how many numbers in all
sizes."""


class Block(NamedTuple):
    """What one rank has written, and where: n items, sorted by name and offsets, and r jumps.

    Attributes:
        start, nbytes: int64 ``[n]``, where in its file each item begins, and its length, in bytes.
        values: int64, the numbers of all sizes, one after the other.
        jumps: int32 ``[r, 2]``, places of items whose name does not follow that of the item before, and the numbers of
            these names.
        offset, size: int32 ``[n]``, places among the sizes; -1 for an object.
        ndim: int32, how many numbers each size has.
        file: int32 ``[n]``, place among the files of the rank.
    """

    start: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    values: npt.NDArray[np.int64]
    jumps: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int32]
    size: npt.NDArray[np.int32]
    ndim: npt.NDArray[np.int32]
    file: npt.NDArray[np.int32]


_BLOCK_COLUMNS: Final = ("<i8", "<i8", "<i8", "<i4", "<i4", "<i4", "<i4", "<i4")


def _block_lengths(n_rows: int, n_jumps: int, n_sizes: int, n_values: int) -> tuple[int, ...]:
    """How many numbers each column of a block has."""
    return n_rows, n_rows, n_values, 2 * n_jumps, n_rows, n_rows, n_sizes, n_rows


def block_nbytes(n_rows: int, n_jumps: int, n_sizes: int, n_values: int) -> int:
    """How long a block of so many items, jumps, sizes, and numbers in sizes is. That of a rank without items is
    empty."""
    lengths = _block_lengths(n_rows, n_jumps, n_sizes, n_values)
    nbytes = sum(n * np.dtype(kind).itemsize for n, kind in zip(lengths, _BLOCK_COLUMNS, strict=True))
    return -(-(_BLOCK.size + nbytes) // PAGE_NBYTES) * PAGE_NBYTES if n_rows else 0


def encode_block(rows: StoredRows, jumps: npt.NDArray[np.int32], places: Int64) -> bytes:
    """The block of one rank; no bytes if it writes nothing.

    Args:
        rows: what the rank writes, and :class:`Block` for its ``jumps``.
        places: int64 ``[V, 2]``, start and length of each item of variable size, in bytes.
    """
    used = used_sizes(rows)
    sizes = [rows.sizes[each] for each in used.tolist()]
    number_of = np.full(len(rows.sizes) + 1, -1, dtype=np.int32)  # the last one for objects
    number_of[used] = np.arange(len(used))
    start, nbytes, variable = rows.start.copy(), rows.nbytes.copy(), rows.start < 0
    start[variable], nbytes[variable] = places[:, 0], places[:, 1]
    values = np.fromiter(chain.from_iterable(sizes), dtype=np.int64)
    ndim = np.array(list(map(len, sizes)), dtype=np.int32)
    block = Block(start, nbytes, values, jumps, number_of[rows.offset], number_of[rows.size], ndim, rows.file)
    columns = [np.asarray(each, dtype=kind).tobytes() for each, kind in zip(block, _BLOCK_COLUMNS, strict=True)]
    counts = len(rows.name), len(jumps), len(sizes), len(values)
    body = b"".join([_BLOCK.pack(0, *counts[:3], 0, 0, counts[3])[_CRC.size :], *columns])
    body = body.ljust(block_nbytes(*counts) - _CRC.size, b"\0")
    return _CRC.pack(crc32(body)) + body if counts[0] else b""


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


def fit_of(nbytes: int, end: Fragment) -> bytes:
    """The digest (32 bytes) of a ``.metadata`` of so many bytes, of which ``end`` are the last.

    It covers the length of ``.metadata`` and its last 4096 bytes. These hold the id of the save, which follows all
    items, and the CRC-32 of the whole file. So a ``.metadata`` of another save or another tool has another digest. And
    nobody has to read all of a file that grows with the job.
    """
    return hashlib.sha256(nbytes.to_bytes(8, "little") + bytes(end[-END_NBYTES:])).digest()


def fit_of_file(disk: Disk, path: str) -> bytes:
    """The digest of a ``.metadata`` on disk.

    Raises:
        StorageError: it cannot be read.
    """
    return fit_of(*disk.read_end(path, END_NBYTES))


# --- what is written: most of it depends on the plan alone, and is made once


class IndexTemplate:
    """The common part of the indices of all checkpoints that one plan writes, without the blocks of ranks. Several
    threads may use it at once.

    Args:
        names: all names.
        rows: everything that is written, sorted by (name, offsets): its names and sizes.
        rank: int32 ``[K]``, the rank that writes each.
        rank_files: for each rank how many files it has.
        block_nbytes: for each rank the length of its block.

    Attributes:
        nbytes: bytes of memory that this object keeps.

    Raises:
        ValueError: a name is too long.
    """

    def __init__(
        self, names: Names, rows: StoredRows, rank: Int32, rank_files: Sequence[int], block_nbytes: Sequence[int]
    ) -> None:
        self._has_paths = names.paths is not None
        block_ends = BLOCKS_AT + np.cumsum(block_nbytes)
        self._sections_at = int(block_ends[-1])
        values: dict[str, Any] = {
            **_names(names, rows, rank),
            **_paths(names.paths),
            "size_counts": np.bincount(list(map(len, names.sizes)), minlength=1),
            "sizes": np.fromiter(chain.from_iterable(names.sizes), dtype=np.int64),
            "rank_files": np.cumsum(rank_files),
            "block_ends": block_ends,
            "properties": msgspec.json.encode([_in_words(*each) for each in names.properties]),
        }
        self._constant = {name: Section.of(name, each) for name, each in values.items()}
        self.nbytes = sum(len(section.data) for section in self._constant.values())

    def encode(
        self,
        fit: bytes,
        file_names: Sequence[str],
        storage_meta: StorageMeta | None,
        plan: Mapping[str, Section],
    ) -> tuple[tuple[int, bytes], ...]:
        """The parts of the index of one checkpoint that no rank has written, each with where it begins.

        Args:
            fit: of the ``.metadata`` that it belongs to.
            file_names: the data files, relative to the checkpoint, rank after rank.
            storage_meta: written into the file. A path that is no UTF-8 stands there in escapes.
            plan: the sections that ``plan.plan`` makes; empty if the plan is not stored.
        """
        names, ends = _joined(file_names)
        meta: dict[str, Any] = {"version": FORMAT_VERSION, "has_paths": self._has_paths, "storage_meta": storage_meta}
        if beside := files_beside(storage_meta):
            meta["files_beside"] = beside
        if storage_meta is not None and storage_meta.checkpoint_id is not None:
            place = os.fsencode(storage_meta.checkpoint_id).decode(errors="backslashreplace")
            meta["storage_meta"] = replace(storage_meta, checkpoint_id=place)
        values: dict[str, Any] = {
            "files": names,
            "file_ends": ends,
            "meta": msgspec.json.encode(meta),
        }
        own = {name: Section.of(name, each) for name, each in values.items()}
        return encode_sections({**self._constant, **own, **plan}, fit, self._sections_at)


def _in_words(dtype: Any, layout: Any, requires_grad: bool) -> tuple[str, str, bool]:
    return str(dtype).removeprefix("torch."), str(layout).removeprefix("torch."), requires_grad


def _joined(texts: Sequence[str]) -> tuple[bytes, Int64]:
    """All texts in UTF-8, one after the other, and where each of them ends."""
    text = "".join(texts)
    if text.isascii():
        return text.encode(), np.cumsum(np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)))
    encoded = [each.encode("utf-8", "surrogatepass") for each in texts]
    return b"".join(encoded), np.cumsum(np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded)))


def _names(names: Names, rows: StoredRows, rank: Int32) -> dict[str, Any]:
    texts, ends = _joined(names.names)
    if int(np.diff(ends, prepend=0).max(initial=0)) > MAX_NAME_NBYTES:
        raise ValueError(f"names of an index have at most {MAX_NAME_NBYTES} bytes, and one of these has more")
    first_rows = np.searchsorted(rows.name, np.arange(len(names.names)))
    name_chunks = np.append(first_rows[1:], len(rows.name)) if len(first_rows) else first_rows
    extent = np.array([*(size[0] if size else 0 for size in rows.sizes), 0], dtype=np.int64)
    # Names whose chunks lie on the same ranks, in the same order, share a list of these.
    lists: dict[bytes, int] = {}
    n_ranks, name_writers = 0, []
    for first, end in zip(first_rows.tolist(), name_chunks.tolist(), strict=True):
        writers = rank[first:end].astype("<i4").tobytes()
        if writers not in lists:
            lists[writers], n_ranks = n_ranks, n_ranks + end - first
        name_writers.append(lists[writers])
    return {
        "names": texts,
        "name_ends": ends,
        "name_chunks": name_chunks,
        "name_properties": names.name_properties,
        "name_size": names.name_size,
        "name_reach": np.maximum.reduceat(extent[rows.size], first_rows) if len(first_rows) else first_rows,
        "name_writers": np.array(name_writers, dtype=np.int64),
        "writers": b"".join(lists),
    }


def _paths(paths: Sequence[tuple[str | int, ...]] | None) -> dict[str, Any]:
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
        end, n_slabs = BLOCKS_AT, 0
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

    def block(self, begin: int, end: int) -> Block:
        """The block of a rank, which is where ``block_ends`` says.

        Raises:
            StorageError: it cannot be read.
            DamagedIndex: it is not what was written.
        """
        if not (BLOCKS_AT <= begin <= end - _BLOCK.size and end <= len(self.data)) or end % PAGE_NBYTES:
            raise self.damaged(f"the block of a rank cannot lie at {begin} to {end}")
        data = self.data[begin:end]
        self._fill(begin, end - begin)
        checksum, n_rows, n_jumps, n_sizes, _, _, n_values = _BLOCK.unpack_from(data.data)
        if crc32(data[_CRC.size :].data) != checksum:
            raise self.damaged(f"the block at {begin} does not have its CRC-32")
        if block_nbytes(n_rows, n_jumps, n_sizes, n_values) != end - begin:
            raise self.damaged(f"the block at {begin} is of another length")
        columns, at = list[Any](), _BLOCK.size
        lengths = _block_lengths(n_rows, n_jumps, n_sizes, n_values)
        for n, kind in zip(lengths, _BLOCK_COLUMNS, strict=True):
            columns.append(np.frombuffer(data, kind, n, at))
            at += columns[-1].nbytes
        columns[3] = columns[3].reshape(-1, 2)
        return Block(*columns)

    def check_all(self) -> None:
        """Read the whole file. Compare it with its checksums, and the gaps between sections with zeros.

        Raises:
            StorageError: it cannot be read.
            DamagedIndex: its bytes are not what was written.
        """
        self._fill(0, len(self.data))
        self._n_first = len(self.data)
        self.load("block_ends", 0, -(-self.places["block_ends"][1] // SLAB_NBYTES))
        ends = [BLOCKS_AT, *Column(self, "block_ends").rows().tolist()]
        for begin, end in pairwise(ends):
            if begin != end:
                self.block(begin, end)
        if self.data[HEAD_NBYTES:BLOCKS_AT].any():
            raise self.damaged("the gap behind its head holds something")
        end = ends[-1]
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
