"""Pages that are not of one piece: the end of one record, a gap, the beginning of the next.

Owns the bytes of such pages until all of each is known, whoever brings them and in whatever order. Never touches a
file. Called by ``paged_file`` from several threads.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Run", "SharedPages"]

Run = tuple[int, list[bytearray]]
"""Pages that follow each other: where the first lies in the file, in bytes, and the pages."""


class _Page:
    __slots__ = ("covered", "data")

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.covered = 0


class SharedPages:
    """The pages of one file that several pieces share.

    Every byte of the file is brought once, as data or as a gap. A page is complete when all of it has been brought.

    Args:
        page_nbytes: a page is written as a whole, at a multiple of this.
    """

    def __init__(self, page_nbytes: int) -> None:
        self._page_nbytes = page_nbytes
        self._open: dict[int, _Page] = {}
        self._complete: dict[int, bytearray] = {}
        self._lock = threading.Lock()

    def put(self, offset: int, data: Buffer) -> None:
        """Bring ``data``, which lies at ``offset`` in the file."""
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
        """Bring a gap: it reads as zeros."""
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
        """The complete pages, in order, if there are ``at_least`` so many; they are the caller's from here on."""
        if len(self._complete) < at_least:  # a look without the lock: another thread, or the next call, takes them
            return []
        with self._lock:
            taken, self._complete = self._complete, {}
        return self._runs(taken)

    def take_all(self) -> list[Run]:
        """What is left when everything has been brought, with zeros where nothing was."""
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
