"""Starts threads, and says which limit is reached where none can be started.

A container has a limit of processes, and each thread counts. Python says "can't start new thread" there, on one rank of
a job, without the limit's name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

from robust_dcp.errors import ExchangeError, RobustCheckpointError

T = TypeVar("T")

LIMITS: Final = "the limits of processes (`ulimit -u`, `pids.max` of the container)"


def start_thread(function: Callable[..., object], *args: Any, name: str, daemon: bool = True) -> threading.Thread:
    """Call ``function(*args)`` in a new thread.

    Raises:
        ExchangeError: no thread can be started, so this rank cannot go on with the others.
    """
    thread = threading.Thread(target=function, args=args, name=name, daemon=daemon)
    try:
        thread.start()
    except RuntimeError as error:
        raise ExchangeError(_words_for(error)) from error
    return thread


def submit(pool: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> Future[T]:
    """Call ``function(*args)`` in a thread of ``pool``.

    Once Python is about to end, and waits for a thread of the user, no pool takes calls. If that one saves or loads, it
    makes them itself.

    Raises:
        RobustCheckpointError: the pool lacks a thread, and none can be started. It may make the call all the same.
    """
    try:
        return pool.submit(function, *args)
    except RuntimeError as error:
        if "after interpreter shutdown" not in str(error):
            raise RobustCheckpointError(_words_for(error)) from error
        future: Future[T] = Future()
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        return future


def _words_for(error: RuntimeError) -> str:
    return f"no thread can be started on this rank ({error}). Look at {LIMITS} and of memory"
