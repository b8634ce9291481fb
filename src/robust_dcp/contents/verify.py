"""Verifies a checkpoint: a load of all of it without a target.

The parts of ``storage`` that a load uses find the records, footers, heads and checksums. From these each file is cut
into *spans* of bytes whose CRC-32 is known: blocks of data, but also the frames of records and the gaps between them,
which a load takes on trust. So a flipped bit in a file of ours is found wherever it is, and in a file of stock where a
checksum can show it. ``.metadata`` is compared with itself and with the sizes of files.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache, partial
from typing import Final, NamedTuple

import numpy as np
import torch

from robust_dcp.contents.read import Chunk, Contents, Item, StoredFile
from robust_dcp.errors import CorruptCheckpoint, RobustCheckpointError
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME, holds_raw_bytes, is_data_file, locate
from robust_dcp.storage.index import IndexFile, fit_of_file
from robust_dcp.storage.layouts import PlacedTensor
from robust_dcp.storage.layouts.footer import TAIL_NBYTES, Footer, SumColumns, Tail, item_id
from robust_dcp.storage.layouts.read_head import FileHead, read_head
from robust_dcp.storage.layouts.safetensors import LENGTH_NBYTES, ShardHead
from robust_dcp.storage.records.checksum import SUM_NBYTES, block_counts, crc32, joined
from robust_dcp.storage.records.record import framed_record, parsed_record, record_with_pickle_of, zip_members

__all__ = ["Findings", "Problem", "verify"]

_WINDOW_NBYTES: Final = 4 << 20
_RUN_NBYTES: Final = 16 << 20
_POLL_SECONDS: Final = 0.1
_MOST_PROBLEMS: Final = 10_000
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
        problems: at most one for each item of a file, and at most 10,000.
        n_problems: how many there are.
        notes: what a user should know, and is no damage.
        unverified: by the reason, how many items have no checksum, and their bytes.
        verified_nbytes: bytes of data that have the checksum that was written with them.
        checked_nbytes: bytes that were read, to show progress.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.n_problems = 0
        self.notes: list[str] = []
        self.unverified: dict[str, tuple[int, int]] = {}
        self.verified_nbytes = 0
        self.checked_nbytes = 0
        self._seen: set[tuple[str, str | None]] = set()
        self._lock = threading.Lock()

    def broken(self, file: str, item: str | None, expected: str, found: str) -> None:
        """Note a problem. The first one of an item in a file counts, because the others follow from it."""
        with self._lock:
            if (file, item) not in self._seen:
                self.n_problems += 1
                if len(self.problems) < _MOST_PROBLEMS:
                    self._seen.add((file, item))
                    self.problems.append(Problem(file, item, expected, found))

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
            elif item.is_tensor and not chunk.transforms:
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
    for chunk in item.chunks:
        fits = len(chunk.offsets) == len(item.shape) and all(
            offset + size <= whole for offset, size, whole in zip(chunk.offsets, chunk.sizes, item.shape, strict=True)
        )
        if not fits:
            found = f"a chunk {list(chunk.sizes)} at {list(chunk.offsets)}"
            findings.broken(home, item.name, f"chunks within {list(item.shape)}", found)
            return
    twice = _overlapping([chunk for chunk in item.chunks if 0 not in chunk.sizes])
    n_elements = sum(math.prod(chunk.sizes) for chunk in item.chunks)
    if twice is not None:
        first, second = (f"{list(chunk.sizes)} at {list(chunk.offsets)}" for chunk in twice)
        findings.broken(home, item.name, "chunks that do not overlap", f"{first} and {second}")
    elif n_elements != math.prod(item.shape):
        expected = f"chunks with all {math.prod(item.shape)} elements of {list(item.shape)}"
        findings.broken(home, item.name, expected, f"chunks with {n_elements}")


def _overlapping(chunks: list[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Two chunks that share an element. It sweeps along the dimension in which the chunks begin at most places."""
    if len(chunks) < 2:
        return None
    if not chunks[0].offsets:
        return chunks[0], chunks[1]
    along = max(range(len(chunks[0].offsets)), key=lambda d: len({chunk.offsets[d] for chunk in chunks}))
    active: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda each: each.offsets[along]):
        active = [each for each in active if each.offsets[along] + each.sizes[along] > chunk.offsets[along]]
        for each in active:
            sides = zip(each.offsets, each.sizes, chunk.offsets, chunk.sizes, strict=True)
            if all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in sides):
                return each, chunk
        active.append(chunk)
    return None


