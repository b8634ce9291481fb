"""The threads of a copy: several files at once, until the first error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["CopyThreads"]

_T = TypeVar("_T")


class CopyThreads:
    """Calls a function for each of some names, in several threads.

    Args:
        n_threads: how many calls may run at once.
    """

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._failed = threading.Event()

    @property
    def has_failed(self) -> bool:
        """Whether a call has failed, and the others should end."""
        return self._failed.is_set()

    def map(self, function: Callable[[str], _T], names: Collection[str]) -> list[_T]:
        """Call ``function`` for each name. Returns what the calls returned, in the order of the names.

        The first error is raised when no thread is at work any more.
        """
        if not names:
            return []
        first: list[BaseException] = []
        noting = threading.Lock()

        def work(name: str) -> list[_T]:
            if self.has_failed:
                return []
            try:
                return [function(name)]
            except BaseException as error:
                with noting:
                    first.append(error)
                self._failed.set()
                return []

        with ThreadPoolExecutor(min(self._n_threads, len(names)), thread_name_prefix="robust_dcp-copy") as pool:
            try:
                results = list(pool.map(work, names))
            except BaseException:  # Ctrl-C: the pool waits for the files that are under way
                self._failed.set()
                raise
        if first:
            self._failed.clear()
            raise first[0]
        return [value for result in results for value in result]
