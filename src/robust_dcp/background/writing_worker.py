"""The code of a rank's writer process. It packs, checksums and writes data from shared memory while the rank trains.

It does one job at a time, and ends when the rank ends, in whatever way. It never talks to other ranks, never touches a
CUDA device, and never imports Megatron. Started by ``writer_process``.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import select
import signal
import socket
import threading
import time
from typing import Final, NoReturn

import msgspec
import torch

from robust_dcp.background.messages import (
    FROM_RANK,
    Failed,
    Job,
    MessagePipe,
    Plan,
    Progress,
    Written,
    disk_named,
    form_of,
)
from robust_dcp.comm import Stopped
from robust_dcp.staging import StagingBuffer, TensorForm, stay_near
from robust_dcp.storage.layouts import layout_named
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.writing.engine import WrittenFiles, write_files
from robust_dcp.structure_cache import CACHE, Table

__all__ = ["run"]

_PROGRESS_SECONDS: Final = 0.1
"""The least time between two messages about the progress of a job."""


def run(fd: int, parent_pid: int) -> None:
    """Do the rank's jobs until the rank ends.

    Args:
        fd: the file descriptor of this end of the pair of sockets.
        parent_pid: the process id of the rank.
    """
    # Only the rank reacts to an interrupt, or to a launcher that ends all processes. It finishes the save or ends us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    pipe = MessagePipe(socket.socket(fileno=fd), FROM_RANK)
    worker = _Worker(pipe)
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    _register_end_of(parent_pid, poll)
    while True:
        ready = [ready_fd for ready_fd, _ in poll.poll()]
        if pipe.fileno() not in ready:
            _end()
        try:
            message, fds = pipe.receive()
        except (EOFError, OSError):
            _end()
        if isinstance(message, Job):
            worker.begin(message, fds[0])
        else:
            worker.stop()


def _register_end_of(parent_pid: int, poll: select.poll) -> None:
    """Let ``poll`` report the end of the rank's process.

    The socket alone is not enough, because a process that the rank has forked may keep the rank's end open. Before
    Linux 5.3 there is only the socket.
    """
    with contextlib.suppress(OSError):
        poll.register(os.pidfd_open(parent_pid), select.POLLIN)
    if os.getppid() != parent_pid:
        _end()


def _end() -> NoReturn:
    """End this process at once, even during a write. The save's journal tells the next save what to remove."""
    os._exit(0)


class _Worker:
    """The running job."""

    def __init__(self, pipe: MessagePipe) -> None:
        self._pipe = pipe
        self._is_stopped = threading.Event()
        self._telling = threading.Lock()
        self._told_at_seconds = 0.0

    def begin(self, job: Job, fd: int) -> None:
        self._is_stopped = threading.Event()
        threading.Thread(target=self._do, args=(job, fd), name="robust_dcp-writer", daemon=True).start()

    def stop(self) -> None:
        self._is_stopped.set()

    def _do(self, job: Job, fd: int) -> None:
        stay_near(job.cpus)
        not_removed: list[str] = []
        outcome: Written | Failed
        try:
            outcome = Written.of(self._write(job, fd, not_removed))
        except BaseException as error:
            outcome = Failed.of(error, job.rank, not_removed)
        if isinstance(outcome, Failed):
            gc.collect()  # unfinished steps form reference cycles, which keep the rank's memory mapped
        self._pipe.send(outcome)

    def _write(self, job: Job, fd: int, not_removed: list[str]) -> WrittenFiles:
        plan, placements = _plan(job.plan)
        options = job.write_options()
        memory = StagingBuffer(job.memory_nbytes, fd=fd)
        try:
            return write_files(
                disk_named(job.disk),
                job.directory,
                job.rank,
                _SharedSource(plan, job, memory),
                placements,
                mark=job.mark,
                options=options,
                check_stop=self._check_stop,
                known_places=job.places_known(),
                layout=layout_named(options.layout),
                not_removed=not_removed,
            )
        finally:
            memory.release()

    def _check_stop(self, done_nbytes: int, total_nbytes: int) -> None:
        if self._is_stopped.is_set():
            raise Stopped("the save has failed elsewhere")
        now = time.monotonic()
        with self._telling:
            is_due = now - self._told_at_seconds >= _PROGRESS_SECONDS
            if is_due:
                self._told_at_seconds = now
        if is_due:
            self._pipe.send(Progress(done_nbytes, total_nbytes))


class _SharedSource:
    """An ``ItemSource`` with the tensors in shared memory and the records that came with the job."""

    def __init__(self, plan: Plan, job: Job, memory: StagingBuffer) -> None:
        self._plan = plan
        tensors = memory.tensors([form_of(form) for form in job.tensor_forms])
        self._data: dict[int, torch.Tensor | bytes] = dict(zip(job.tensor_places, tensors, strict=True))
        self._data.update(job.records)

    def __len__(self) -> int:
        return len(self._plan.names)

    def name(self, place: int) -> str:
        return self._plan.names[place]

    def expected(self, place: int) -> TensorForm | None:
        form = self._plan.expected[place]
        return None if form is None else form_of(form)

    def chunk_offset(self, place: int) -> tuple[int, ...]:
        return self._plan.chunk_offsets[place]

    def resolve(self, place: int) -> torch.Tensor | io.BytesIO:
        data = self._data[place]
        return data if isinstance(data, torch.Tensor) else io.BytesIO(data)


_PLAN: Final = msgspec.msgpack.Decoder(Plan)

# The engine caches the order of writes by the identity of the placements, so equal plans must share one object.
_PLANS: Table[bytes, tuple[Plan, Placements]] = CACHE.table(
    "plans of jobs", lambda encoded, _: 4 * len(encoded), max_nbytes=256 << 20, max_entries=4
)


def _plan(encoded: bytes) -> tuple[Plan, Placements]:
    known = _PLANS.get(encoded)
    if known is None:
        plan = _PLAN.decode(encoded)
        known = plan, plan.placements()
        _PLANS.put(encoded, known)
    return known
