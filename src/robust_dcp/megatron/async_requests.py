"""Makes our running saves fit into Megatron's queue of asynchronous saves (``AsyncCallsQueue``).

A request of Megatron's own holds a function, and the queue forks a process to run it. A request of ours holds a save
that a thread of this process runs already, so the queue has nothing to start. The queue asks the save whether it is
over, and the request's finalizer waits for it. This module imports no queue. Called by ``saving`` and ``formats``.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar, cast

from robust_dcp.background import queue_of
from robust_dcp.background.save_queue import SaveFuture
from robust_dcp.errors import entry_point
from robust_dcp.megatron import versions
from robust_dcp.megatron.failures import as_megatron_raises
from robust_dcp.megatron.writing import log_report
from robust_dcp.report import SaveReport

__all__ = ["AsyncSaveCaller", "BackgroundSave", "background_save_of", "request_for", "schedule"]

T = TypeVar("T")

Finish = Callable[[SaveReport], None]


class BackgroundSave:
    """A save that runs beside training. All ranks have agreed on it, and this rank has copied the data that it writes.

    Args:
        future: the future that gives the save's report.
    """

    def __init__(self, future: SaveFuture[SaveReport]) -> None:
        # The finalizer of this request raises the error. The next save is another request and must not raise it again.
        future.was_told = True
        self._future = future
        self._last: SaveFuture[Any] = future

    def then(self, ranks: tuple[int, ...], work: Callable[[SaveReport], T]) -> Callable[[], T]:
        """Give the save's thread more work to do after the commit. The save is over when this work is done.

        Args:
            ranks: the global ranks of the save's group.
            work: called with the report. It is not called if the save fails.

        Returns:
            A function that waits for the work, and returns its result or raises its error.
        """
        saved = self._future
        done = queue_of(ranks).submit(lambda: work(saved.result()) if saved.exception() is None else None)
        done.was_told = True
        self._last = done
        return cast(Callable[[], T], done.result)

    @property
    def is_over(self) -> bool:
        """Whether the save is committed or has failed."""
        return self._last.done()

    def wait(self) -> None:
        """Wait until the save is over. Does not raise if the save failed."""
        concurrent.futures.wait([self._last])

    def report(self) -> SaveReport:
        """Wait for the save and return its report.

        Raises:
            RobustCheckpointError: the save failed. All ranks raise the same error.
        """
        with as_megatron_raises():
            report = self._future.result()
        log_report(report)
        return report


class AsyncSaveCaller:
    """What the queue holds for one of our saves, where it would hold a process. It has the methods of Megatron's
    ``AsyncCaller``.

    Args:
        save: the running save.
        all_done: Megatron's own collective. It takes a bool of this rank and returns whether no rank passed ``True``,
            so all ranks decide alike.
    """

    def __init__(self, save: BackgroundSave, all_done: Callable[[bool], bool]) -> None:
        self._save = save
        self._all_done = all_done

    def schedule_async_call(self, async_req: Any) -> None:
        """Do nothing: the save runs already."""

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether the save is over on all ranks.

        Args:
            blocking: wait until the save is over.
            no_dist: answer for this rank only, and ask no other rank.
        """
        if blocking:
            self._save.wait()
        is_alive = not self._save.is_over
        return not is_alive if no_dist else self._all_done(is_alive)

    def close(self, abort: bool = False) -> None:
        """Do nothing: there is no process to end."""


def request_for(request_class: Any, save: BackgroundSave, finish: Finish) -> Any:
    """The ``AsyncRequest`` for a running save. Megatron adds its own finalizers, which run after ``finish``.

    The request has no function to run. Code that does not know our requests (``execute_sync``, or a queue that is not
    patched) therefore goes straight to the finalizers, and the first finalizer waits for the save.

    Args:
        request_class: what :func:`~robust_dcp.megatron.versions.async_request_class` returned.
        save: the running save.
        finish: called with the report once the save is committed.
    """

    @entry_point
    def finalize() -> None:
        finish(save.report())

    return request_class(async_fn=None, async_fn_args=(save,), finalize_fns=[finalize])


def background_save_of(request: Any) -> BackgroundSave | None:
    """The save of a request that we made, or ``None`` if somebody else made the request."""
    arguments = request.async_fn_args
    if request.async_fn is None and arguments and isinstance(arguments[0], BackgroundSave):
        return arguments[0]
    return None


def schedule(stock: Callable[[Any, Any], int], queue: Any, request: Any) -> int:
    """Replaces ``AsyncCallsQueue.schedule_async_request``: for a request of ours the queue takes our caller."""
    save = background_save_of(request)
    if save is None:
        return stock(queue, request)
    caller = AsyncSaveCaller(save, lambda is_alive: versions.no_rank_is_alive(stock, is_alive))
    # This overrides the method on this queue and for this call only. All other requests use the method of the class.
    queue._get_async_caller = lambda: caller
    try:
        return stock(queue, request)
    finally:
        del queue._get_async_caller
