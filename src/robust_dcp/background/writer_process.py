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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Final, NoReturn

import torch

from robust_dcp.background.staged_source import SharedCopies, StagedSource
from robust_dcp.comm import Stopped
from robust_dcp.errors import RobustCheckpointError, error_from_fields, failure_of
from robust_dcp.staging import StagingBuffer, TensorForm, stay_near
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.layouts.places import Placements, place_as_they_come
from robust_dcp.storage.writing.engine import FilesOfRank, WrittenFiles, remove_files_of, write_files
from robust_dcp.storage.writing.item_source import ItemSource, NamedErrors, saved_by_torch
from robust_dcp.structure_cache import CACHE, Table

__all__ = ["WRITERS", "WriteInProcess", "WriterProcess", "WriterProcesses", "refuse_disk"]

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
    "from robust_dcp.background.writer_process import run; run(int(sys.argv[1]), int(sys.argv[2]))"
)

# The writer process needs no device, and no threads inside of torch's operators.
_ENVIRONMENT: Final = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "ROBUST_DCP": "0"}


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
class _Failed:
    """Says that writing has failed, with the error as text. All files were removed except for ``not_removed``."""

    type_name: str
    fields: dict[str, Any]
    not_removed: list[str]

    @classmethod
    def of(cls, error: BaseException, rank: int, not_removed: Sequence[str]) -> _Failed:
        if isinstance(error, RobustCheckpointError):
            return cls(type(error).__name__, error.to_fields(), list(not_removed))
        failure = failure_of(rank, error)
        message = f"in the writer process: {failure.type_name}: {failure.message}\n{failure.traceback_text}".rstrip()
        return cls(failure.type_name, {"message": message}, list(not_removed))


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
    ) -> WrittenFiles | _Failed:
        """Let the process do a job, and wait for it.

        Args:
            fd: the open file of the memory with the tensors.
            note_progress: called with the number of bytes written so far, and of the bytes of all items of fixed size.
            look: called from time to time. If it raises, the job is stopped.

        Raises:
            WriterDied: the process has ended during the job.
        """
        pickled = pickle.dumps(job)
        try:
            self._connection.send_bytes(pickled)
            send_handle(self._connection, fd, self.pid)
            return self._outcome(note_progress, look)
        except (EOFError, OSError) as error:
            raise WriterDied(self._end()) from error
        except BaseException:
            self._stop()
            raise

    def _outcome(self, note_progress: Callable[[int, int], None], look: Callable[[], None]) -> WrittenFiles | _Failed:
        while True:
            if self._connection.poll(_LOOK_SECONDS):
                message: tuple[int, int] | WrittenFiles | _Failed = self._connection.recv()
                if not isinstance(message, tuple):
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

    def release(self) -> None:
        """Close the connection to a process that has ended, or that was given up."""
        self._connection.close()

    def forget(self) -> None:
        """Forget the process in a forked child, because it belongs to the parent."""
        self._process.returncode = 0
        self.release()


class WriterProcesses:
    """The writer processes of this process. There is only one, unless saves of several groups run at the same time."""

    def __init__(self) -> None:
        self._idle: list[WriterProcess] = []
        self._n_lent = 0
        self._lock = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """The process ids of those without a job."""
        return [writer.pid for writer in self._idle]

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
        dead = [writer for writer in self._idle if not writer.is_alive]
        self._idle = [writer for writer in self._idle if writer not in dead]
        for writer in dead:
            writer.release()


WRITERS: Final = WriterProcesses()