# --- spans


class _Span(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file, and what they are.

    Attributes:
        crc: the CRC-32 that they have; ``None`` if it is not known, so ``is_right`` decides.
        item: whose they are; ``None`` if nobody's.
        is_right: asked where the CRC-32 is another one: whether the bytes are right all the same.
    """

    begin: int
    end: int
    crc: int | None
    what: str = "data"
    item: str | None = None
    is_right: Callable[[_Window], bool] | None = None


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

    def read(self, offset: int, nbytes: int) -> bytes:
        """Some bytes; fewer where the file ends. Outside of the window it reads no more than these."""
        if self._begin <= offset <= offset + nbytes <= self._begin + len(self._data):
            return bytes(self.view(offset, offset + nbytes))
        return self._disk.read(self._file, max(0, nbytes), offset)

    def crc32(self, begin: int, end: int) -> int:
        value = 0
        for at in range(begin, end, _WINDOW_NBYTES):
            value = crc32(self.view(at, min(at + _WINDOW_NBYTES, end)), value)
        return value


def _check(disk: Disk, run: _Run, findings: Findings) -> None:
    with findings.of_file(run.name), disk.reading(run.path) as file:
        window = _Window(disk, file, run.name, findings)
        for span in run.spans(window):
            value = window.crc32(span.begin, span.end)
            if value == span.crc:
                findings.count(verified_nbytes=span.end - span.begin if span.item else 0)
            elif span.is_right is None or not span.is_right(window):
                sum_text = "what torch.save writes" if span.crc is None else f"CRC-32 {span.crc:08x}"
                expected = f"{sum_text} of {span.what}, bytes {span.begin} to {span.end}"
                findings.broken(run.name, span.item, expected, f"{value:08x}")


def _runs_of(contents: Contents, findings: Findings, stored: StoredFile) -> list[_Run]:
    """What there is to read in a file. Its head or its footer is compared with ``.metadata`` now."""
    disk, name = contents.disk, stored.name
    with findings.of_file(name):
        path = locate(disk, contents.path, name, file=contents.path)
        if holds_raw_bytes(name):
            head = read_head(disk, path)
            is_of_save = _fits(disk, path, stored, contents.mark, head, findings)
            return [_Run(name, path, partial(_spans_of_shard, head))] if is_of_save else []
        with disk.reading(path) as file:
            return _runs_of_records(disk, file, stored, contents.mark, findings)
    return []


# --- files of records


class _Record(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file hold a chunk of an item, or an object.

    Attributes:
        gap_at: where the record before it ends.
        data_at, data_nbytes, crcs, block_nbytes: where its data lies, and the CRC-32s of its blocks, if the footer has
            them.
    """

    begin: int
    end: int
    item: Item
    chunk: Chunk
    gap_at: int = 0
    data_at: int = 0
    data_nbytes: int = 0
    crcs: Sequence[int] = ()
    block_nbytes: int = SUM_NBYTES


def _runs_of_records(
    disk: Disk, file: OpenFile, stored: StoredFile, mark: str | None, findings: Findings
) -> list[_Run]:
    """Compare the footer with ``.metadata``, and cut the file into runs of records."""
    name, nbytes = stored.name, disk.size(file)
    places = ((chunk.start, chunk.start + chunk.stored_nbytes, item, chunk) for item, chunk in stored.held)
    records = [_Record(*each) for each in places if each[1] <= nbytes]
    tail = Tail.decode(disk.read(file, TAIL_NBYTES, max(0, nbytes - TAIL_NBYTES)), nbytes)
    if mark is not None and (tail is None or tail.mark != mark):
        found = (
            "no footer: it is cut short, damaged, or another file" if tail is None else f"a file of save {tail.mark}"
        )
        findings.broken(name, None, f"a file of save {mark}, with a footer", found)
        return []
    if tail is not None and tail.n_items:
        try:
            footer = Footer(tail, lambda offset, length: disk.read(file, length, offset))
            columns = footer.columns()
        except ValueError as error:
            findings.broken(name, None, "a footer with the checksums of its blocks", str(error))
            return []
        with_sums = _with_sums(name, footer, columns, records, findings)
        if with_sums is None:
            return []
        records = with_sums
    end = None if mark is None or tail is None else nbytes - TAIL_NBYTES - tail.columns_nbytes
    path, runs, first, at = file.path, [], 0, 0
    for number, record in enumerate(records):
        records[number] = record._replace(gap_at=at)
        at = max(at, record.end)
        is_last = number == len(records) - 1
        if is_last or record.end - records[first].begin > _RUN_NBYTES:
            run = records[first : number + 1]
            runs.append(_Run(name, path, partial(_spans_of_ours if end is not None else _spans_of_stock, run)))
            first = number + 1
    if end is not None:
        runs.append(_Run(name, path, lambda window: _gap(at, end, None)))
    return runs


def _with_sums(
    name: str, footer: Footer, columns: SumColumns, records: list[_Record], findings: Findings
) -> list[_Record] | None:
    """The records with their checksums; ``None`` if the footer has checksums of other data."""
    begins, ends = (np.array([each[side] for each in records], dtype=np.int64) for side in (0, 1))
    for each, there in zip(records, footer.items_at(begins, ends).tolist(), strict=True):
        if there not in (-1, item_id(each.item.name, each.chunk.offsets)):
            expected = f"this item in bytes {each.begin} to {each.end}, where .metadata places it"
            findings.broken(name, each.item.name, expected, "another item")
    offsets, lengths, crcs = columns.offset.tolist(), columns.nbytes.tolist(), columns.crcs.tolist()
    block_nbytes = footer.tail.block_nbytes
    first_sum = [0, *np.cumsum(block_counts(columns.nbytes, block_nbytes)).tolist()]
    found, rows = [], set()
    for each, row in zip(records, np.searchsorted(columns.offset, begins).tolist(), strict=True):
        has_sums = row < len(offsets) and offsets[row] < each.end
        if has_sums:
            rows.add(row)
            sums = crcs[first_sum[row] : first_sum[row + 1]]
            each = each._replace(data_at=offsets[row], data_nbytes=lengths[row], crcs=sums, block_nbytes=block_nbytes)
        found.append(each if has_sums else each._replace(data_at=each.end))
    if len(rows) < len(offsets):
        expected = f"checksums of the {len(records)} items that .metadata places there"
        findings.broken(name, None, expected, f"checksums of {len(offsets)} items")
        return None
    return found


@lru_cache(maxsize=256)
def _crc_of_zeros(nbytes: int) -> int:
    return crc32(bytes(nbytes))


def _gap(begin: int, end: int, item: str | None) -> Iterator[_Span]:
    for at in range(begin, end, _WINDOW_NBYTES):
        last = min(at + _WINDOW_NBYTES, end)
        yield _Span(at, last, _crc_of_zeros(last - at), "the zeros between two items", item)


def _spans_of_ours(records: Sequence[_Record], window: _Window) -> Iterator[_Span]:
    """The data of records by its checksums, and the bytes around it by those that belong there."""
    window.limit = records[-1].end
    for record in records:
        name, begin, end = record.item.name, record.data_at, record.data_at + record.data_nbytes
        yield from _gap(record.gap_at, record.begin, name)
        if end > record.end or begin < record.begin:
            expected, found = f"data within bytes {record.begin} to {record.end}", f"checksums of {begin} to {end}"
            window.findings.broken(window.name, name, expected, found)
            continue
        dtype, frame = getattr(torch, record.item.dtype or "", None), None
        if isinstance(dtype, torch.dtype):
            frame = framed_record(dtype, record.chunk.sizes)
        if not record.data_nbytes and frame is not None:
            begin = end = min(record.begin + frame.data_offset, record.end)
        crc = joined(record.crcs, record.data_nbytes, record.block_nbytes)
        if (begin, end) != (record.begin, record.end):
            header, trailer = (None, None) if frame is None else frame.around(crc)
            other = partial(_is_of_another_torch, record, begin, end, crc)
            for first, last, around in ((record.begin, begin, header), (end, record.end, trailer)):
                is_like = around is not None and len(around) == last - first
                known = crc32(around) if around is not None and is_like else None
                yield _Span(first, last, known, "the frame of a record", name, other)
        for at, value in zip(range(begin, end, record.block_nbytes), record.crcs, strict=True):
            yield _Span(at, min(at + record.block_nbytes, end), value, "data", name)


def _is_of_another_torch(record: _Record, begin: int, end: int, crc: int, window: _Window) -> bool:
    """Whether the bytes around the data are what another version of torch writes, which pickles in another way."""
    header = window.read(record.begin, begin - record.begin)
    dtype = getattr(torch, record.item.dtype or "", None)
    if not isinstance(dtype, torch.dtype):
        return False
    frame = record_with_pickle_of(header, dtype, record.chunk.sizes)
    if frame is None or (header, window.read(end, record.end - end)) != frame.around(crc):
        return False
    _check_identity(record, window)
    return True


def _spans_of_stock(records: Sequence[_Record], window: _Window) -> Iterator[_Span]:
    window.limit = records[-1].end
    for record in records:
        if record.end - record.begin <= _WINDOW_NBYTES:
            window.view(record.begin, record.end)
        if record.chunk.transforms:
            why = f"it was written with {', '.join(record.chunk.transforms)}, which has no checksum that we know"
            window.findings.not_verified(why, record.end - record.begin)
            continue
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


def _fits(disk: Disk, path: str, file: StoredFile, mark: str | None, head: FileHead, findings: Findings) -> bool:
    """Compare a head with what ``.metadata`` says. Returns whether it is of this save."""
    if mark is not None and head.mark != mark:
        findings.broken(file.name, None, f"a file of save {mark}", f"a file of save {head.mark}")
        return False
    for item, chunk in file.held:
        stored = head.tensors.get(item.name)
        if stored is None:
            findings.broken(file.name, item.name, "the tensor in the head of the file", "no such tensor")
            continue
        dtype = str(stored.dtype).removeprefix("torch.")
        offsets = stored.chunk_offset if mark is not None else chunk.offsets
        there = (stored.offset, stored.nbytes, dtype, stored.shape, offsets)
        if there != (chunk.start, chunk.stored_nbytes, item.dtype, chunk.sizes, chunk.offsets):
            expected = f"{item.dtype} {list(chunk.sizes)} of {list(chunk.offsets)}, at byte {chunk.start}"
            found = f"{dtype} {list(stored.shape)} of {list(stored.chunk_offset)}, at byte {stored.offset}"
            findings.broken(file.name, item.name, expected, found)
    if mark is not None and not _is_as_written(disk, path, head):
        findings.broken(file.name, None, "the head of a safetensors file as robust_dcp writes it", "other bytes")
    return True


def _is_as_written(disk: Disk, path: str, head: FileHead) -> bool:
    """Whether the head is, byte for byte, what our writer makes of what the head says."""
    with disk.reading(path) as file:
        length = int.from_bytes(disk.read(file, LENGTH_NBYTES, 0), "little")
        data = disk.read(file, LENGTH_NBYTES + length, 0)
    tensors = [
        PlacedTensor(number, name, each.dtype, each.shape, each.chunk_offset, each.offset)
        for number, (name, each) in enumerate(head.tensors.items())
    ]
    stored = sorted(head.tensors.values(), key=lambda each: (each.offset, each.nbytes))
    sums = None
    try:
        if all(each.crc32 is not None for each in stored):
            blocks = [each.block_crc32s or ((each.crc32 or 0,) if each.nbytes else ()) for each in stored]
            if any(joined(crcs, each.nbytes) != (each.crc32 or 0) for crcs, each in zip(blocks, stored, strict=True)):
                return False
            offset = np.array([each.offset for each in stored], dtype=np.int64)
            nbytes = np.array([each.nbytes for each in stored], dtype=np.int64)
            sums = SumColumns(offset, nbytes, np.array([crc for crcs in blocks for crc in crcs], dtype=np.uint32))
        return ShardHead(tensors, len(data)).encode(head.mark or "", sums) == data
    except (ValueError, KeyError):
        return False
