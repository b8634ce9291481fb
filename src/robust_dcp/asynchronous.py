"""``async_save``: training waits while a rank copies the data that it writes. The rest of the save runs beside it.

Owns the two parts of an async save: the part that the caller waits for, and the part that runs on the thread of its
group. The phases are those of ``save``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from robust_dcp.api import CheckpointId, describe, open_save
from robust_dcp.errors import entry_point
from robust_dcp.plan.session import AgreedSave
from robust_dcp.report import SaveReport
from robust_dcp.save_queue import SaveFuture, queues_of, telling_of_earlier
from robust_dcp.staged_source import StagedSource
from robust_dcp.staging.staging_buffers import SHARED_STAGING, STAGING
from robust_dcp.writer_process import write_in_process

Staging = Literal["full", "lazy"]
Executor = Literal["thread", "process"]


class AsyncSave(SaveFuture[SaveReport], AbstractContextManager["AsyncSave"]):
    """A future of the report of an async save. It is done when the checkpoint is committed.

    With ``staging="lazy"`` the save still copies tensors. They must not change before :meth:`wait_staged` has returned.

        save = robust_dcp.async_save(state_dict, checkpoint_id=path, staging="lazy")
        loss = model(batch).loss
        loss.backward()
        with save:  # waits until all tensors have been copied
            optimizer.step()

    It has the attributes of ``torch.distributed.checkpoint.state_dict_saver.AsyncSaveResponse``.

    Attributes:
        staging_completion: a future that is done when all tensors have been copied.
        upload_completion: this future.
    """

    def __init__(self, staging_completion: Future[None], waited_seconds: float) -> None:
        super().__init__()
        self.staging_completion = staging_completion
        self._waited_seconds = waited_seconds

    @property
    def upload_completion(self) -> Future[SaveReport]:
        return self

    def wait_staged(self) -> None:
        """Wait until tensors may change. If copying fails, :meth:`result` raises the error on all ranks."""
        started = time.perf_counter()
        if self.queue is not None and not self.staging_completion.done():
            self.queue.refuse_endless_wait(self)
        self.staging_completion.result()
        self._waited_seconds += time.perf_counter() - started

    def wait_before_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the next step of ``optimizer`` wait for the copies. Later steps do not wait."""

        def wait_once(*_: Any) -> None:
            handle.remove()
            self.wait_staged()

        handle = optimizer.register_step_pre_hook(wait_once)

    def __enter__(self) -> AsyncSave:
        self.wait_staged()
        return self

    def __exit__(self, *_: object) -> None:
        return None


