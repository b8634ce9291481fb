"""Verifies a checkpoint: a load of all of it without a target.

The parts of ``storage`` that a load uses find the records, footers, heads and checksums. What a load takes on trust is
compared as well: the frames of records and the gaps between them, and ``.metadata`` with itself and with the sizes of
files. So a flipped bit in a file of ours is found wherever it is, and in a file of stock where a checksum can show it.

Threads take one run of neighbouring records after the other, and read it in windows of 4 MiB.
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

from robust_dcp.contents.read import Chunk, Contents, Item
from robust_dcp.errors import CorruptCheckpoint, RobustCheckpointError
from robust_dcp.staging import Block
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME, holds_raw_bytes, is_data_file, locate, mark_of
from robust_dcp.storage.index import IndexFile, fit_of_file
from robust_dcp.storage.layouts import PlacedTensor
from robust_dcp.storage.layouts.footer import TAIL_NBYTES, Footer, SumColumns, item_id
from robust_dcp.storage.layouts.read_head import FileHead
from robust_dcp.storage.layouts.safetensors import LENGTH_NBYTES, ShardHead
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.records.block_sums import SUM_NBYTES, block_counts, joined
from robust_dcp.storage.records.checksum import crc32
from robust_dcp.storage.records.parse_record import parse_record, zip_members_in
from robust_dcp.storage.records.torch_zip import record_template, template_of

__all__ = ["Findings", "Problem", "verify"]

_WINDOW_NBYTES: Final = 4 << 20
_BLOCK_NBYTES: Final = _WINDOW_NBYTES + (1 << 20)  # direct I/O reads up to a few pages more
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

    @contextlib.contextmanager
    def of_file(self, name: str) -> Iterator[None]:
        """An error within the block is a problem of that file."""
        try:
            yield
        except RobustCheckpointError as error:
            expected, found = getattr(error, "expected", None), getattr(error, "found", None)
            self.broken(
                name, getattr(error, "item", None), expected or "a file that can be read", found or error.message
            )


def verify(
    disk: Disk,
    contents: Contents,
    findings: Findings,
    *,
    jobs: int,
    with_data: bool,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Add what is wrong with a checkpoint.

    Args:
        jobs: how many threads read.
        with_data: whether data is read and compared with checksums; otherwise only sizes, marks and heads are.
        on_progress: is called several times a second.
    """
    _check_structure(contents, findings)
    for name in sorted(disk.list_directory(contents.path)):
        if is_data_file(name) and name not in contents.held:
            findings.notes.append(f"{name} does not belong to this checkpoint: a crashed save may have left it")
    index = os.path.join(contents.path, INDEX_NAME)
    if contents.written_by == "robust_dcp" and disk.exists(index):
        with findings.of_file(INDEX_NAME):
            file = IndexFile(disk, index)
            if file.fit == fit_of_file(disk, os.path.join(contents.path, METADATA_NAME)):
                file.check_all()
            else:
                findings.broken(
                    INDEX_NAME, None, f"the index of this {METADATA_NAME}", f"one of another {METADATA_NAME}"
                )
    _run(_tasks(disk, contents, findings, with_data=with_data), jobs, on_progress)


# --- .metadata with itself, and with the sizes of files


def _check_structure(contents: Contents, findings: Findings) -> None:
    home = METADATA_NAME if contents.written_by != "safetensors" else ""
    for item in contents:
        for chunk in item.chunks:
            _check_place(item, chunk, home, findings)
        if item.is_tensor:
            _check_cover(item, home, findings)
    for file in contents.files:
        if file.nbytes is None:
            chunks = f"{file.n_chunks} chunk{'' if file.n_chunks == 1 else 's'}"
            findings.broken(file.name, None, f"a file with {chunks}", "no such file")
        elif file.nbytes < file.needed_nbytes:
            findings.broken(file.name, None, f"at least {file.needed_nbytes} bytes", f"{file.nbytes} bytes")
        end, last = 0, ""
        for chunk, item in sorted(((chunk, item) for item, chunk in contents.held[file.name]), key=_by_place):
            if chunk.stored_nbytes and chunk.start < end:
                expected = f"bytes of its own from {chunk.start} on"
                findings.broken(file.name, item.name, expected, f"bytes up to {end} are of {last!r}")
            if chunk.start + chunk.stored_nbytes > end:
                end, last = chunk.start + chunk.stored_nbytes, item.name


