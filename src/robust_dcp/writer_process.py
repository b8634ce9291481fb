"""A process beside a rank that writes the files of its async saves. No thread of the rank waits, not even for the GIL.

Owns these processes, from the first save that needs one until the rank ends, and both sides of the talk with them. The
tensors are in shared memory (``StagedSource.shared``). All else is pickled over a ``multiprocessing`` connection,
because a rank and its own child trust each other. A writer process does one job at a time. It never talks to other
ranks, never touches a CUDA device, and never runs the user's script. It ends when the rank ends, in whatever way.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Final, NoReturn

import torch

from robust_dcp.comm import Stopped
from robust_dcp.errors import RobustCheckpointError, failure_of
from robust_dcp.staged_source import HeldItems, StagedSource
from robust_dcp.staging.staging_buffers import StagingBuffer, TensorForm, stay_near
from robust_dcp.storage.layouts.places import Placements, place_as_they_come
from robust_dcp.storage.writing.engine import FilesOfRank, WrittenFiles, write_files
from robust_dcp.storage.writing.item_source import ItemSource, NamedErrors, saved_by_torch

__all__ = ["WRITERS", "WriterProcess", "WriterProcesses", "write_in_process"]

_LOOK_SECONDS: Final = 0.05
"""While its writer process writes, a rank checks this often whether another rank has given up the save."""

_PROGRESS_SECONDS: Final = 0.1
"""The least time between two messages about the progress of a job."""

_SEND_SECONDS: Final = 120
"""How long a writer process may take to accept a job. A new one has to import torch first; others accept at once."""

_STOP_SECONDS: Final = 30.0
"""How long a writer process may take to stop after it was told to. It may be waiting for a disk."""

_END_SECONDS: Final = 10.0

# Only the rank handles an interrupt. The search path is that of this process, not that of the environment.
_START: Final = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[3:]; "
    "from robust_dcp.writer_process import run; run(int(sys.argv[1]), int(sys.argv[2]))"
)

# The writer process needs no device, and no threads inside of torch's operators.
_ENVIRONMENT: Final = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "ROBUST_DCP": "0"}

_STOP: Final = b""
"""Tells the writer process that the save has failed elsewhere. It removes what it has written."""


@dataclass(frozen=True)
class _Plan:
    """What all saves by one plan share: the attributes of an ``ItemSource``, and the places of its items."""

    names: list[str]
    expected: list[TensorForm | None]
    chunk_offsets: list[tuple[int, ...]]
    placements: Placements


@dataclass(frozen=True)
class _Job:
    """What a writer process is asked to write. The shared memory with the tensors comes as an open file.

    Attributes:
        files: where to write, but for the placements, which are in the plan.
        plan: a pickled :class:`_Plan`. The writer knows it again by its bytes.
        memory_nbytes: the size of the shared memory.
        tensor_places, tensor_forms: the places and forms of the tensors in the shared memory, in their order there.
        records: for all other items, the bytes to write, by place.
        cpus: the processors near the memory, on which the writer should run.
    """

    files: FilesOfRank
    plan: bytes
    memory_nbytes: int
    tensor_places: list[int]
    tensor_forms: list[TensorForm]
    records: dict[int, bytes]
    cpus: frozenset[int]


@dataclass(frozen=True)
class _Outcome:
    """How a job has ended. If it has failed, all its files were removed except for ``not_removed``."""

    written: WrittenFiles | RobustCheckpointError
    not_removed: list[str]


class WriterDied(Exception):
    """The writer process has ended, or does not answer any more. The message says how."""


class WriterProcess:
    """A process that writes one job at a time, as its rank sees it.

    It is a new process and not a fork. So it has no threads, locks or devices of this one.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_SECONDS, 0))
        self._is_given_up = False
        self._connection = Connection(ours.detach())
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, str(theirs.fileno()), str(os.getpid()), *sys.path],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **_ENVIRONMENT},
                )
            except BaseException:
                self._connection.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._is_given_up and self._process.poll() is None

    def write(
        self, job: _Job, fd: int, *, note_progress: Callable[[int, int], None], look: Callable[[], None]
    ) -> _Outcome:
        """Let the process do a job, and wait for it.

        Args:
            fd: the open file of the memory with the tensors.
            note_progress: called with the number of bytes written so far, and of the bytes of all items of fixed size.
            look: called from time to time. If it raises, the job is stopped.

        Raises:
            WriterDied: the process has ended during the job.
        """
        try:
            self._connection.send_bytes(pickle.dumps(job))
            send_handle(self._connection, fd, self.pid)
            return self._outcome(note_progress, look)
        except (EOFError, OSError) as error:
            raise WriterDied(self._end()) from error
        except BaseException:
            self._stop()
            raise

    def _outcome(self, note_progress: Callable[[int, int], None], look: Callable[[], None]) -> _Outcome:
        while True:
            if self._connection.poll(_LOOK_SECONDS):
                message: tuple[int, int] | _Outcome = self._connection.recv()
                if isinstance(message, _Outcome):
                    return message
                note_progress(*message)
            elif not self.is_alive:
                raise EOFError
            look()

    def _stop(self) -> None:
        """Stop the running job. If the process does not react in time, end it. If that is not possible either, because
        it waits for a disk that hangs, give it up: the other ranks wait for this one."""
        ends_at = time.monotonic() + _STOP_SECONDS

        def look() -> None:
            if time.monotonic() >= ends_at:
                raise EOFError

        try:
            self._connection.send_bytes(_STOP)
            self._outcome(lambda done_nbytes, total_nbytes: None, look)
        except (EOFError, OSError):
            self._end()

    def _end(self) -> str:
        """Make sure that the process has ended. Returns a text that says how it ended."""
        self._is_given_up = True
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._process.kill()  # does nothing if it has ended
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it can no longer be talked to, and does not end"
        finally:
            self._connection.close()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"

    def close(self) -> None:
        """End the process, which must not have a job."""
        self._connection.close()  # the writer process ends as if this process had ended
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._end()

    def forget(self) -> None:
        """Forget a process that has ended, that was given up, or that belongs to the parent of a forked child."""
        self._process.returncode = self._process.returncode or 0
        self._connection.close()


