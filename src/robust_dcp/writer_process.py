"""A process beside a rank that writes the files of its async saves. No thread of the rank waits, not even for the GIL.

Owns these processes, from the first save that needs one until the rank ends, and both sides of the talk with them. The
tensors are in shared memory (``StagedSource.shared``). All else is pickled over a ``multiprocessing`` connection,
because a rank and its own child trust each other. A writer process does one job at a time. It never talks to other
ranks, never touches a CUDA device, and never runs the user's script. It ends when the rank ends, in whatever way. If a
save fails elsewhere, the rank kills its writer process, which may be waiting for a disk that hangs.
"""

from __future__ import annotations

import atexit
import errno
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
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Final, NoReturn

import msgspec
import torch

from robust_dcp.errors import RobustCheckpointError, failure_of
from robust_dcp.staged_source import HeldItems, StagedSource
from robust_dcp.staging.staging_buffers import StagingBuffer, TensorForm, stay_near
from robust_dcp.storage.writing.emit import FilesOfRank
from robust_dcp.storage.writing.engine import WrittenFiles, write_files
from robust_dcp.storage.writing.item_source import ItemSource
from robust_dcp.structure_cache import clear_caches
from robust_dcp.threads import LIMITS, start_thread

_LOOK_SECONDS: Final = 0.05
"""While its writer process writes, a rank checks this often whether another rank has given up the save."""

_PROGRESS_SECONDS: Final = 0.1
"""The least time between two messages about the progress of a job."""

_SEND_SECONDS: Final = 120
"""How long a writer process may take to start, and to accept the job that it has asked for."""

_END_SECONDS: Final = 10.0
"""How long a writer process may take to end. It may be waiting for a disk that hangs."""

# The search path is that of this process, not that of the environment. Only the rank reacts to an interrupt, or to a
# launcher that ends all processes. It finishes the save or ends us. All that is imported stays, so nobody looks for
# garbage meanwhile.
_START: Final = (
    "import gc, sys; gc.disable(); sys.path[:] = sys.argv[3:]; import signal; "
    "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]; "
    "from robust_dcp.writer_process import run; run(int(sys.argv[1]), int(sys.argv[2]))"
)

# The writer process needs no device, and no threads inside of torch's operators.
_ENVIRONMENT: Final = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "ROBUST_DCP": "0"}


class _Job(msgspec.Struct, frozen=True):
    """What a writer process is asked to write. The shared memory with the tensors comes as an open file.

    Attributes:
        files: where to write.
        items: what to write. Its data is the bytes of all items but the tensors in the shared memory.
        memory_nbytes: the size of the shared memory.
        copied, forms: the places and forms of the tensors in the shared memory, in their order there.
        cpus: the processors near the memory, on which the writer should run.
    """

    files: FilesOfRank
    items: HeldItems
    memory_nbytes: int
    copied: list[int]
    forms: list[TensorForm]
    cpus: frozenset[int]


