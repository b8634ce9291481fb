"""Pages of a file that several pieces share: the end of one record, a gap, the beginning of the next.

This module keeps the bytes of such a page until all of the page is known, whoever brings them and in whatever order. It
never touches a file. ``paged_file`` calls it, from several threads.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Run", "SharedPages"]

Run = tuple[int, list[bytearray]]
"""Neighbouring pages: where the first begins in the file, in bytes, and the pages."""


class _Page:
    __slots__ = ("covered", "data")

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.covered = 0


class SharedPages:
    """The pages of one file that several pieces share.

    Every byte of the file is added once, as data or as a gap. A page is complete when all its bytes have been added.

    Args:
        page_nbytes: the size of a page. A page is written as a whole, at a multiple of its size.
    """

    def __init__(self, page_nbytes: int) -> None:
        self._page_nbytes = page_nbytes
        self._open: dict[int, _Page] = {}
        self._complete: dict[int, bytearray] = {}
        self._lock = threading.Lock()

    def put(self, offset: int, data: Buffer) -> None:
        """Add ``data``, which lies at ``offset`` in the file."""
        view = memoryview(data).cast("B")
        with self._lock:
            position = 0
            while position < view.nbytes:
                number, at = divmod(offset + position, self._page_nbytes)
                nbytes = min(self._page_nbytes - at, view.nbytes - position)
                page = self._open.setdefault(number, _Page(self._page_nbytes))
                page.data[at : at + nbytes] = view[position : position + nbytes]
                self._cover(number, page, nbytes)
                position += nbytes

    def skip(self, offset: int, nbytes: int) -> None:
        """Add a gap. It reads as zeros."""
        with self._lock:
            end = offset + nbytes
            while offset < end:
                number, at = divmod(offset, self._page_nbytes)
                nbytes = min(self._page_nbytes - at, end - offset)
                self._cover(number, self._open.setdefault(number, _Page(self._page_nbytes)), nbytes)
                offset += nbytes

    def _cover(self, number: int, page: _Page, nbytes: int) -> None:
        page.covered += nbytes
        if page.covered >= self._page_nbytes:
            self._complete[number] = self._open.pop(number).data

    def take(self, at_least: int) -> list[Run]:
        """Remove and return the complete pages, in order, if there are at least ``at_least``."""
        if (
            len(self._complete) < at_least
        ):  # read without the lock: if it is wrong, another thread or the next call takes them
            return []
        with self._lock:
            taken, self._complete = self._complete, {}
        return self._runs(taken)

    def take_all(self) -> list[Run]:
        """Remove and return all pages that are left, once everything has been added. Bytes that nobody added are
        zeros.
        """
        with self._lock:
            taken = {**self._complete, **{number: page.data for number, page in self._open.items()}}
            self._complete, self._open = {}, {}
        return self._runs(taken)

    def _runs(self, pages: dict[int, bytearray]) -> list[Run]:
        runs: list[Run] = []
        after = -1
        for number in sorted(pages):
            if number != after:
                runs.append((number * self._page_nbytes, []))
            runs[-1][1].append(pages[number])
            after = number + 1
        return runs
