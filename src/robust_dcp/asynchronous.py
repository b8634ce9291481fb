"""``async_save``: training waits while a rank copies the data that it writes. The rest of the save runs beside it.

Owns the two parts of an async save: the part that the caller waits for, and the part that runs on the thread of its
group. The phases are those of ``save``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args, overload

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from robust_dcp.background import WRITERS, StagedSource, WriteInProcess, finish_all, refuse_disk
from robust_dcp.background.save_queue import SaveFuture
from robust_dcp.errors import RobustCheckpointError, entry_point
from robust_dcp.report import SaveReport
from robust_dcp.staging import SHARED_STAGING, STAGING
from robust_dcp.started_save import CheckpointId, StartedSave

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AsyncSave", "AsyncSaveOptions", "Executor", "Staging", "WhenBusy", "async_save", "finish_async_saves"]

Staging = Literal["full", "lazy"]
WhenBusy = Literal["wait", "skip", "raise"]
Executor = Literal["thread", "process"]


@dataclass(eq=False)
class AsyncSave(AbstractContextManager["AsyncSave"]):
    """An async save that still copies tensors. ``async_save(…, staging="lazy")`` returns it.

    It has the attributes of ``torch.distributed.checkpoint.state_dict_saver.AsyncSaveResponse``. The saved tensors must
    not change before :meth:`wait_staged` has returned.

        save = robust_dcp.async_save(state_dict, checkpoint_id=path, staging="lazy")
        loss = model(batch).loss
        loss.backward()
        with save:  # waits until all tensors have been copied
            optimizer.step()

    Attributes:
        staging_completion: a future that is done when all tensors have been copied.
        upload_completion: a future of the report. It is done when the checkpoint is committed.
    """

    staging_completion: Future[None]
    upload_completion: SaveFuture[SaveReport]
    _waited_seconds: list[float] = field(default_factory=list)

    def wait_staged(self) -> None:
        """Wait until tensors may change. If copying fails, ``upload_completion`` raises the error on all ranks."""
        started = time.perf_counter()
        self.staging_completion.exception()
        self._waited_seconds.append(time.perf_counter() - started)

    def wait_before_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the next step of ``optimizer`` wait for the copies. Later steps do not wait."""

        def wait_once(*_: Any) -> None:
            handle.remove()
            self.wait_staged()

        handle = optimizer.register_step_pre_hook(wait_once)

    def __enter__(self) -> AsyncSave:
        self.wait_staged()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        return None


class _Room(msgspec.Struct, frozen=True):
    """Whether some rank already has as many saves under way as it may."""

    is_full: bool


class AsyncSaveOptions(TypedDict, total=False):
    """The arguments of :func:`async_save` that do not change what it returns."""

    checkpoint_id: CheckpointId | None
    storage_writer: StorageWriter | None
    planner: SavePlanner | None
    process_group: dist.ProcessGroup | None
    async_checkpointer_type: Any
    async_stager: Any
    no_dist: bool
    use_collectives: bool
    staging_nbytes: int | None
    executor: Executor
    max_in_flight: int
    timeout_seconds: float | None
    deadline_seconds: float | None
    kind: str | None
    on_commit: Callable[[], object] | None


@overload
def async_save(
    state_dict: dict[str, Any],
    *,
    staging: Literal["full"] = "full",
    when_busy: Literal["wait", "raise"] = "wait",
    **options: Unpack[AsyncSaveOptions],
) -> Future[SaveReport]: ...


@overload
def async_save(
    state_dict: dict[str, Any],
    *,
    staging: Literal["full"] = "full",
    when_busy: Literal["skip"],
    **options: Unpack[AsyncSaveOptions],
) -> Future[SaveReport] | Future[SaveReport | None]: ...


@overload
def async_save(
    state_dict: dict[str, Any],
    *,
    staging: Literal["lazy"],
    when_busy: Literal["wait", "raise"] = "wait",
    **options: Unpack[AsyncSaveOptions],
) -> AsyncSave: ...


@overload
def async_save(
    state_dict: dict[str, Any],
    *,
    staging: Literal["lazy"],
    when_busy: Literal["skip"],
    **options: Unpack[AsyncSaveOptions],
) -> Future[SaveReport | None] | AsyncSave: ...