class WriterProcess:
    """A process that writes one job at a time, as its rank sees it.

    It is a new process and not a fork. So it has no threads, locks or devices of this one.

    Attributes:
        job: is held while it has a job.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setblocking(True)  # whatever `socket.setdefaulttimeout` says
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_SECONDS, 0))
        self.job = threading.Lock()
        self._connection = Connection(ours.detach())
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", _START, str(theirs.fileno()), str(os.getpid()), *sys.path],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **_ENVIRONMENT},
                    # If the working directory was removed: torch cannot be imported there.
                    cwd=None if os.path.exists(os.readlink("/proc/self/cwd")) else os.sep,
                )
            except OSError as error:
                self._connection.close()
                raise RobustCheckpointError(
                    f"the writer process cannot be started: {error.strerror or error} "
                    f"({errno.errorcode.get(error.errno or 0, error.errno)}). Look at {LIMITS}, of open "
                    'files (`ulimit -n`) and of memory, or use executor="thread". Nothing of this save is committed'
                ) from error
            except BaseException:
                self._connection.close()
                raise

    def write(
        self, job: _Job, fd: int, note_progress: Callable[[int, int], None], look: Callable[[], None]
    ) -> WrittenFiles:
        """Let the process do a job, and wait for it. It removes no files if the job fails.

        Args:
            fd: the open file of the memory with the tensors.
            note_progress: called with the number of bytes written so far, and of the bytes of all items of fixed size.
            look: called from time to time. If it raises, the process is killed.

        Raises:
            RobustCheckpointError: the process could not write, or has ended during the job.
        """
        starts_until_seconds = time.monotonic() + _SEND_SECONDS
        try:
            message: tuple[int, int] | WrittenFiles | RobustCheckpointError | None = None
            while message is None or isinstance(message, tuple):
                if self._connection.poll(_LOOK_SECONDS):
                    message = self._connection.recv()
                    if message is None:  # it asks for a job: a new one has imported torch
                        starts_until_seconds = 0.0
                        self._connection.send_bytes(pickle.dumps(job))
                        send_handle(self._connection, fd, self.process.pid)
                        os.set_blocking(self._connection.fileno(), True)  # it makes a socket, as above
                    elif isinstance(message, tuple):
                        note_progress(*message)
                elif self.process.poll() is not None:
                    raise EOFError
                elif time.monotonic() < starts_until_seconds:
                    note_progress(0, job.memory_nbytes)  # it gets on, and may need longer than the timeout
                look()
        except (EOFError, OSError) as error:
            raise RobustCheckpointError(
                f"the writer process of rank {job.files.rank} (pid {self.process.pid}) died before it had written "
                f"{job.files.directory}: {self.end(within_seconds=1.0)}. Nothing of this save is committed, and the "
                "checkpoint before it is still there; the next save starts another process"
            ) from error
        except BaseException:
            self.end(within_seconds=0.0)
            raise
        if isinstance(message, RobustCheckpointError):
            raise message
        return message

    def end(self, within_seconds: float = _END_SECONDS) -> str:
        """End the process, by force if it does not end by itself in time. Returns a text that says how it ended."""
        self._connection.close()  # without a job it ends now, as if this process had ended
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(within_seconds)
        self.process.kill()  # does nothing if it has ended
        try:
            code = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.returncode = 0  # Popen would warn of a process that it leaves running
            return "it can no longer be talked to, and does not end"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"


_WRITER: Final[list[WriterProcess]] = []
"""The writer process of this process, once there is one."""

_LOCK: Final = threading.Lock()


def living_writer() -> WriterProcess:
    """The writer process. It is started if there is none."""
    with _LOCK:
        if not _WRITER or not (_WRITER[0].job.locked() or _WRITER[0].process.poll() is None):
            _WRITER[:] = [WriterProcess()]
        return _WRITER[0]


def _end_at_exit() -> None:
    for writer in _WRITER:
        writer.end()


def _forget_in_child() -> None:
    """A forked child has no writer process."""
    for writer in _WRITER:
        writer.process.returncode = writer.process.returncode or 0
    _WRITER.clear()
    _LOCK.release()


def write_in_process(
    look: Callable[[], None],
    files: FilesOfRank,
    source: ItemSource,
    check_stop: Callable[[int, int], None],
    not_removed: list[str],
) -> WrittenFiles:
    """``write_files`` for one save in the writer process. This process writes if some data is not in shared memory, or
    if the writer process has a job of another group.

    Args:
        look: raises if another rank has given up the save.
    """
    memory = source.shared if isinstance(source, StagedSource) else None
    if not isinstance(source, StagedSource) or memory is None or memory.fd is None:
        return write_files(files, source, check_stop, not_removed)
    writer = living_writer()
    if not writer.job.acquire(blocking=False):
        return write_files(files, source, check_stop, not_removed)
    try:
        items = HeldItems(source.names, source.expected, source.offsets)
        items.data = list(source.data)
        for place in source.copied:
            items.data[place] = io.BytesIO()
        job = _Job(files, items, memory.nbytes, source.copied, source.forms, memory.cpus)
        return writer.write(job, memory.fd, check_stop, look)
    except BaseException:
        not_removed += files.remove()
        raise
    finally:
        writer.job.release()


atexit.register(_end_at_exit)  # at that time the async saves are over
# No fork while another thread starts a writer process: the child would find the lock taken.
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_forget_in_child)


# The other side: what runs in the writer process.


def run(fd: int, parent_pid: int) -> NoReturn:
    """Do the rank's jobs until the rank ends.

    Args:
        fd: the file descriptor of this end of the connection.
        parent_pid: the process id of the rank.
    """
    torch.set_num_threads(1)
    start_thread(_end_with, parent_pid, name="robust_dcp-parent")
    connection = Connection(fd)
    gc.freeze()  # what was imported stays, so a collection has only the rest to look at
    gc.enable()
    with suppress(EOFError, OSError):
        while True:
            connection.send(None)
            job: _Job = connection.recv()
            connection.send(_do(connection, job, recv_handle(connection)))
            clear_caches()  # the order of writes is kept for placements that never come again
            gc.collect()  # unfinished steps form reference cycles, which keep the rank's memory mapped
    os._exit(0)


def _end_with(parent_pid: int) -> None:
    """End this process when the rank ends: at once, even during a write. The next save removes what this one has left.

    The connection alone is not enough: a process that the rank has forked may keep the rank's end open. Before
    Linux 5.3 there is only the connection.
    """
    with suppress(OSError):
        poll = select.poll()
        with suppress(ProcessLookupError):  # it has ended already
            poll.register(os.pidfd_open(parent_pid), select.POLLIN)
            if os.getppid() == parent_pid:
                poll.poll()
        os._exit(0)


def _do(connection: Connection, job: _Job, fd: int) -> WrittenFiles | RobustCheckpointError:
    """Write what a job asks for, and tell the rank of the progress."""
    lock, told_at_seconds = threading.Lock(), [0.0]

    def tell(done_nbytes: int, total_nbytes: int) -> None:  # several threads call it
        with lock:
            now = time.monotonic()
            if now - told_at_seconds[0] >= _PROGRESS_SECONDS:
                told_at_seconds[0] = now
                connection.send((done_nbytes, total_nbytes))

    try:
        stay_near(job.cpus)
        memory = StagingBuffer(job.memory_nbytes, fd=fd)
        try:
            for place, tensor in zip(job.copied, memory.tensors(job.forms), strict=True):
                job.items.data[place] = tensor
            return write_files(job.files, job.items, tell, [])
        finally:
            memory.release()
    except RobustCheckpointError as error:
        return error.with_traceback(None)
    except BaseException as error:
        failure = failure_of(job.files.rank, error)
        message = f"in the writer process: {failure.type_name}: {failure.message}\n{failure.traceback_text}".rstrip()
        return RobustCheckpointError(message)
