"""Verifies a checkpoint: a load of all of it without a target.

The parts of ``storage`` that a load uses find the records, footers, heads and checksums. From these each file is cut
into *spans* of bytes whose CRC-32 is known. What lies around the data of ours (frames of records, gaps between them,
heads), which a load takes on trust, is compared with what our writer puts there. So a flipped bit in a file of ours is
found wherever it is, and in a file of stock where a checksum can show it. ``.metadata`` is compared with itself and
with the sizes of files.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch

from robust_dcp.contents.read import Chunk, Contents, Item, StoredFile
from robust_dcp.errors import CorruptCheckpoint, RobustCheckpointError
from robust_dcp.plan.conflicts import first_overlap
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME, holds_raw_bytes, is_data_file, locate
from robust_dcp.storage.index.form import IndexFile, fit_of_file
from robust_dcp.storage.layouts import PlacedTensor
from robust_dcp.storage.layouts.footer import TAIL_NBYTES, Footer, SumColumns, Tail, item_id
from robust_dcp.storage.layouts.read_head import FileHead, read_head
from robust_dcp.storage.layouts.safetensors import LENGTH_NBYTES, ShardHead
from robust_dcp.storage.records.checksum import SUM_NBYTES, crc32, joined
from robust_dcp.storage.records.record import framed_record, parsed_record, record_with_pickle_of, zip_members

__all__ = ["Findings", "Problem", "verify"]

_WINDOW_NBYTES: Final = 4 << 20
_RUN_NBYTES: Final = 16 << 20
_POLL_SECONDS: Final = 0.1
_OF_MEGATRON: Final = "common.pt"
"""Megatron-Core writes it beside ``.metadata`` with ``torch.save``."""


class Problem(NamedTuple):
    """Something that is broken.

    Attributes:
        file: relative to the checkpoint.
        item: the name of the item; ``None`` if the whole file is meant.
        expected: what should be there.
        found: what is there.
    """

    file: str
    item: str | None
    expected: str
    found: str


class Findings:
    """What was found. Several threads add to it.

    Attributes:
        notes: what a user should know, and is no damage.
        unverified: by the reason, how many items have no checksum, and their bytes.
        verified_nbytes: bytes of data that have the checksum that was written with them.
        checked_nbytes: bytes that were read, to show progress.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.unverified: dict[str, tuple[int, int]] = {}
        self.verified_nbytes = 0
        self.checked_nbytes = 0
        self._problems: dict[tuple[str, str | None], Problem] = {}
        self._lock = threading.Lock()

    @property
    def problems(self) -> list[Problem]:
        """At most one for each item of a file."""
        return list(self._problems.values())

    def broken(self, file: str, item: str | None, expected: str, found: str) -> None:
        """Note a problem. The first one of an item in a file counts, because the others follow from it."""
        with self._lock:
            self._problems.setdefault((file, item), Problem(file, item, expected, found))

    def add(self, error: RobustCheckpointError, file: str, what: str) -> None:
        """Note an error of a file that should be what ``what`` says."""
        expected, found = getattr(error, "expected", None), getattr(error, "found", None)
        self.broken(file, getattr(error, "item", None), expected or what, found or error.message)

    @contextlib.contextmanager
    def of_file(self, name: str) -> Iterator[None]:
        """An error within the block is a problem of that file."""
        try:
            yield
        except RobustCheckpointError as error:
            self.add(error, name, "a file that can be read")

    def not_verified(self, why: str, nbytes: int) -> None:
        """Note an item whose data has no checksum."""
        with self._lock:
            n_items, total = self.unverified.get(why, (0, 0))
            self.unverified[why] = n_items + 1, total + nbytes

    def count(self, *, read_nbytes: int = 0, verified_nbytes: int = 0) -> None:
        """Count bytes that were read, and those that have their checksum."""
        with self._lock:
            self.checked_nbytes += read_nbytes
            self.verified_nbytes += verified_nbytes


