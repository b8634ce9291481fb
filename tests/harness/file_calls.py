"""Kills a process before a chosen call to the file system, so that a test can try every one of them.

Python raises an auditing event (PEP 578) for each call that opens, renames or removes a file. :class:`FileCalls` counts
these events, whatever code makes the calls.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

__all__ = ["FileCalls"]

_EVENTS = frozenset(
    {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.listdir"}
)


class FileCalls:
    """Counts the calls of this process to files below a directory. It cannot be switched off.

    Args:
        directory: below which calls count.
        killed_before: before the call with this number, from 0 on, the process is killed by ``SIGKILL``. ``None`` only
            counts.

    Attributes:
        calls: the calls that were made, such as ``"os.rename .metadata.tmp"``.
    """

    def __init__(self, directory: str | os.PathLike[str], killed_before: int | None = None) -> None:
        self.calls: list[str] = []
        self._directory = os.fspath(directory)
        self._killed_before = killed_before
        sys.addaudithook(self._see)

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        paths = [os.fsdecode(each) for each in args if self._is_below(each)] if event in _EVENTS else []
        if not paths:
            return
        if self.count == self._killed_before:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls.append(f"{event} {os.path.relpath(paths[0], self._directory)}")

    @property
    def count(self) -> int:
        """How many calls were made."""
        return len(self.calls)

    def _is_below(self, path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        name = os.fsdecode(path)
        return name == self._directory or name.startswith(os.path.join(self._directory, ""))