class WriteInProcess:
    """``write_files`` for one save in a writer process. This process writes if some data is not in shared memory.

    Args:
        look: raises if another rank has given up the save.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def __call__(
        self, files: FilesOfRank, source: ItemSource, check_stop: Callable[[int, int], None], not_removed: list[str]
    ) -> WrittenFiles:
        shared = source.shared if isinstance(source, StagedSource) else None
        if shared is None:
            return write_files(files, source, check_stop, not_removed)
        plan = _Plan(
            names=[source.name(place) for place in range(len(source))],
            expected=[source.expected(place) for place in range(len(source))],
            chunk_offsets=[source.chunk_offset(place) for place in range(len(source))],
            placements=files.placements,
        )
        options = replace(files.options, stripe_paths=files.options.stripes)  # the child has another working directory
        job = _Job(
            files=replace(files, placements=place_as_they_come([], files=1), options=options),
            plan=pickle.dumps(plan),
            memory_nbytes=shared.nbytes,
            tensor_places=shared.places,
            tensor_forms=shared.forms,
            records=_records(source, shared),
            cpus=shared.cpus,
        )
        try:
            outcome = self._outcome(job, shared.fd, check_stop)
        except BaseException:
            # A process that was stopped has removed its files. One that died has not.
            not_removed += remove_files_of(files)
            raise
        if isinstance(outcome, _Failed):
            not_removed += outcome.not_removed
            raise error_from_fields(outcome.type_name, outcome.fields)
        return outcome

    def _outcome(self, job: _Job, fd: int, check_stop: Callable[[int, int], None]) -> WrittenFiles | _Failed:
        with WRITERS.lent() as writer:
            try:
                return writer.write(job, fd, note_progress=check_stop, look=self._look)
            except WriterDied as death:
                raise RobustCheckpointError(
                    f"the writer process of rank {job.files.rank} (pid {writer.pid}) died while it wrote "
                    f"{job.files.directory}: {death}. Nothing of this save is committed, and the checkpoint before it "
                    "is still there; the next save starts another process"
                ) from death


def _records(source: ItemSource, shared: SharedCopies) -> dict[int, bytes]:
    """The bytes of all items that are not tensors in shared memory."""
    records = {}
    with NamedErrors(source, 0) as errors:
        for place in sorted(set(range(len(source))).difference(shared.places)):
            errors.place = place
            data = source.resolve(place)
            record = saved_by_torch(data) if isinstance(data, torch.Tensor) else data
            records[place] = record.getvalue()
    return records


def refuse_disk(disk: Disk) -> None:
    """Refuse a disk that the writer process cannot have.

    Raises:
        ValueError: it cannot be pickled, or its class is in the user's script.
    """
    try:
        if type(disk).__module__ == "__main__":
            raise pickle.PicklingError("its class is in the script, which the writer process does not run")
        pickle.dumps(disk)
    except Exception as error:  # pickle raises AttributeError and TypeError, too
        raise ValueError(
            f'executor="process" sends the disk to the writer process, and {type(disk).__qualname__} cannot be sent: '
            f'{error}; pass executor="thread", or a disk that can be pickled'
        ) from error


atexit.register(WRITERS.close)  # at that time the async saves are over
os.register_at_fork(after_in_child=WRITERS.forget_all)


# The other side: what runs in the writer process.

_STOP: Final = b""
"""Tells the writer process that the save has failed elsewhere. It removes what it has written."""


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
    connection = Connection(fd)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    with suppress(OSError):
        # The connection alone is not enough: a process that the rank has forked may keep the rank's end open. Before
        # Linux 5.3 there is only the connection.
        poll.register(os.pidfd_open(parent_pid), select.POLLIN)
    running: _RunningJob | None = None
    with suppress(EOFError, OSError):
        while os.getppid() == parent_pid and connection.fileno() in [ready for ready, _ in poll.poll()]:
            message = connection.recv_bytes()
            if message != _STOP:
                running = _RunningJob(connection, message, recv_handle(connection))
            elif running is not None:
                running.is_stopped.set()
    os._exit(0)  # at once, even during a write: the next save removes what this one has left


class _RunningJob:
    """A job, which a thread does."""

    def __init__(self, connection: Connection, job: bytes, fd: int) -> None:
        self.is_stopped = threading.Event()
        self._connection = connection
        self._sending = threading.Lock()
        self._told_at_seconds = 0.0
        threading.Thread(target=self._do, args=(job, fd), name="robust_dcp-writer", daemon=True).start()

    def _do(self, pickled: bytes, fd: int) -> None:
        not_removed: list[str] = []
        rank = -1
        try:
            job: _Job = pickle.loads(pickled)  # noqa: S301 (its own parent made it)
            rank = job.files.rank
            stay_near(job.cpus)
            outcome: WrittenFiles | _Failed = self._write(job, fd, not_removed)
        except BaseException as error:
            outcome = _Failed.of(error, rank, not_removed)
        if isinstance(outcome, _Failed):
            gc.collect()  # unfinished steps form reference cycles, which keep the rank's memory mapped
        with self._sending:
            self._connection.send(outcome)

    def _write(self, job: _Job, fd: int, not_removed: list[str]) -> WrittenFiles:
        # The engine keeps the order of writes by the identity of the placements, so equal plans share one object.
        plan = _PLANS.get(job.plan)
        if plan is None:
            plan = pickle.loads(job.plan)  # noqa: S301
            _PLANS.put(job.plan, plan)
        memory = StagingBuffer(job.memory_nbytes, fd=fd)
        try:
            files = replace(job.files, placements=plan.placements)
            return write_files(files, _SharedSource(plan, job, memory), self._check_stop, not_removed)
        finally:
            memory.release()

    def _check_stop(self, done_nbytes: int, total_nbytes: int) -> None:
        if self.is_stopped.is_set():
            raise Stopped("the save has failed elsewhere")
        now = time.monotonic()
        with self._sending:
            if now - self._told_at_seconds >= _PROGRESS_SECONDS:
                self._told_at_seconds = now
                self._connection.send((done_nbytes, total_nbytes))


class _SharedSource(ItemSource):
    """An ``ItemSource`` with the tensors in shared memory and the records that came with the job."""

    def __init__(self, plan: _Plan, job: _Job, memory: StagingBuffer) -> None:
        self._plan = plan
        tensors = memory.tensors(job.tensor_forms)
        self._data: dict[int, torch.Tensor | bytes] = dict(zip(job.tensor_places, tensors, strict=True))
        self._data.update(job.records)

    def __len__(self) -> int:
        return len(self._plan.names)

    def name(self, place: int) -> str:
        return self._plan.names[place]

    def expected(self, place: int) -> TensorForm | None:
        return self._plan.expected[place]

    def chunk_offset(self, place: int) -> tuple[int, ...]:
        return self._plan.chunk_offsets[place]

    def resolve(self, place: int) -> torch.Tensor | io.BytesIO:
        data = self._data[place]
        return data if isinstance(data, torch.Tensor) else io.BytesIO(data)


_PLANS: Table[bytes, _Plan] = CACHE.table(
    "plans of jobs", lambda pickled, _: 4 * len(pickled), max_nbytes=256 << 20, max_entries=4
)
