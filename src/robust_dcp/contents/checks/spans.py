"""Ranges of a file that are compared with checksums, and the threads that read them.

A thread reads up to 4 MiB at a time, so memory does not depend on the size of the checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, NamedTuple

from robust_dcp.contents.checks.findings import Findings
from robust_dcp.errors import StorageError
from robust_dcp.staging import Block
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.records.checksum import crc32, crc32_of_both

__all__ = ["READ_NBYTES", "Span", "Task", "Whole", "pieces", "run_tasks", "tasks_of"]

READ_NBYTES: Final = 4 << 20
_PIECE_NBYTES: Final = 1 << 20
_GAP_NBYTES: Final = 64 << 10
_BLOCK_NBYTES: Final = READ_NBYTES + (1 << 20)  # direct I/O reads up to a few pages more
_POLL_SECONDS: Final = 0.1


class Whole:
    """Data with a single CRC-32, whose pieces several threads check.

    Args:
        item: the name of the item.
        what: what has the checksum, for the message.
        begin, end: where the data lies in the file.
        expected: the CRC-32.
    """

    def __init__(self, item: str | None, what: str, begin: int, end: int, expected: int) -> None:
        self.item, self.what, self.begin, self.end, self.expected = item, what, begin, end, expected
        self._found: dict[int, tuple[int, int]] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    def add(self, begin: int, nbytes: int, value: int) -> int | None:
        """Add the CRC-32 of a piece. The last one gives the CRC-32 of all."""
        with self._lock:
            self._found[begin] = (value, nbytes)
            self._nbytes += nbytes
            if self._nbytes < self.end - self.begin:
                return None
        total = 0
        for _, (each, length) in sorted(self._found.items()):
            total = crc32_of_both(total, each, length)
        return total


class Span(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file.

    Attributes:
        item: whose they are.
        expected: their CRC-32; ``None``: they are zeros, or a piece of ``whole``.
        whole: the data of which they are a piece.
    """

    begin: int
    end: int
    item: str | None
    expected: int | None
    whole: Whole | None = None


Task = Callable[[Block], None]


def pieces(whole: Whole) -> Iterator[Span]:
    """The spans of data that has a single checksum."""
    for begin in range(whole.begin, whole.end, _PIECE_NBYTES):
        yield Span(begin, min(begin + _PIECE_NBYTES, whole.end), whole.item, None, whole)


def tasks_of(file: DataFile, name: str, spans: Iterable[Span], findings: Findings) -> Iterator[Task]:
    """Put neighbours together, so that one read gets many small items. After the last task the file is closed.

    Args:
        name: of the file, relative to the checkpoint.
        spans: in the order of the file; none is longer than ``READ_NBYTES``.
    """
    users = _Users(file)
    try:
        together: list[Span] = []
        for span in spans:
            if together and (span.end - together[0].begin > READ_NBYTES or span.begin - together[-1].end > _GAP_NBYTES):
                yield _task(users, name, together, findings)
                together = []
            together.append(span)
        if together:
            yield _task(users, name, together, findings)
    finally:
        users.leave()


class _Users:
    """Closes a file when the last of its users has left. The one that makes tasks is the first user."""

    def __init__(self, file: DataFile) -> None:
        self.file = file
        self._n_users = 1
        self._lock = threading.Lock()

    def enter(self) -> None:
        with self._lock:
            self._n_users += 1

    def leave(self) -> None:
        with self._lock:
            self._n_users -= 1
            is_last = self._n_users == 0
        if is_last:
            self.file.close()


def _task(users: _Users, name: str, spans: list[Span], findings: Findings) -> Task:
    users.enter()

    def check(block: Block) -> None:
        first, end = spans[0].begin, spans[-1].end
        try:
            at, found = users.file.read_block(block, first, end - first)
        except StorageError as error:
            findings.broken(name, spans[0].item, f"bytes {first} to {end}", error.message)
            return
        finally:
            users.leave()
        if found < end - first:
            findings.broken(name, spans[0].item, f"bytes {first} to {end}", f"the file ends at {first + found}")
            return
        for span in spans:
            data = block.view[at + span.begin - first : at + span.end - first]
            _compare(span, data, name, findings)
        findings.checked(end - first)

    return check


def _compare(span: Span, data: memoryview, name: str, findings: Findings) -> None:
    nbytes = span.end - span.begin
    if span.expected is None and span.whole is None:
        if data.tobytes().count(0) != nbytes:
            findings.broken(name, span.item, f"zeros from {span.begin} to {span.end}", "other bytes")
        return
    value = crc32(data)
    if span.whole is None:
        begin, end, what, expected = span.begin, span.end, "data", span.expected
    else:
        whole = span.whole
        begin, end, what, expected = whole.begin, whole.end, whole.what, whole.expected
        total = whole.add(span.begin, nbytes, value)
        if total is None:
            return
        value = total
    if value == expected:
        findings.checked(0, verified=end - begin)
    else:
        findings.broken(name, span.item, f"CRC-32 {expected:08x} of {what}, bytes {begin} to {end}", f"{value:08x}")


def run_tasks(tasks: Iterator[Task], jobs: int, on_progress: Callable[[], None]) -> None:
    """Run tasks on ``jobs`` threads. The next one is made when a thread is free. ``on_progress`` is called meanwhile.

    Raises:
        BaseException: what a task raised, or Ctrl-C; then no more tasks are begun.
    """
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
        except BaseException:
            is_over.set()
            raise

    with ThreadPoolExecutor(jobs, thread_name_prefix="robust_dcp-verify") as pool:
        running = {pool.submit(work) for _ in range(jobs)}
        try:
            while running:
                done, running = wait(running, timeout=_POLL_SECONDS)
                on_progress()
                for each in done:
                    each.result()
        finally:
            is_over.set()