def _by_place(held: tuple[Chunk, Item]) -> tuple[int, int]:
    return held[0].start, held[0].stored_nbytes


def _check_place(item: Item, chunk: Chunk, home: str, findings: Findings) -> None:
    if chunk.file is None:
        where = f"its chunk at {list(chunk.offsets)}" if item.is_tensor else "it"
        findings.broken(home, item.name, f"a file for {where}", "none")
    elif item.is_tensor and not chunk.transforms:
        needed, is_exact = math.prod(chunk.sizes) * item.itemsize, holds_raw_bytes(chunk.file)
        if chunk.stored_nbytes < needed or (is_exact and chunk.stored_nbytes != needed):
            expected = f"{'' if is_exact else 'at least '}{needed} bytes for {item.dtype} {list(chunk.sizes)}"
            findings.broken(home, item.name, expected, f"{chunk.stored_nbytes} bytes in {chunk.file}")


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
    if twice is not None:
        first, second = (f"{list(chunk.sizes)} at {list(chunk.offsets)}" for chunk in twice)
        findings.broken(home, item.name, "chunks that do not overlap", f"{first} and {second}")
        return
    n_elements = sum(math.prod(chunk.sizes) for chunk in item.chunks)
    if n_elements != math.prod(item.shape):
        expected = f"chunks with all {math.prod(item.shape)} elements of {list(item.shape)}"
        findings.broken(home, item.name, expected, f"chunks with {n_elements}")