def verify(
    contents: Contents, findings: Findings, *, jobs: int, with_data: bool, on_progress: Callable[[], None]
) -> None:
    """Add what is wrong with a checkpoint.

    Args:
        jobs: how many threads read.
        with_data: whether data is read and compared with checksums; otherwise only sizes, marks and heads are.
        on_progress: is called several times a second.
    """
    _check_structure(contents, findings)
    disk, names = contents.disk, {file.name for file in contents.files}
    for name in sorted(disk.list_directory(contents.path)):
        if is_data_file(name) and name not in names:
            findings.notes.append(f"{name} does not belong to this checkpoint: a crashed save may have left it")
    index = os.path.join(contents.path, INDEX_NAME)
    if contents.written_by == "robust_dcp" and disk.exists(index):
        with findings.of_file(INDEX_NAME):
            file = IndexFile(disk, index)
            if file.fit == fit_of_file(disk, os.path.join(contents.path, METADATA_NAME)):
                file.check_all()
            else:
                expected = f"the index of this {METADATA_NAME}"
                findings.broken(INDEX_NAME, None, expected, f"one of another {METADATA_NAME}")
    there = [stored for stored in contents.files if stored.nbytes is not None]  # others were noted with their size
    with ThreadPoolExecutor(jobs, thread_name_prefix="robust_dcp-verify") as pool:
        runs = [run for of_file in pool.map(partial(_runs_of, contents, findings), there) for run in of_file]
        common = os.path.join(contents.path, _OF_MEGATRON)
        if contents.written_by != "safetensors" and disk.exists(common):
            runs.append(_Run(_OF_MEGATRON, common, lambda window: _spans_of_archive(window, None, 0, window.nbytes)))
        running = {pool.submit(_check, disk, run, findings) for run in runs} if with_data else set()
        while running:
            done, running = wait(running, timeout=_POLL_SECONDS)
            on_progress()
            for each in done:
                each.result()


def _check_structure(contents: Contents, findings: Findings) -> None:
    """``.metadata`` with itself, and with the sizes of files."""
    home = METADATA_NAME if contents.written_by != "safetensors" else ""
    for item in contents.items:
        for chunk in item.chunks:
            if chunk.file is None:
                where = f"its chunk at {list(chunk.offsets)}" if item.is_tensor else "it"
                findings.broken(home, item.name, f"a file for {where}", "none")
            elif item.is_tensor:
                needed, is_exact = math.prod(chunk.sizes) * item.itemsize, holds_raw_bytes(chunk.file)
                if chunk.stored_nbytes < needed or (is_exact and chunk.stored_nbytes != needed):
                    expected = f"{'' if is_exact else 'at least '}{needed} bytes for {item.dtype} {list(chunk.sizes)}"
                    findings.broken(home, item.name, expected, f"{chunk.stored_nbytes} bytes in {chunk.file}")
        if item.is_tensor:
            _check_cover(item, home, findings)
    for file in contents.files:
        if file.nbytes is None:
            chunks = f"{len(file.held)} chunk{'' if len(file.held) == 1 else 's'}"
            findings.broken(file.name, None, f"a file with {chunks}", "no such file")
        elif file.nbytes < file.needed_nbytes:
            findings.broken(file.name, None, f"at least {file.needed_nbytes} bytes", f"{file.nbytes} bytes")
        end, last = 0, ""
        for item, chunk in file.held:
            if chunk.stored_nbytes and chunk.start < end:
                expected = f"bytes of its own from {chunk.start} on"
                findings.broken(file.name, item.name, expected, f"bytes up to {end} are of {last!r}")
            if chunk.start + chunk.stored_nbytes > end:
                end, last = chunk.start + chunk.stored_nbytes, item.name