@entry_point
def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: Any = None,
    no_dist: bool = False,
    staging: Staging = "full",
    staging_nbytes: int | None = None,
    executor: Executor = "thread",
    max_in_flight: int = 1,
    timeout_seconds: float | None = None,
    deadline_seconds: float | None = None,
    kind: str | None = None,
    on_commit: Callable[[], object] | None = None,
) -> AsyncSave:
    """Save a state dict while training goes on.

    The caller waits while the ranks agree on the plan and each rank copies the data that it will write. Writing and
    commit then run on a thread. The writing can also run in another process. Saves of one group are committed in the
    order of the calls. If a save fails, all ranks raise the same error: ``result()`` of the future raises it. If some
    rank has not called that, the next save raises it. A process that ends, also by SIGTERM, finishes a running save
    first.

    Args:
        state_dict, checkpoint_id, storage_writer, planner: as for :func:`robust_dcp.save`.
        process_group, no_dist, timeout_seconds, deadline_seconds, kind, on_commit: the same.
        async_checkpointer_type: as for ``torch.distributed.checkpoint.async_save``: ``AsyncCheckpointerType.THREAD`` or
            ``PROCESS``, in the place of ``executor``.
        staging: with ``"full"``, return when all tensors have been copied. With ``"lazy"``, return earlier, and copy
            during forward and backward; tensors must not change before ``wait_staged()`` has returned.
        staging_nbytes: the most memory that copies of tensors may take in each save, in bytes. ``None`` sets no limit.
            Tensors without room are written first, while the caller waits. If the host has no memory for copies, all
            tensors are written in this way, and the report's ``how`` says so.
        executor: with ``"thread"``, a thread of this process packs, checksums and writes. With ``"process"``, a writer
            process does this from shared memory and never holds the GIL of this process. The first such save starts the
            writer process. It ends with this process. If it dies, the save fails on all ranks, and the next save starts
            a new one. Ranks may choose different executors. If some tensors have no room (``staging_nbytes``), the
            thread writes.
        max_in_flight: how many saves of a group may run at a time, this one included. Each needs memory for its copies.
            If so many are running, the call waits until one is over.

    Returns:
        A future of the report.

    Raises:
        RobustCheckpointError: the ranks cannot agree, or an earlier async save failed and its error was not raised yet.

    Example:
        >>> import torch, robust_dcp, tempfile
        >>> with tempfile.TemporaryDirectory() as path:
        ...     weight = torch.ones(4)
        ...     saving = robust_dcp.async_save({"weight": weight}, checkpoint_id=path)
        ...     _ = weight.zero_()  # training goes on
        ...     report = saving.result()
        ...     _ = robust_dcp.load({"weight": weight}, checkpoint_id=path)
        ...     weight.tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    if async_checkpointer_type is not None:
        executor = getattr(async_checkpointer_type, "value", async_checkpointer_type)
    for name, value, allowed in (("staging", staging, Staging), ("executor", executor, Executor)):
        if value not in get_args(allowed):
            raise ValueError(f"{name} is one of {', '.join(get_args(allowed))}, not {value!r}")
    for name, number, least in (("max_in_flight", max_in_flight, 1), ("staging_nbytes", staging_nbytes, 0)):
        if number is not None and number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
    planner, session = open_save(
        checkpoint_id,
        storage_writer,
        planner,
        on_commit,
        process_group=process_group,
        no_dist=no_dist,
        timeout_seconds=timeout_seconds,
        deadline_seconds=deadline_seconds,
        kind=kind,
    )
    clock, channel = session.clock, session.planning.channel
    queues = queues_of(channel.ranks)
    queues[0].wait(below=max_in_flight)
    earlier = queues[0].under_way()
    with channel.together(), clock.telling_failures():
        clock.is_async = True
        clock.tell("started")
        with telling_of_earlier(queues):
            agreed = session.agree(partial(describe, planner, session, state_dict))
        with session.undone_after_failure(agreed.plan.channel):
            staged = StagedSource(
                partial(planner.source, agreed),
                channel.note_progress,
                STAGING if executor == "thread" else SHARED_STAGING,
                limit_nbytes=staging_nbytes,
            )
            planner.forget_state_dict()
            del state_dict
            if staging == "full":
                staged.copy(clock.phase("stage"))
        clock.blocked_seconds = clock.seconds
        saving = AsyncSave(staged.are_free, clock.blocked_seconds)
        # All hear if it fails.
        queues[0].submit(partial(_finish, agreed, staged, saving, staging, executor), saving, after=earlier)
    if staging == "full":
        saving.wait_staged()
    return saving


@entry_point
def _finish(
    agreed: AgreedSave, staged: StagedSource, saving: AsyncSave, staging: Staging, executor: Executor
) -> SaveReport:
    """The part of a save that the caller does not wait for: the copies, if not made yet, writing and commit."""
    clock, channel = agreed.session.clock, agreed.plan.channel
    try:
        with clock.telling_failures(), channel.together():
            if staging == "lazy":
                staged.copy(clock.phase("stage"))
            if executor == "process":
                agreed.session.writer.write_files = partial(write_in_process, channel.stop_if_announced)
            clock.remarks = staged.how
            with staged.streams():
                written = agreed.write(staged.ready)  # tensors without a copy are written first
            committed = written.commit()
            committed.deliver()
    finally:
        staged.release()
    # A thread that wakes late has waited longer than the save took.
    return committed.report(blocked_seconds=min(saving._waited_seconds, sum(each.seconds for each in clock.records)))
