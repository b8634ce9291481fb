"""The life of a process of ranks: environment, process group, the test's function, its outcome; the next; the exit.

Only :mod:`tests.harness.ranks` starts it. That module also decides how long to wait and which rank to kill.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import robust_dcp_autoload
from tests.harness.verdicts import Verdict, verdict_of

__all__ = ["STACK_SIGNAL", "RankTask", "be_program", "serve"]

STACK_SIGNAL = signal.SIGUSR2
"""On this signal a rank writes the stacks of all its threads to its output, even if it is stuck in C code."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankTask:
    """All that a rank needs to know. ``call`` is the pickled ``(function, args)``."""

    rank: int
    call: bytes
    env: Mapping[str, str]
    directory: str
    output_path: str
    init: bool
    group_timeout_seconds: float


def serve(parent: Connection) -> None:
    """Run the tasks that ``parent`` sends, and exit when it closes the connection.

    The answer to a task is a pickled ``Verdict``. After it the rank stays in its group, as a training process goes on
    after a save: if it left at once, the ranks that still work would see its connections close. More tasks may follow.
    """
    os.setpgid(0, 0)  # the parent kills a rank together with the processes that it started
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank must not outlive an interrupted pytest
    torch.set_num_threads(1)
    verdict = Verdict()
    with contextlib.suppress(EOFError, OSError):
        task: RankTask = pickle.loads(parent.recv_bytes())
        _become_a_rank(task)
        while True:
            verdict = _run(task)
            parent.send_bytes(_encode(verdict))
            task = pickle.loads(parent.recv_bytes())
    sys.stdout.flush()
    sys.stderr.flush()
    # This skips the interpreter's shutdown, which would wait for threads that a test has blocked on purpose.
    os._exit(1 if verdict.type_name else 0)


def _run(task: RankTask) -> Verdict:
    def run() -> Any:
        function, args = pickle.loads(task.call)
        if task.init and not dist.is_initialized():
            timeout = datetime.timedelta(seconds=task.group_timeout_seconds)
            dist.init_process_group("gloo", timeout=timeout)
        return function(*args)

    return verdict_of(run)


def be_program(
    source: str,
    arguments: Sequence[str] = (),
    become_host: Callable[[int], object] | None = None,
    in_new_interpreter: bool = False,
) -> None:
    """Be the main module of this process, and end it as the interpreter does: by the end of main or an exception."""
    os.setpgid(0, os.getpgid(os.getppid()))  # what it starts is not killed with it: tests look whether it ends
    if become_host is not None:
        become_host(int(os.environ["RANK"]))
    if in_new_interpreter or sys.version_info >= (3, 13):  # there the fork server has dropped all exit handlers
        os.execv(sys.executable, [sys.executable, "-W", "ignore", "-c", source, *arguments])
    warnings.simplefilter("ignore")
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    sys.argv = ["-c", *arguments]
    code: object = 0
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        robust_dcp_autoload.activate()  # as `import torch` does
        exec(compile(source, "<program>", "exec"), main.__dict__)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    ctypes.pythonapi.Py_Exit(code or 0)  # as main does: waits for threads, calls exit handlers, clears modules


def _become_a_rank(task: RankTask) -> None:
    output = os.open(task.output_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # The forkserver's stdout and stderr write to the files that pytest had when the server started.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (open as long as the rank lives)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    os.environ.clear()
    os.environ.update(task.env)
    os.chdir(task.directory)


def _encode(verdict: Verdict) -> bytes:
    """Pickle the outcome. Plain pickle sends a tensor by value. Shared memory would end with this process."""
    try:
        return pickle.dumps(verdict)
    except Exception:
        return pickle.dumps(verdict_of(pickle.dumps, verdict))