def _check_cover(item: Item, home: str, findings: Findings) -> None:
    """The chunks lie in the tensor, do not overlap, and have as many elements as the tensor: so they cover it once."""
    rank, chunks = len(item.shape), sorted(chunk for chunk in item.chunks if 0 not in chunk.sizes)
    for chunk in item.chunks:
        sides = zip(chunk.offsets, chunk.sizes, item.shape, strict=False)
        is_like = len(chunk.offsets) == len(chunk.sizes) == rank
        if not is_like or any(min(offset, size) < 0 or offset + size > whole for offset, size, whole in sides):
            found = f"a chunk {list(chunk.sizes)} at {list(chunk.offsets)}"
            findings.broken(home, item.name, f"chunks within {list(item.shape)}", found)
            return
    clash = next((at for at in range(1, len(chunks)) if chunks[at - 1].offsets == chunks[at].offsets), None)
    pair = None if clash is None else (clash - 1, clash)
    if pair is None and len(chunks) > 1:
        boxes = (np.array([each[side] for each in chunks], dtype=np.int64) for side in (0, 1))
        pair = first_overlap(np.zeros(len(chunks), dtype=np.int32), *boxes)
    n_elements = sum(math.prod(chunk.sizes) for chunk in chunks)
    if pair is not None:
        first, second = (f"{list(chunks[at].sizes)} at {list(chunks[at].offsets)}" for at in pair)
        findings.broken(home, item.name, "chunks that do not overlap", f"{first} and {second}")
    elif n_elements != math.prod(item.shape):
        expected = f"chunks with all {math.prod(item.shape)} elements of {list(item.shape)}"
        findings.broken(home, item.name, expected, f"chunks with {n_elements}")


# --- spans


