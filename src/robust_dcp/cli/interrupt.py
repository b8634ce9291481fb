"""Ctrl-C while a command still imports torch, which takes seconds. ``app`` runs each command in it.

An import that ``KeyboardInterrupt`` breaks off ends in any of these: torch or numpy catches it, and the command goes on
as if nothing had happened; numpy is imported a second time, which is an ``ImportError``; C++ code aborts the process.
So during imports there is no ``KeyboardInterrupt``. The process ends at once. It has not touched any file by then.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

__all__ = ["stopped_at_once_in_imports"]

_HEAVY: Final = ("numpy", "robust_dcp", "torch")
"""The packages that a command imports when it runs."""


@contextlib.contextmanager
def stopped_at_once_in_imports(stop: Callable[[], Any]) -> Iterator[None]:
    """Let Ctrl-C call ``stop``, which must end the process, while modules of these packages are executed.

    At any other time Ctrl-C raises ``KeyboardInterrupt`` as before. A process that ignores it, as one that a shell has
    put in the background, still ignores it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if _is_importing(frame):
            stop()
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether the body of a module of these packages is on the stack."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and _package(frame) in _HEAVY:
            return True
        frame = frame.f_back
    return False


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