class WriterProcesses:
    """The writer processes of this process. There is only one, unless saves of several groups run at the same time."""

    def __init__(self) -> None:
        self._idle: list[WriterProcess] = []
        self._n_lent = 0
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Start a writer process if there is none, so that it is ready when it is needed. If this fails, the save will
        raise the error on all ranks."""
        with self._lock, suppress(OSError):
            self._forget_dead()
            if not self._idle and not self._n_lent:  # one that writes now will write the next save of its group too
                self._idle.append(WriterProcess())

    @contextmanager
    def lent(self) -> Iterator[WriterProcess]:
        """A writer process that has no other job within the ``with`` block."""
        with self._lock:
            self._forget_dead()
            writer = self._idle.pop() if self._idle else WriterProcess()
            self._n_lent += 1
        try:
            yield writer
        finally:
            with self._lock:
                self._n_lent -= 1
                self._idle.append(writer)
                self._forget_dead()

    def close(self) -> None:
        """End all writer processes that have no job."""
        with self._lock:
            idle, self._idle = self._idle, []
        for writer in idle:
            writer.close()

    def forget_all(self) -> None:
        """Forget all writer processes in a forked child."""
        self._lock = threading.Lock()
        for writer in self._idle:
            writer.forget()
        self._idle, self._n_lent = [], 0

    def _forget_dead(self) -> None:
        for writer in [each for each in self._idle if not each.is_alive]:
            self._idle.remove(writer)
            writer.forget()


WRITERS: Final = WriterProcesses()


def write_in_process(
    look: Callable[[], None],
    files: FilesOfRank,
    source: ItemSource,
    check_stop: Callable[[int, int], None],
    not_removed: list[str],
) -> WrittenFiles:
    """``write_files`` for one save in a writer process. This process writes if some data is not in shared memory.

    Args:
        look: raises if another rank has given up the save.
    """
    memory = source.shared if isinstance(source, StagedSource) else None
    if not isinstance(source, StagedSource) or memory is None or memory.fd is None:
        return write_files(files, source, check_stop, not_removed)
    plan = _Plan(source.names, source.forms_expected, source.chunk_offsets, files.placements)
    job = _Job(
        files=replace(files, placements=place_as_they_come([], files=1)),
        plan=pickle.dumps(plan),
        memory_nbytes=memory.nbytes,
        tensor_places=source.copied,
        tensor_forms=source.forms,
        records=_records(source),
        cpus=memory.cpus,
    )
    try:
        with WRITERS.lent() as writer:
            try:
                outcome = writer.write(job, memory.fd, note_progress=check_stop, look=look)
            except WriterDied as death:
                raise RobustCheckpointError(
                    f"the writer process of rank {files.rank} (pid {writer.pid}) died while it wrote "
                    f"{files.directory}: {death}. Nothing of this save is committed, and the checkpoint before it is "
                    "still there; the next save starts another process"
                ) from death
    except BaseException:
        # A process that was stopped has removed its files. One that died has not.
        not_removed += files.remove()
        raise
    not_removed += outcome.not_removed
    if isinstance(outcome.written, RobustCheckpointError):
        raise outcome.written
    return outcome.written


def _records(source: StagedSource) -> dict[int, bytes]:
    """The bytes of all items that are not tensors in shared memory."""
    records = {}
    with NamedErrors(source, 0) as errors:
        for place in sorted(set(range(len(source))).difference(source.copied)):
            errors.place = place
            data = source.resolve(place)
            record = saved_by_torch(data) if isinstance(data, torch.Tensor) else data
            records[place] = record.getvalue()
    return records


atexit.register(WRITERS.close)  # at that time the async saves are over
os.register_at_fork(after_in_child=WRITERS.forget_all)


# The other side: what runs in the writer process.


def run(fd: int, parent_pid: int) -> NoReturn:
    """Do the rank's jobs until the rank ends.

    Args:
        fd: the file descriptor of this end of the connection.
        parent_pid: the process id of the rank.
    """
    # Only the rank reacts to an interrupt, or to a launcher that ends all processes. It finishes the save or ends us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent_pid,), name="robust_dcp-parent", daemon=True).start()
    connection = Connection(fd)
    with suppress(EOFError, OSError):
        while True:
            message = connection.recv_bytes()
            if message != _STOP:  # else the job to stop had just ended
                connection.send(_do(connection, message, recv_handle(connection)))
                gc.collect()  # unfinished steps form reference cycles, which keep the rank's memory mapped
    os._exit(0)


def _end_with(parent_pid: int) -> None:
    """End this process when the rank ends: at once, even during a write. The next save removes what this one has left.

    The connection alone is not enough: a process that the rank has forked may keep the rank's end open. Before
    Linux 5.3 there is only the connection.
    """
    with suppress(OSError):
        poll = select.poll()
        poll.register(os.pidfd_open(parent_pid), select.POLLIN)
        if os.getppid() == parent_pid:
            poll.poll()
        os._exit(0)


def _do(connection: Connection, pickled: bytes, fd: int) -> _Outcome:
    """Write what a job asks for."""
    not_removed: list[str] = []
    rank = -1
    try:
        job: _Job = pickle.loads(pickled)  # noqa: S301 (its own parent made it)
        rank = job.files.rank
        stay_near(job.cpus)
        plan = _plan(job.plan)
        files = replace(job.files, placements=plan.placements)
        memory = StagingBuffer(job.memory_nbytes, fd=fd)
        try:
            tensors = dict(zip(job.tensor_places, memory.tensors(job.tensor_forms), strict=True))
            records = {place: io.BytesIO(record) for place, record in job.records.items()}
            data = [tensors[place] if place in tensors else records[place] for place in range(len(plan.names))]
            items = HeldItems(plan.names, plan.expected, plan.chunk_offsets, data)
            written = write_files(files, items, _StopsOnRequest(connection), not_removed)
        finally:
            memory.release()
    except RobustCheckpointError as error:
        return _Outcome(error.with_traceback(None), not_removed)
    except BaseException as error:
        failure = failure_of(rank, error)
        message = f"in the writer process: {failure.type_name}: {failure.message}\n{failure.traceback_text}".rstrip()
        return _Outcome(RobustCheckpointError(message), not_removed)
    return _Outcome(written, not_removed)


class _StopsOnRequest:
    """Tells the rank of the progress of a job. Raises if the rank has asked to stop it. Several threads call it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._told_at_seconds = 0.0
        self._is_stopped = False

    def __call__(self, done_nbytes: int, total_nbytes: int) -> None:
        with self._lock:
            if self._connection.poll():
                try:
                    self._is_stopped = self._connection.recv_bytes() == _STOP
                except (EOFError, OSError):
                    os._exit(0)  # the rank has ended
            if self._is_stopped:
                raise Stopped("the save has failed elsewhere")
            now = time.monotonic()
            if now - self._told_at_seconds >= _PROGRESS_SECONDS:
                self._told_at_seconds = now
                self._connection.send((done_nbytes, total_nbytes))


@lru_cache(maxsize=4)
def _plan(pickled: bytes) -> _Plan:
    """The plan. The engine keeps the order of writes by the identity of its placements, so equal plans share one."""
    plan: _Plan = pickle.loads(pickled)  # noqa: S301 (its own parent made it)
    return plan