class _Span(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file, and the CRC-32 that they have. ``item``: whose they are, if anybody's."""

    begin: int
    end: int
    crc: int
    what: str = "data"
    item: str | None = None


class _Run(NamedTuple):
    """Spans of a file that lie close together, for one thread."""

    name: str
    path: str
    spans: Callable[[_Window], Iterator[_Span]]


class _Window:
    """Reads a file. What lies close together is read at once.

    Args:
        name: of the file, relative to the checkpoint.
    """

    def __init__(self, disk: Disk, file: OpenFile, name: str, findings: Findings) -> None:
        self.name, self.findings = name, findings
        self.nbytes = disk.size(file)
        self.limit = self.nbytes
        """Nothing beyond is read ahead: another thread reads it."""
        self._disk, self._file = disk, file
        self._begin, self._data = 0, memoryview(b"")

    def view(self, begin: int, end: int) -> memoryview:
        """Bytes ``begin`` to ``end``. Up to 4 MiB from ``begin`` on are read at once."""
        if not self._begin <= begin <= end <= self._begin + len(self._data):
            nbytes = max(end - begin, min(_WINDOW_NBYTES, self.limit - begin))
            self._begin, self._data = begin, memoryview(self._disk.read(self._file, nbytes, begin))
            self.findings.count(read_nbytes=len(self._data))
            if len(self._data) < end - begin:
                expected, ends = f"bytes {begin} to {end}", f"the file ends at {begin + len(self._data)}"
                raise CorruptCheckpoint(ends, file=self.name, expected=expected, found=ends)
        return self._data[begin - self._begin : end - self._begin]

    def views(self, begin: int, end: int) -> Iterator[memoryview]:
        """The same in parts of bounded size."""
        return (self.view(at, min(at + _WINDOW_NBYTES, end)) for at in range(begin, end, _WINDOW_NBYTES))

    def read(self, offset: int, nbytes: int) -> bytes:
        """Some bytes; fewer where the file ends. Outside of the window it reads no more than these."""
        if self._begin <= offset <= offset + nbytes <= self._begin + len(self._data):
            return bytes(self.view(offset, offset + nbytes))
        return self._disk.read(self._file, max(0, nbytes), offset)


def _check(disk: Disk, run: _Run, findings: Findings) -> None:
    with findings.of_file(run.name), disk.reading(run.path) as file:
        window = _Window(disk, file, run.name, findings)
        for span in run.spans(window):
            value = 0
            for view in window.views(span.begin, span.end):
                value = crc32(view, value)
            if value == span.crc:
                findings.count(verified_nbytes=span.end - span.begin if span.item else 0)
            else:
                expected = f"CRC-32 {span.crc:08x} of {span.what}, bytes {span.begin} to {span.end}"
                findings.broken(run.name, span.item, expected, f"{value:08x}")


def _runs_of(contents: Contents, findings: Findings, stored: StoredFile) -> list[_Run]:
    """What there is to read in a file. Its head or its footer is compared with ``.metadata`` now."""
    disk, name = contents.disk, stored.name
    with findings.of_file(name):
        path = locate(disk, contents.path, name, file=contents.path)
        if holds_raw_bytes(name):
            head = read_head(disk, path)
            mark = contents.mark or head.mark  # a program that writes .metadata anew does not copy our mark
            if mark is None or _is_as_written(disk, path, stored, mark, head, findings):
                return [_Run(name, path, partial(_spans_of_shard, head))]
            return []
        with disk.reading(path) as file:
            return _runs_of_records(disk, file, stored, contents.mark, findings)
    return []


# --- files of records


class _Record(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file hold a chunk of an item, or an object."""

    begin: int
    end: int
    item: Item
    chunk: Chunk

    @property
    def dtype(self) -> torch.dtype | None:
        dtype = getattr(torch, self.item.dtype or "", None)
        return dtype if isinstance(dtype, torch.dtype) else None


class _Sums:
    """The checksums in the footer of a file of ours: where each block begins and ends, and its CRC-32."""

    def __init__(self, footer: Footer) -> None:
        self.begins, self.ends, self.crcs = footer.blocks()
        self.block_nbytes = footer.tail.block_nbytes

    def of(self, record: _Record) -> list[tuple[int, int, int]]:
        """The blocks that begin in a record."""
        first, last = np.searchsorted(self.begins, (record.begin, record.end)).tolist()
        columns = (column[first:last].tolist() for column in (self.begins, self.ends, self.crcs))
        return list(zip(*columns, strict=True))


def _runs_of_records(
    disk: Disk, file: OpenFile, stored: StoredFile, mark: str | None, findings: Findings
) -> list[_Run]:
    """Compare the footer with ``.metadata``, and cut the file into runs of records."""
    name, nbytes = stored.name, disk.size(file)
    places = (_Record(chunk.start, chunk.start + chunk.stored_nbytes, item, chunk) for item, chunk in stored.held)
    records = [each for each in places if each.end <= nbytes]
    tail = Tail.decode(disk.read(file, TAIL_NBYTES, max(0, nbytes - TAIL_NBYTES)), nbytes)
    if mark is not None and (tail is None or tail.mark != mark):
        damage = "no footer: it is cut short, damaged, or another file"
        found = damage if tail is None else f"a file of save {tail.mark}"
        findings.broken(name, None, f"a file of save {mark}, with a footer", found)
        return []
    sums = None
    if tail is not None:
        try:
            footer = Footer(tail, lambda offset, length: disk.read(file, length, offset))
            sums = _Sums(footer)
        except ValueError as error:
            findings.broken(name, None, "a footer with the checksums of its blocks", str(error))
            return []
        bounds = (np.array([each[side] for each in records], dtype=np.int64) for side in (0, 1))
        for each, there in zip(records, footer.items_at(*bounds).tolist(), strict=True):
            if there not in (-1, item_id(each.item.name, each.chunk.offsets)):
                expected = f"this item in bytes {each.begin} to {each.end}, where .metadata places it"
                findings.broken(name, each.item.name, expected, "another item")
        n_blocks = sum(len(sums.of(each)) for each in records)
        if n_blocks != len(sums.crcs):
            expected = f"checksums of the {len(records)} items that .metadata places there"
            findings.broken(name, None, expected, f"{len(sums.crcs)} checksums, of which {n_blocks} are of them")
            return []
    runs: list[_Run] = []
    first = at = 0
    for number, record in enumerate(records):
        is_last = number == len(records) - 1
        if is_last or record.end - records[first].begin > _RUN_NBYTES:
            run, start, at, first = records[first : number + 1], at, record.end, number + 1
            if sums is None or tail is None:
                runs.append(_Run(name, file.path, partial(_spans_of_stock, run)))
            else:
                stop = nbytes - TAIL_NBYTES - tail.columns_nbytes if is_last else record.end
                runs.append(_Run(name, file.path, partial(_spans_of_ours, run, sums, start, stop)))
    return runs


def _spans_of_ours(records: Sequence[_Record], sums: _Sums, start: int, stop: int, window: _Window) -> Iterator[_Span]:
    """The data of records by its checksums. The bytes around it are compared with those that belong there.

    Args:
        start, stop: of the bytes that hold these records and nothing else.
    """
    window.limit = stop
    for record in records:
        name = record.item.name
        _check_gap(window, start, record.begin, name)
        blocks = sums.of(record)
        begin, end = (blocks[0][0], blocks[-1][1]) if blocks else (record.end, record.end)
        if end > record.end or begin - record.begin > _WINDOW_NBYTES:
            expected, found = f"data within bytes {record.begin} to {record.end}", f"checksums of {begin} to {end}"
            window.findings.broken(window.name, name, expected, found)
        else:
            header = bytes(window.view(record.begin, begin))
            for block_begin, block_end, crc in blocks:
                yield _Span(block_begin, block_end, crc, "data", name)
            crc = joined([each[2] for each in blocks], end - begin, sums.block_nbytes)
            around = header + bytes(window.view(end, record.end))
            if around and not _is_frame(record, around, crc, window):
                expected = f"what torch.save writes around data with CRC-32 {crc:08x}"
                window.findings.broken(window.name, name, expected, f"other bytes in {record.begin} to {record.end}")
        start = max(start, record.end)
    _check_gap(window, start, stop, None)


def _check_gap(window: _Window, begin: int, end: int, item: str | None) -> None:
    if any(bytes(view).strip(b"\0") for view in window.views(begin, end)):
        window.findings.broken(window.name, item, f"zeros in bytes {begin} to {end}, between two items", "other bytes")


def _is_frame(record: _Record, around: bytes, crc: int, window: _Window) -> bool:
    """Whether these bytes lie around the data of a record of ours. Another version of torch may have pickled it."""
    if record.dtype is None:
        return False
    frame = framed_record(record.dtype, record.chunk.sizes)
    if frame is not None and b"".join(frame.around(crc)) == around:
        return True
    frame = record_with_pickle_of(around, record.dtype, record.chunk.sizes)
    if frame is None or b"".join(frame.around(crc)) != around:
        return False
    _check_identity(record, window)
    return True


def _spans_of_stock(records: Sequence[_Record], window: _Window) -> Iterator[_Span]:
    window.limit = records[-1].end
    for record in records:
        if record.end - record.begin <= _WINDOW_NBYTES:
            window.view(record.begin, record.end)
        if record.item.is_tensor:
            _check_identity(record, window)
        yield from _spans_of_archive(window, record.item.name, record.begin, record.end)


def _check_identity(record: _Record, window: _Window) -> None:
    """Compare what a record says about its tensor with ``.metadata``, if it is that of a plain tensor."""
    parsed = parsed_record(lambda offset, nbytes: window.read(record.begin + offset, nbytes), record.end - record.begin)
    if parsed is None:
        return
    dtype = str(parsed.dtype).removeprefix("torch.")
    if (dtype, tuple(parsed.shape)) != (record.item.dtype, record.chunk.sizes):
        expected = f"{record.item.dtype} {list(record.chunk.sizes)}"
        found = f"{dtype} {list(parsed.shape)}: another item's record"
        window.findings.broken(window.name, record.item.name, expected, found)


def _spans_of_archive(window: _Window, item: str | None, begin: int, end: int) -> Iterator[_Span]:
    """The members of an archive of ``torch.save`` with the checksums in it."""
    try:
        members = zip_members(lambda offset, nbytes: window.read(begin + offset, nbytes), end - begin)
    except ValueError as error:
        expected = f"a record of torch.save at bytes {begin} to {end}"
        window.findings.broken(window.name, item, expected, str(error))
        return
    for name, member in sorted(members.items(), key=lambda entry: entry[1].offset):
        first = begin + member.offset
        if member.nbytes and not member.crc32:
            window.findings.not_verified("torch.save wrote no CRC-32 with it", member.nbytes)
        elif member.nbytes:
            yield _Span(first, first + member.nbytes, member.crc32, name, item)


# --- safetensors files


def _spans_of_shard(head: FileHead, window: _Window) -> Iterator[_Span]:
    for name, stored in sorted(head.tensors.items(), key=lambda entry: entry[1].offset):
        end = stored.offset + stored.nbytes
        if stored.crc32 is None:
            window.findings.not_verified("its safetensors file has no checksums", stored.nbytes)
            continue
        block_nbytes = SUM_NBYTES if stored.block_crc32s else max(stored.nbytes, 1)
        crcs = stored.block_crc32s or (stored.crc32,)
        for at, value in zip(range(stored.offset, end, block_nbytes), crcs, strict=False):
            yield _Span(at, min(at + block_nbytes, end), value, "data", name)


def _is_as_written(disk: Disk, path: str, stored: StoredFile, mark: str, head: FileHead, findings: Findings) -> bool:
    """Whether the head is, byte for byte, what our writer makes for this save of what ``.metadata`` places there.

    The checksums of data are taken from the head: they are compared when the data is read.
    """
    if head.mark != mark:
        findings.broken(stored.name, None, f"a file of save {mark}", f"a file of save {head.mark}")
        return False
    with disk.reading(path) as file:
        length = int.from_bytes(disk.read(file, LENGTH_NBYTES, 0), "little")
        data = disk.read(file, LENGTH_NBYTES + length, 0)
    tensors = sorted(head.tensors.values(), key=lambda each: (each.offset, each.nbytes))
    try:
        placed = {
            item.name: PlacedTensor(
                0, item.name, getattr(torch, item.dtype or ""), chunk.sizes, chunk.offsets, chunk.start
            )
            for item, chunk in stored.held
        }
        sums = None
        if all(each.crc32 is not None for each in tensors):
            blocks = [each.block_crc32s or ((each.crc32 or 0,) if each.nbytes else ()) for each in tensors]
            offset = np.array([each.offset for each in tensors], dtype=np.int64)
            nbytes = np.array([each.nbytes for each in tensors], dtype=np.int64)
            if all(joined(crcs, each.nbytes) == each.crc32 for crcs, each in zip(blocks, tensors, strict=True)):
                crcs = np.array([crc for of_tensor in blocks for crc in of_tensor], dtype=np.uint32)
                sums = SumColumns(offset, nbytes, crcs)
        is_right = ShardHead([placed[name] for name in head.tensors], len(data)).encode(mark, sums) == data
        is_right &= len(head.tensors) == len(stored.held)
    except (ValueError, KeyError, AttributeError):
        is_right = False
    if not is_right:
        expected = f"the head that robust_dcp writes for the {len(stored.held)} tensors of {METADATA_NAME}"
        starts = {name: tensor.offset for name, tensor in head.tensors.items()}
        elsewhere = (item.name for item, chunk in stored.held if starts.get(item.name) != chunk.start)
        findings.broken(stored.name, next(elsewhere, None), expected, "another head")
    return is_right
