"""Saves under way, as Megatron's queue of asynchronous saves (``AsyncCallsQueue``) knows them.

Megatron's own requests hold a function for a process that the queue forks. Ours hold a save that a thread of this
process does already: there is nothing to start. The queue asks it whether it is over, and its finalizer waits for it.
Imports no queue. Called by ``saving`` and ``formats``.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar, cast

from robust_dcp.background import line_of
from robust_dcp.background.save_line import SaveFuture
from robust_dcp.errors import entry_point
from robust_dcp.megatron import versions
from robust_dcp.megatron.failures import as_megatron_raises
from robust_dcp.megatron.writing import log_report
from robust_dcp.report import SaveReport

__all__ = ["AsyncSaveCaller", "BackgroundSave", "background_save_of", "request_for", "schedule"]

T = TypeVar("T")

Finish = Callable[[SaveReport], None]


class BackgroundSave:
    """A save that goes on beside training: all ranks have agreed on it, and this rank has copied what it writes.

    Args:
        future: of its report.
    """

    def __init__(self, future: SaveFuture[SaveReport]) -> None:
        # Its finalizer raises its error. The next save is another request, which does not fail because of this one.
        future.was_told = True
        self._future = future
        self._last: SaveFuture[Any] = future

    def then(self, ranks: tuple[int, ...], work: Callable[[SaveReport], T]) -> Callable[[], T]:
        """Let the thread of the save do more once it is committed. The save is over when that is.

        Args:
            ranks: the global ranks of its group.
            work: called with the report; not called if the save fails.

        Returns:
            What waits for the work, returns its result, or raises its error.
        """
        saved = self._future
        done = line_of(ranks).submit(lambda: work(saved.result()) if saved.exception() is None else None)
        done.was_told = True
        self._last = done
        return cast(Callable[[], T], done.result)

    @property
    def is_over(self) -> bool:
        """Whether it is committed, or has failed."""
        return self._last.done()

    def wait(self) -> None:
        """Wait until it is over, whatever came of it."""
        concurrent.futures.wait([self._last])

    def report(self) -> SaveReport:
        """What it has done. Waits for it.

        Raises:
            RobustCheckpointError: why it has failed; the same on all ranks.
        """
        with as_megatron_raises():
            report = self._future.result()
        log_report(report)
        return report


class AsyncSaveCaller:
    """What the queue holds in place of a process for one of our saves: an ``AsyncCaller`` of Megatron's.

    Args:
        save: that is under way.
        all_done: a collective: whether the argument is true on no rank. Stock's, so that all ranks decide alike.
    """

    def __init__(self, save: BackgroundSave, all_done: Callable[[bool], bool]) -> None:
        self._save = save
        self._all_done = all_done

    def schedule_async_call(self, async_req: Any) -> None:
        """Nothing is left to start."""

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether the save is over on all ranks, or with ``no_dist`` on this one.

        Args:
            blocking: wait until it is.
            no_dist: ask no other rank.
        """
        if blocking:
            self._save.wait()
        is_alive = not self._save.is_over
        return not is_alive if no_dist else self._all_done(is_alive)

    def close(self, abort: bool = False) -> None:
        """There is no process to end."""


def request_for(request_class: Any, save: BackgroundSave, finish: Finish) -> Any:
    """The ``AsyncRequest`` for a save under way; Megatron adds finalizers of its own, which come after ``finish``.

    It has no function to run, so whoever knows nothing of us (``execute_sync``, a queue that is not patched) goes on to
    the finalizers at once, and the first of them waits for the save.

    Args:
        request_class: of :func:`~robust_dcp.megatron.versions.async_request_class`.
        save: that is under way.
        finish: called with its report, once it is committed.
    """

    @entry_point
    def finalize() -> None:
        finish(save.report())

    return request_class(async_fn=None, async_fn_args=(save,), finalize_fns=[finalize])


def background_save_of(request: Any) -> BackgroundSave | None:
    """The save that a request is for; ``None`` for a request of others."""
    arguments = request.async_fn_args
    if request.async_fn is None and arguments and isinstance(arguments[0], BackgroundSave):
        return arguments[0]
    return None


def schedule(stock: Callable[[Any, Any], int], queue: Any, request: Any) -> int:
    """``AsyncCallsQueue.schedule_async_request``, which takes the caller of one of our requests from us."""
    save = background_save_of(request)
    if save is None:
        return stock(queue, request)
    caller = AsyncSaveCaller(save, lambda is_alive: versions.no_rank_is_alive(stock, is_alive))
    # Of this queue only, and for this call only: the method of the class goes on to serve all other requests.
    queue._get_async_caller = lambda: caller
    try:
        return stock(queue, request)
    finally:
        del queue._get_async_caller
