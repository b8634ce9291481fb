"""The writer processes of a rank. Another process writes, so no thread of this one has to wait, not even for the GIL.

Owns these processes, from the first save that needs one until this process ends. It also owns the talk with a writer
process while that writes. The data is in shared memory (``StagedSource.shared``). Called by ``async_save``. The code of
the writer process is ``writing_worker``.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.background.messages import (
    FROM_WORKER,
    Failed,
    Job,
    MessagePipe,
    Plan,
    Progress,
    Stop,
    Written,
    form_message,
    name_of_disk,
    options_message,
)
from robust_dcp.background.staged_source import SharedCopies, StagedSource
from robust_dcp.errors import RobustCheckpointError
from robust_dcp.storage.committing.cleaning import stripe_directories
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.layouts import Layout
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.writing.emit import saved_by_torch
from robust_dcp.storage.writing.engine import WrittenFiles, remove_files_of, write_files
from robust_dcp.storage.writing.item_source import ItemSource, NamedErrors
from robust_dcp.storage.writing.write_options import WriteOptions

__all__ = ["WRITERS", "WriteInProcess", "WriterProcess", "WriterProcesses"]

_LOOK_SECONDS: Final = 0.05
"""While its writer process writes, a rank checks this often whether another rank has given up the save."""

_SEND_SECONDS: Final = 120.0
"""How long a writer process may take to accept a job. A new one has to import torch first; others accept at once."""

_STOP_SECONDS: Final = 30.0
"""How long a writer process may take to stop after it was told to. It may be waiting for a disk."""

_END_SECONDS: Final = 10.0

# Only the rank handles an interrupt. The search path is that of this process, not that of the environment.
_START: Final = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[3:]; "
    "from robust_dcp.background.writing_worker import run; run(int(sys.argv[1]), int(sys.argv[2]))"
)

# The writer process needs no device, and no threads inside of torch's operators.
_ENVIRONMENT: Final = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "ROBUST_DCP": "0"}


class WriterDied(Exception):
    """The writer process has ended, or does not answer any more. The message says how."""


class WriterProcess:
    """A process that writes one job at a time.

    It is a new process and not a fork. So it has no threads, locks or devices of this one. It does not run the user's
    script.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(_SEND_SECONDS)
        self._is_given_up = False
        self._pipe = MessagePipe(ours, FROM_WORKER)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, str(theirs.fileno()), str(os.getpid()), *sys.path],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **_ENVIRONMENT},
                )
            except BaseException:
                self._pipe.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._is_given_up and self._process.poll() is None

    def write(
        self, job: Job, fd: int, *, note_progress: Callable[[int, int], None], look: Callable[[], None]
    ) -> Written | Failed:
        """Let the process do a job, and wait for it.

        Args:
            fd: the open file of the memory with the tensors.
            note_progress: called with the number of bytes written so far, and of the bytes of all items of fixed size.
            look: called from time to time. If it raises, the job is stopped.

        Raises:
            WriterDied: the process has ended during the job.
        """
        encoded = msgspec.msgpack.encode(job)
        try:
            self._pipe.send(encoded, [fd])
            return self._outcome(note_progress, look)
        except (EOFError, OSError) as error:
            raise WriterDied(self._end()) from error
        except BaseException:
            self._stop()
            raise

    def _outcome(self, note_progress: Callable[[int, int], None], look: Callable[[], None]) -> Written | Failed:
        while True:
            if self._pipe.has_message(_LOOK_SECONDS):
                message, _ = self._pipe.receive()
                if not isinstance(message, Progress):
                    outcome: Written | Failed = message
                    return outcome
                note_progress(message.done_nbytes, message.total_nbytes)
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
            self._pipe.send(Stop())
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
            self._pipe.close()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"

    def close(self) -> None:
        """End the process, which must not have a job."""
        self._pipe.close()  # the writer process ends as if this process had ended
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._end()

    def release(self) -> None:
        """Close the connection to a process that has ended, or that was given up."""
        self._pipe.close()

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
        self,
        disk: Disk,
        directory: str,
        rank: int,
        source: ItemSource,
        placements: Placements,
        *,
        mark: str,
        options: WriteOptions,
        check_stop: Callable[[int, int], None],
        known_places: npt.NDArray[np.int64] | None,
        layout: Layout,
        not_removed: list[str],
    ) -> WrittenFiles:
        shared = source.shared if isinstance(source, StagedSource) else None
        if shared is None:
            return write_files(
                *(disk, directory, rank, source, placements),
                mark=mark,
                options=options,
                check_stop=check_stop,
                known_places=known_places,
                layout=layout,
                not_removed=not_removed,
            )
        job = Job(
            directory=directory,
            rank=rank,
            mark=mark,
            disk=name_of_disk(disk),
            options=options_message(options),
            known_places=None if known_places is None else known_places.astype(np.int64).tobytes(),
            plan=msgspec.msgpack.encode(Plan.of(source, placements)),
            memory_nbytes=shared.nbytes,
            tensor_places=shared.places,
            tensor_forms=[form_message(form) for form in shared.forms],
            records=_records(source, shared),
            cpus=sorted(shared.cpus),
        )
        try:
            outcome = self._outcome(job, shared.fd, check_stop)
        except BaseException:
            # A process that was stopped has removed its files. One that died has not.
            stripes = stripe_directories(disk, directory, options.stripes)
            not_removed += remove_files_of(disk, directory, rank, placements, layout, mark=mark, stripes=stripes)
            raise
        if isinstance(outcome, Failed):
            not_removed += outcome.not_removed
            raise outcome.error()
        return outcome.files()

    def _outcome(self, job: Job, fd: int, check_stop: Callable[[int, int], None]) -> Written | Failed:
        with WRITERS.lent() as writer:
            try:
                return writer.write(job, fd, note_progress=check_stop, look=self._look)
            except WriterDied as death:
                raise RobustCheckpointError(
                    f"the writer process of rank {job.rank} (pid {writer.pid}) died while it wrote {job.directory}: "
                    f"{death}. Nothing of this save is committed, and the checkpoint before it is still there; the "
                    "next save starts another process"
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


atexit.register(WRITERS.close)  # at that time the async saves are over
os.register_at_fork(after_in_child=WRITERS.forget_all)
