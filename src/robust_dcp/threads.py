"""Starts threads, and says which limit is reached where none can be started.

A container has a limit of processes, and each thread counts. Python says "can't start new thread" there, on one rank of
a job, without the limit's name.

A thread begins with the CUDA device and the streams of the one that starts it. By itself it would begin on device 0: of
eight ranks on a node seven would use memory of a device that is not theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import torch

from robust_dcp.errors import ExchangeError, RobustCheckpointError

T = TypeVar("T")

LIMITS: Final = "the limits of processes (`ulimit -u`, `pids.max` of the container)"


def start_thread(function: Callable[..., object], *args: Any, name: str, daemon: bool = True) -> threading.Thread:
    """Call ``function(*args)`` in a new thread.

    Raises:
        ExchangeError: no thread can be started, so this rank cannot go on with the others.
    """
    go_on_here = _place_of_this_thread()

    def run() -> None:
        go_on_here()
        function(*args)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    try:
        thread.start()
    except RuntimeError as error:
        raise ExchangeError(_words_for(error)) from error
    return thread


def thread_pool(n_threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads work where this one does."""
    return ThreadPoolExecutor(n_threads, name, _place_of_this_thread())


def _place_of_this_thread() -> Callable[[], None]:
    """A function that makes the thread that calls it work on the CUDA device and the streams of this one.

    It must not touch a device that nobody uses yet: that takes some hundred MiB there.
    """
    if not torch.cuda.is_initialized():  # not `is_available`, which wakes the driver: no forked process could use it
        return lambda: None
    device = torch.cuda.current_device()
    currents = list(map(torch.cuda.current_stream, range(torch.cuda.device_count())))
    streams = [each for each in currents if each != torch.cuda.default_stream(each.device)]

    def go_on_here() -> None:
        for stream in streams:
            with torch.cuda.device(stream.device):
                torch.cuda.set_stream(stream)
        if torch.cuda.current_device() != device:
            torch.cuda.set_device(device)

    return go_on_here


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