@entry_point
def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: Any = None,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    staging: Staging = "full",
    staging_nbytes: int | None = None,
    executor: Executor = "thread",
    max_in_flight: int = 1,
    when_busy: WhenBusy = "wait",
    timeout_seconds: float | None = None,
    deadline_seconds: float | None = None,
    kind: str | None = None,
    on_commit: Callable[[], object] | None = None,
) -> Future[SaveReport] | Future[SaveReport | None] | AsyncSave:
    """Save a state dict while training goes on.

    The caller waits while the ranks agree on the plan and each rank copies the data that it will write. Writing and
    commit then run on a thread. The writing can also run in another process. Saves of one group are committed in the
    order of the calls. If a save fails, all ranks raise the same error: ``result()`` of the future raises it. If some
    rank has not called that, the next save raises it. A process that ends, also by SIGTERM, finishes a running save
    first.

    Args:
        state_dict, checkpoint_id, storage_writer, planner: as for :func:`robust_dcp.save`.
        process_group, no_dist, timeout_seconds, deadline_seconds, kind, on_commit: the same.
        async_checkpointer_type, async_stager, use_collectives: as for ``torch.distributed.checkpoint.async_save``.
            Only their defaults are supported, and ``AsyncCheckpointerType.THREAD`` and ``PROCESS``, which choose the
            ``executor``.
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
        when_busy: what to do if that many are running: ``"wait"`` until one is over, ``"skip"`` this save on all ranks
            (the future then gives ``None``), or ``"raise"`` a ``RobustCheckpointError`` on all ranks.

    Returns:
        A future of the report with ``staging="full"``, or an :class:`AsyncSave` with ``"lazy"``.

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
    _refuse_unknown(async_stager, use_collectives)
    for name, value, known in (
        ("staging", staging, Staging),
        ("when_busy", when_busy, WhenBusy),
        ("executor", executor, Executor),
    ):
        if value not in get_args(known):
            raise ValueError(f"{name} is one of {', '.join(get_args(known))}, not {value!r}")
    for name, number, least in (("max_in_flight", max_in_flight, 1), ("staging_nbytes", staging_nbytes, 0)):
        if number is not None and number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
    executor = _executor_of(async_checkpointer_type, executor)
    started = StartedSave.of(
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        timeout_seconds=timeout_seconds,
        deadline_seconds=deadline_seconds,
        kind=kind,
        on_commit=on_commit,
    )
    if executor == "process":
        refuse_disk(started.writer.disk)  # now, and not later on a thread
        WRITERS.prepare()
    channel, queue = started.session.channel, started.queue
    if when_busy == "wait":
        queue.wait(below=max_in_flight)
    with channel.together():
        if when_busy != "wait" and _is_full(started, max_in_flight):
            if when_busy == "skip":
                skipped: Future[SaveReport | None] = Future()
                skipped.set_result(None)
                return skipped
            raise RobustCheckpointError(
                f"{started.session.checkpoint}: {max_in_flight} async saves are under way already; wait for one of "
                'them, or pass when_busy="wait"'
            )
        with started.clock.telling_failures():
            started.clock.is_async = True
            started.clock.tell("started")
            started.agree(state_dict)
            staged = _Staged(started, executor, staging_nbytes)
            del state_dict
            try:
                if staging == "full":
                    staged.copy()
                staged.waited_seconds.append(started.clock.seconds)
                future = queue.submit(staged.finish)  # if this fails, all ranks hear of it
            except BaseException:  # Ctrl-C
                staged.release()
                raise
    if staging == "lazy":
        return AsyncSave(staged.are_free, future, staged.waited_seconds)
    staged.are_free.result()
    return future


def finish_async_saves(timeout_seconds: float | None = None) -> bool:
    """Wait for all async saves of this process, and for all drains (``RobustWriter(path, drain_to=…)``).

    Args:
        timeout_seconds: how long to wait; ``None`` for as long as it takes.

    Returns:
        Whether all are over.

    Raises:
        RobustCheckpointError: a save has failed, and its error was not raised yet.
    """
    return finish_all(timeout_seconds)


class _Staged:
    """The data that a save copies and writes.

    If copying fails, the error is kept for the exchange in which all ranks say whether they have written.

    Attributes:
        are_free: a future that is done when the tensors of the state dict may change.
        freed_seconds: the seconds from the call until then.
        waited_seconds: how long the caller waited, in the call and later for the copies.
        how: remarks for the report.
    """

    freed_seconds = 0.0
    how: tuple[str, ...] = ()

    def __init__(self, started: StartedSave, executor: Executor, staging_nbytes: int | None) -> None:
        self._started = started
        self._executor = executor
        self._source: StagedSource | None = None
        self._error: Exception | None = None
        self._is_copied = False
        self.are_free: Future[None] = Future()
        self.waited_seconds: list[float] = []
        try:
            self._source = StagedSource(
                started.source(),
                started.session.channel.note_progress,
                STAGING if executor == "thread" else SHARED_STAGING,
                limit_nbytes=staging_nbytes,
                when_given_back=self._free,
            )
            started.planner.forget_state_dict()
        except Exception as error:
            self._error = error

    def finish(self) -> SaveReport:
        """Run the part that the caller does not wait for: the copies, if not made yet, and the rest of the save."""
        is_lazy = not self._is_copied
        try:
            with self._started.clock.telling_failures(), self._started.session.channel.together():
                if is_lazy:
                    self.copy()
                self.write()
                self._started.commit()
        finally:
            self.release()
        blocked_seconds = sum(self.waited_seconds) if is_lazy else self.freed_seconds
        return self._started.report(blocked_seconds=blocked_seconds, how=self.how)

    def copy(self) -> None:
        self._is_copied = True
        if self._source is None:
            self._free()
            return
        try:
            with self._started.clock.phase("stage"):
                self._source.copy()
        except Exception as error:
            self._error = error
        self.how = self._source.how
        if self._error is not None or not self._source.borrowed:
            self._free()

    def write(self) -> None:
        """Write the data, and let all ranks say whether they have written. Tensors without a copy are written first."""
        if self._executor == "process":
            self._started.writer.write_files = WriteInProcess(self._started.session.channel.stop_if_announced)
        self._started.session.remarks = self.how
        with nullcontext() if self._source is None else self._source.stream():
            self._started.session.write(self.source)

    def source(self) -> StagedSource:
        """The copies, for the writer.

        Raises:
            Exception: copying has failed; this is its error.
        """
        if self._error is not None or self._source is None:
            raise self._error or RuntimeError("nothing was copied")
        return self._source

    def release(self) -> None:
        """Free the copies: the save is over or has failed."""
        self._free()
        if self._source is not None:
            self._source.release()

    def _free(self) -> None:
        if not self.are_free.done():
            self.freed_seconds = self._started.clock.seconds
            self.are_free.set_result(None)


def _is_full(started: StartedSave, max_in_flight: int) -> bool:
    """Whether some rank has as many saves under way as it may. All ranks get the same answer."""
    channel = started.session.channel
    room = channel.combine(
        f"save {started.session.checkpoint}: room",
        lambda: _Room(started.queue.n_under_way >= max_in_flight),
        lambda one, other: _Room(one.is_full or other.is_full),
        _Room,
    )
    return room.is_full


def _executor_of(async_checkpointer_type: Any, executor: Executor) -> Executor:
    """The executor, from stock's argument ``async_checkpointer_type`` and our ``executor``."""
    kind = getattr(async_checkpointer_type, "value", async_checkpointer_type)
    if kind is None or kind == executor:
        return executor
    if kind == "process":
        return "process"
    if kind == "thread":
        raise ValueError('async_checkpointer_type is THREAD and executor="process": pass one of them')
    raise ValueError(f"async_checkpointer_type is {async_checkpointer_type}: robust_dcp knows THREAD and PROCESS")


def _refuse_unknown(async_stager: Any, use_collectives: bool) -> None:
    if async_stager is not None:
        raise ValueError(
            "robust_dcp.async_save copies by itself, only what a rank writes; to stage with "
            f"{type(async_stager).__name__} call torch.distributed.checkpoint.async_save(…, planner=RobustPlanner())"
        )
    if not use_collectives:
        raise ValueError("robust_dcp.async_save needs use_collectives=True: its ranks agree on every save")