def _overlapping(chunks: list[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Two chunks that share an element. It sweeps along the dimension in which the chunks begin at most places."""
    if len(chunks) < 2 or not chunks[0].offsets:
        return (chunks[0], chunks[1]) if len(chunks) > 1 else None
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


# --- files


class _Record(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file hold a chunk of an item, or an object.

    Attributes:
        sums: where the data lies in the file, its length and the CRC-32s of its blocks, if the footer has them.
    """

    begin: int
    end: int
    item: Item
    chunk: Chunk
    sums: tuple[int, int, Sequence[int]] | None = None


class _Window:
    """Reads a file for one thread. What lies close together is read at once.

    Args:
        name: of the file, relative to the checkpoint.
    """

    def __init__(self, file: DataFile, name: str, block: Block, findings: Findings) -> None:
        self.file, self.name, self.findings = file, name, findings
        self.limit = file.nbytes  # nothing beyond is read ahead: another thread reads it
        self._block = block
        self._begin = self._end = self._at = 0

    def view(self, begin: int, end: int) -> memoryview:
        """Bytes ``begin`` to ``end`` of the file, at most 4 MiB, until the next call."""
        if not self._begin <= begin <= end <= self._end:
            nbytes = max(end - begin, min(_WINDOW_NBYTES, self.limit - begin))
            self._at, found = self.file.read_block(self._block, begin, nbytes)
            self._begin, self._end = begin, begin + found
            self.findings.count(read_nbytes=found)
            if self._end < end:
                expected, ends = f"bytes {begin} to {end}", f"the file ends at {self._end}"
                raise CorruptCheckpoint(ends, file=self.name, expected=expected, found=ends)
        first = self._at + begin - self._begin
        return self._block.view[first : first + end - begin]

    def read(self, offset: int, nbytes: int) -> bytes:
        """Some bytes; fewer where the file ends. Outside of the window it reads no more than these."""
        if self._begin <= offset and offset + nbytes <= self._end:
            return bytes(self.view(offset, offset + nbytes))
        buffer = bytearray(max(0, nbytes))
        return bytes(buffer[: self.file.read_into(memoryview(buffer), offset)]) if nbytes > 0 else b""

    def compare(
        self, item: str | None, what: str, begin: int, end: int, crcs: Sequence[int], block_nbytes: int
    ) -> bool:
        """Whether bytes ``begin`` to ``end`` have the CRC-32s ``crcs`` of their blocks. If not, that is noted."""
        for number, expected in enumerate(crcs):
            first = begin + number * block_nbytes
            last = min(first + block_nbytes, end)
            value = 0
            for at in range(first, last, _WINDOW_NBYTES):
                value = crc32(self.view(at, min(at + _WINDOW_NBYTES, last)), value)
            if value != expected:
                where = f"CRC-32 {expected:08x} of {what}, bytes {first} to {last}"
                self.findings.broken(self.name, item, where, f"{value:08x}")
                return False
        self.findings.count(verified_nbytes=end - begin)
        return True


Task = Callable[[Block], None]


def _tasks(disk: Disk, contents: Contents, findings: Findings, *, with_data: bool) -> Iterator[Task]:
    for stored in contents.files:
        if stored.nbytes is not None:  # a missing file was noted with its size
            yield from _tasks_of_file(disk, contents, stored.name, findings, with_data=with_data)
    path = os.path.join(contents.path, _OF_MEGATRON)
    if with_data and contents.written_by != "safetensors" and disk.exists(path):
        with findings.of_file(_OF_MEGATRON):
            file = DataFile(disk, path, None)
            yield _task(file, _OF_MEGATRON, findings, lambda w: _check_archive(w, None, 0, file.nbytes), _Count(1))


def _tasks_of_file(disk: Disk, contents: Contents, name: str, findings: Findings, *, with_data: bool) -> Iterator[Task]:
    mark = mark_of(contents.save_id) if contents.written_by == "robust_dcp" and contents.save_id is not None else None
    with findings.of_file(name):
        file = DataFile(disk, locate(disk, contents.path, name, file=contents.path), None)
        checks: list[Callable[[_Window], None]] = []
        try:
            if holds_raw_bytes(name):
                head = _checked_head(file, name, mark, contents.held[name], findings)
                checks = [] if head is None else _checks_of_shard(head)
            else:
                checks = _checks_of_records(file, name, mark, contents.held[name], findings)
        finally:
            if not checks or not with_data:
                file.close()
                checks = []
        left = _Count(len(checks))
        yield from (_task(file, name, findings, check, left) for check in checks)


class _Count:
    """How many tasks still read a file."""

    def __init__(self, left: int) -> None:
        self._left = left
        self._lock = threading.Lock()

    def is_last(self) -> bool:
        with self._lock:
            self._left -= 1
            return not self._left


def _task(file: DataFile, name: str, findings: Findings, check: Callable[[_Window], None], left: _Count) -> Task:
    def run(block: Block) -> None:
        try:
            with findings.of_file(name):
                check(_Window(file, name, block, findings))
        finally:
            if left.is_last():
                file.close()

    return run


def _run(tasks: Iterator[Task], jobs: int, on_progress: Callable[[], None]) -> None:
    """Run tasks on ``jobs`` threads. The next one is made when a thread is free."""
    lock = threading.Lock()
    is_over = threading.Event()

    def work() -> None:
        block = Block(_BLOCK_NBYTES)
        try:
            while not is_over.is_set():
                with lock:
                    task = next(tasks, None)
                if task is None:
                    return
                task(block)
        finally:
            is_over.set()

    with ThreadPoolExecutor(jobs, thread_name_prefix="robust_dcp-verify") as pool:
        running = {pool.submit(work) for _ in range(jobs)}
        while running:
            done, running = wait(running, timeout=_POLL_SECONDS)
            on_progress()
            for each in done:
                each.result()


# --- files of records


def _checks_of_records(
    file: DataFile, name: str, mark: str | None, held: Sequence[tuple[Item, Chunk]], findings: Findings
) -> list[Callable[[_Window], None]]:
    """Compare the footer with ``.metadata``, and cut the file into runs of records."""
    places = ((chunk.start, chunk.start + chunk.stored_nbytes, item, chunk) for item, chunk in held)
    records = [_Record(*each) for each in sorted(places, key=lambda each: each[:2]) if each[1] <= file.nbytes]
    footer = file.footer
    if mark is not None and footer is None:
        found = f"{file.nbytes} bytes that do not end with a footer: it is cut short, damaged, or another file"
        findings.broken(name, None, "a footer", found)
        return []
    if mark is not None and footer is not None and footer.tail.mark != mark:
        findings.broken(name, None, f"a file of save {mark}", f"a file of save {footer.tail.mark}")
        return []
    if footer is not None and footer.tail.n_items:
        with_sums = _with_sums(name, footer, records, findings)
        if with_sums is None:
            return []
        if mark is not None:
            end = file.nbytes - TAIL_NBYTES - footer.tail.columns_nbytes
            return [partial(_check_run, run=run, is_ours=True) for run in _runs(with_sums, end)]
    return [partial(_check_run, run=run, is_ours=False) for run in _runs(records, None)]


def _with_sums(name: str, footer: Footer, records: list[_Record], findings: Findings) -> list[_Record] | None:
    """The records with their checksums; ``None`` if the footer does not say what ``.metadata`` says."""
    begins, ends = (np.array([each[side] for each in records], dtype=np.int64) for side in (0, 1))
    try:
        columns: SumColumns = footer.columns()
        item_ids = footer.items_at(begins, ends).tolist()
    except ValueError as error:
        findings.broken(name, None, "a footer with the checksums of its blocks", str(error))
        return None
    for each, there in zip(records, item_ids, strict=True):
        if there not in (-1, item_id(each.item.name, each.chunk.offsets)):
            expected = f"this item in bytes {each.begin} to {each.end}, where .metadata places it"
            findings.broken(name, each.item.name, expected, "another item")
    offsets, lengths = columns.offset.tolist(), columns.nbytes.tolist()
    first_sum = [0, *np.cumsum(block_counts(columns.nbytes, footer.tail.block_nbytes)).tolist()]
    crcs = columns.crcs.tolist()
    rows = np.searchsorted(columns.offset, begins).tolist()
    is_there = [row < len(offsets) and offsets[row] < each.end for row, each in zip(rows, records, strict=True)]
    of_no_item = set(range(len(offsets))) - {row for row, is_so in zip(rows, is_there, strict=True) if is_so}
    if of_no_item:
        found = f"checksums of {len(offsets)} items, one of them at {offsets[min(of_no_item)]}"
        expected = f"checksums of the {len(records)} items that .metadata places there"
        findings.broken(name, None, expected, found)
        return None
    return [
        each._replace(sums=(offsets[row], lengths[row], crcs[first_sum[row] : first_sum[row + 1]]) if is_so else None)
        for row, is_so, each in zip(rows, is_there, records, strict=True)
    ]


Run = list[tuple[_Record | None, int, int]]
"""Neighbours in a file: a record with the gap before it, from ``begin`` to ``end``; the last gap has no record."""


def _runs(records: Sequence[_Record], end: int | None) -> Iterator[Run]:
    """Cut a file where runs get long. ``end``: where the last gap ends; ``None`` if gaps may hold anything."""
    run: Run = []
    at = nbytes = 0
    for record in records:
        run.append((record, at, record.begin))
        nbytes += record.end - record.begin
        at = max(at, record.end)
        if nbytes > _RUN_NBYTES:
            yield run
            run, nbytes = [], 0
    if end is not None:
        run.append((None, at, end))
    if run:
        yield run


def _check_run(window: _Window, run: Run, is_ours: bool) -> None:
    last, _, window.limit = run[-1]
    if last is not None:
        window.limit = last.end
    for record, begin, end in run:
        if is_ours:
            _check_zeros(window, record, begin, end)
        if record is None:
            return
        if record.end - record.begin <= _WINDOW_NBYTES:
            window.view(record.begin, record.end)
        if is_ours:
            _check_ours(window, record)
        elif record.chunk.transforms:
            why = f"it was written with {', '.join(record.chunk.transforms)}, which has no checksum that we know"
            window.findings.not_verified(why, record.end - record.begin)
        else:
            if record.item.is_tensor:
                _check_identity(window, record)
            _check_archive(window, record.item.name, record.begin, record.end)


def _check_zeros(window: _Window, record: _Record | None, begin: int, end: int) -> None:
    """The gap before a record is empty."""
    for at in range(begin, end, _WINDOW_NBYTES):
        last = min(at + _WINDOW_NBYTES, end)
        if bytes(window.view(at, last)).count(0) != last - at:
            item = None if record is None else record.item.name
            window.findings.broken(window.name, item, f"zeros from {begin} to {end}", "other bytes")


def _check_ours(window: _Window, record: _Record) -> None:
    """Compare the data of a record with its checksums, and the bytes around it with those that belong there."""
    name, sizes = record.item.name, record.chunk.sizes
    begin, nbytes, crcs = record.sums or (record.end, 0, ())
    if begin + nbytes > record.end:
        found = f"checksums up to {begin + nbytes}"
        window.findings.broken(window.name, name, f"data up to {record.end}", found)
        return
    if not window.compare(name, "data", begin, begin + nbytes, crcs, SUM_NBYTES):
        return
    if (begin, begin + nbytes) == (record.begin, record.end):
        return
    dtype = getattr(torch, record.item.dtype or "", None)
    crc = joined(crcs, nbytes)
    is_right = False
    if isinstance(dtype, torch.dtype):
        template = record_template(dtype, sizes)
        header_nbytes = template.header_nbytes if template is not None and not nbytes else begin - record.begin
        header = window.read(record.begin, header_nbytes)
        at = record.begin + header_nbytes + nbytes
        around = header, window.read(at, record.end - at)
        is_right = template is not None and around == (template.header(crc), template.trailer(crc))
        if not is_right:  # another version of torch pickles in another way
            template = template_of(header, dtype, sizes)
            is_right = template is not None and around == (template.header(crc), template.trailer(crc))
            if is_right:
                _check_identity(window, record)
    if not is_right:
        what = record.item.dtype if record.item.is_tensor else "object"
        expected = f"the frame of a record with {what} {list(sizes)} at bytes {record.begin} to {record.end}"
        window.findings.broken(window.name, name, expected, "other bytes around the data")


def _check_identity(window: _Window, record: _Record) -> None:
    """Compare what a record says about its tensor with ``.metadata``, if it is that of a plain tensor."""
    parsed = parse_record(lambda offset, nbytes: window.read(record.begin + offset, nbytes), record.end - record.begin)
    if parsed is None:
        return
    dtype = str(parsed.dtype).removeprefix("torch.")
    if (dtype, tuple(parsed.shape)) != (record.item.dtype, record.chunk.sizes):
        expected = f"{record.item.dtype} {list(record.chunk.sizes)}"
        found = f"{dtype} {list(parsed.shape)}: another item's record"
        window.findings.broken(window.name, record.item.name, expected, found)


def _check_archive(window: _Window, item: str | None, begin: int, end: int) -> None:
    """Compare the members of an archive of ``torch.save`` with the checksums in it."""
    findings = window.findings
    try:
        members = zip_members_in(lambda offset, nbytes: window.read(begin + offset, nbytes), end - begin)
    except ValueError as error:
        findings.broken(window.name, item, f"a record of torch.save at bytes {begin} to {end}", str(error))
        return
    for name, member in sorted(members.items(), key=lambda entry: entry[1].offset):
        first = begin + member.offset
        if member.nbytes and not member.crc32:
            findings.not_verified("torch.save wrote no CRC-32 with it", member.nbytes)
        elif member.nbytes:
            window.compare(item, name, first, first + member.nbytes, [member.crc32], member.nbytes)


# --- safetensors files


def _checked_head(
    file: DataFile, name: str, mark: str | None, held: Sequence[tuple[Item, Chunk]], findings: Findings
) -> FileHead | None:
    """The head, after a comparison with what ``.metadata`` says; ``None`` if it is of another save."""
    head = file.head.get()
    if head is None:
        return None
    if mark is not None and head.mark != mark:
        findings.broken(name, None, f"a file of save {mark}", f"a file of save {head.mark}")
        return None
    for item, chunk in held:
        stored = head.tensors.get(item.name)
        if stored is None:
            findings.broken(name, item.name, "the tensor in the head of the file", "no such tensor")
            continue
        dtype = str(stored.dtype).removeprefix("torch.")
        offsets = stored.chunk_offset if mark is not None else chunk.offsets
        there = (stored.offset, stored.nbytes, dtype, stored.shape, offsets)
        if there != (chunk.start, chunk.stored_nbytes, item.dtype, chunk.sizes, chunk.offsets):
            expected = f"{item.dtype} {list(chunk.sizes)} of {list(chunk.offsets)}, at byte {chunk.start}"
            found = f"{dtype} {list(stored.shape)} of {list(stored.chunk_offset)}, at byte {stored.offset}"
            findings.broken(name, item.name, expected, found)
    if mark is not None and not _is_as_written(file, head):
        findings.broken(name, None, "the head of a safetensors file as robust_dcp writes it", "other bytes")
    return head


def _is_as_written(file: DataFile, head: FileHead) -> bool:
    """Whether the head is, byte for byte, what our writer makes of what the head says."""
    length = bytearray(LENGTH_NBYTES)
    file.read_into(memoryview(length), 0)
    data = bytearray(LENGTH_NBYTES + int.from_bytes(length, "little"))
    file.read_into(memoryview(data), 0)
    placed = [
        PlacedTensor(number, name, each.dtype, each.shape, each.chunk_offset, each.offset)
        for number, (name, each) in enumerate(head.tensors.items())
    ]
    stored = sorted(head.tensors.values(), key=lambda each: (each.offset, each.nbytes))
    sums = None
    try:
        if all(each.crc32 is not None for each in stored):
            blocks = [each.block_crc32s or ((each.crc32 or 0,) if each.nbytes else ()) for each in stored]
            if any(each.nbytes > SUM_NBYTES and not each.block_crc32s for each in stored):
                return True  # such a head has too few checksums to make it once more; its parts were compared
            whole = [joined(crcs, each.nbytes) for crcs, each in zip(blocks, stored, strict=True)]
            if any(crc != each.crc32 for crc, each in zip(whole, stored, strict=True) if each.nbytes):
                return False
            offset, nbytes = (
                np.array(c, dtype=np.int64) for c in ([s.offset for s in stored], [s.nbytes for s in stored])
            )
            sums = SumColumns(offset, nbytes, np.array([crc for crcs in blocks for crc in crcs], dtype=np.uint32))
        return ShardHead(placed, len(data)).encode(head.mark or "", sums) == data
    except (ValueError, KeyError):
        return False


def _checks_of_shard(head: FileHead) -> list[Callable[[_Window], None]]:
    def check(window: _Window) -> None:
        for name, stored in sorted(head.tensors.items(), key=lambda entry: entry[1].offset):
            end = stored.offset + stored.nbytes
            if stored.crc32 is None:
                window.findings.not_verified("its safetensors file has no checksums", stored.nbytes)
            elif stored.block_crc32s:
                window.compare(name, "data", stored.offset, end, stored.block_crc32s, SUM_NBYTES)
            elif stored.nbytes:
                window.compare(name, "data", stored.offset, end, [stored.crc32], stored.nbytes)

    return [check]
