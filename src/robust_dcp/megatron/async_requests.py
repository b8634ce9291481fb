"""Makes our running saves fit into Megatron's queue of asynchronous saves (``AsyncCallsQueue``).

A request of Megatron's own holds a function, and the queue forks a process to run it. A request of ours holds a save
that a thread of this process runs already, so the queue has nothing to start. The queue asks the save whether it is
over, and the request's finalizer waits for it. This module imports no queue.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import logging
import os
import re
from collections.abc import Callable
from typing import Any

from robust_dcp.errors import entry_point
from robust_dcp.megatron import versions
from robust_dcp.megatron.failures import as_megatron_raises
from robust_dcp.megatron.options import megatron_arguments
from robust_dcp.report import SaveReport
from robust_dcp.save_queue import SaveFuture
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.what_is_there import TRACKER_NAME

logger = logging.getLogger(__name__)

ITERATION = re.compile(r"iter_(\d{7,18})")
"""The name of an iteration's directory."""


class BackgroundSave:
    """A save that runs beside training. All ranks have agreed on it, and this rank has copied the data that it writes.

    The queue holds it where it would hold a process: it has the methods of Megatron's ``AsyncCaller``.

    Args:
        future: the future that gives the save's report.

    Attributes:
        all_done: Megatron's own collective. It takes a bool of this rank and returns whether no rank passed ``True``,
            so all ranks decide alike.
    """

    all_done: Callable[[bool], bool]

    def __init__(self, future: SaveFuture[SaveReport]) -> None:
        # The finalizer of this request raises the error. The next save is another request and must not raise it again.
        future.asked.set()
        self._future = future

    def report(self) -> SaveReport:
        """Wait for the save and return its report.

        Raises:
            RobustCheckpointError: the save failed. All ranks raise the same error.
        """
        with as_megatron_raises():
            report = self._future.result()
        end_save(report)
        return report

    def schedule_async_call(self, async_req: Any) -> None:
        """Do nothing: the save runs already."""

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether the save is over on all ranks.

        Args:
            blocking: wait until the save is over.
            no_dist: answer for this rank only, and ask no other rank.
        """
        if blocking:
            concurrent.futures.wait([self._future])
        is_alive = not self._future.done()
        return not is_alive if no_dist else self.all_done(is_alive)

    def close(self, abort: bool = False) -> None:
        """Do nothing: there is no process to end."""


def end_save(report: SaveReport) -> None:
    """Log one line on rank 0: bytes, seconds, and whether the plan was reused.

    Where nodes do not share the directory, write Megatron-LM's tracker on this one, as its rank 0 does on its own: all
    nodes have committed.
    """
    if report.rank == 0:
        logger.info("%s", str(report).partition("\n")[0])
    root, name = os.path.split(os.path.abspath(report.checkpoint_id))
    save, iteration = getattr(megatron_arguments(), "save", None), ITERATION.fullmatch(name)
    if report.leads_directory and save is not None and iteration is not None and os.path.abspath(save) == root:
        Disk().replace_file(os.path.join(root, TRACKER_NAME), str(int(iteration[1])).encode())


def request_for(request_class: Any, save: BackgroundSave, finish: Callable[[SaveReport], None]) -> Any:
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


def close(stock: Callable[..., None], queue: Any, *args: Any, **kwargs: Any) -> None:
    """``AsyncCallsQueue.close``: finalize our saves first, unless the queue aborts.

    A persistent queue of ``nvidia_resiliency_ext`` 0.5 and newer finalizes only if it has started a process, and for
    our saves it starts none. Without its finalizer nobody would hear how the save has ended, and Megatron's own
    finalizers, which note the iteration, would not run.
    """
    aborts = inspect.signature(stock).bind(queue, *args, **kwargs).arguments.get("abort", False)  # 0.4.1 has it not
    if not aborts and any(isinstance(call.async_caller, BackgroundSave) for call in queue.async_calls):
        queue.maybe_finalize_async_calls(blocking=True)
    stock(queue, *args, **kwargs)


def schedule_async_request(stock: Callable[[Any, Any], int], queue: Any, async_request: Any) -> int:
    """``AsyncCallsQueue.schedule_async_request``: for a request of ours the queue takes our save as its caller."""
    arguments = async_request.async_fn_args
    if async_request.async_fn is not None or not arguments or not isinstance(arguments[0], BackgroundSave):
        return stock(queue, async_request)
    save = arguments[0]
    save.all_done = lambda is_alive: versions.no_rank_is_alive(stock, is_alive)
    # This overrides the method on this queue and for this call only. All other requests use the method of the class.
    queue._get_async_caller = lambda: save
    try:
        return stock(queue, async_request)
    finally:
        del queue._get_async_caller
