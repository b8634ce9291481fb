"""The life of a process of ranks: environment, process group, the test's function, its outcome; the next; the exit.

Only :mod:`tests.harness.ranks` starts it. That module also decides how long to wait and which rank to kill.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.leftovers import Leftovers

__all__ = ["ALL_STACKS_SIGNAL", "STACK_SIGNAL", "RankError", "RankTask", "serve"]

STACK_SIGNAL = signal.SIGUSR2
"""On this signal a rank writes the stack of its main thread to its output, even if it is stuck in C code."""

ALL_STACKS_SIGNAL = signal.SIGUSR1
"""On this signal a rank writes the stacks of all its threads. It reads them while the threads run, which may crash the
rank. So this signal is sent last."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankError:
    """The exception that a rank's function raised, as text. The exception object itself stays in the rank.

    Attributes:
        type_name: the name of its class.
        mro_names: the names of that class and all its bases, for :meth:`is_a`.
        message: the attribute ``message`` of robust_dcp's exceptions, else ``str(error)``.
        traceback_text: what Python would have printed.
        fields: ``to_fields()`` of robust_dcp's exceptions (their message and attributes). Empty for others.
        rank_failures: the ``RankFailure`` entries of robust_dcp's exceptions. Empty for others.
    """

    type_name: str
    mro_names: tuple[str, ...]
    message: str
    traceback_text: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    rank_failures: tuple[Any, ...] = ()

    def is_a(self, cls: type[BaseException]) -> bool:
        """Whether ``except cls`` would have caught the exception."""
        return cls.__name__ in self.mro_names

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}"


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
    comes_back: bool


def serve(parent: Connection) -> None:
    """Run the tasks that ``parent`` sends, and exit when it closes the connection.

    The answer to a task is ``pickle((value, RankError | None))``. After it the rank stays in its group, as a training
    process goes on after a save: if it left at once, the ranks that still work would see its connections close. More
    tasks may follow in this group. Nothing (``b""``) asks the rank to leave it. To that it answers whether it is again
    as it was, so that it can be another rank.
    """
    os.setpgid(0, 0)  # the parent kills a rank together with the processes that it started
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank must not outlive an interrupted pytest
    torch.set_num_threads(1)
    error: RankError | None = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            task: RankTask = pickle.loads(parent.recv_bytes())
            before = Leftovers() if task.comes_back else None
            _become_a_rank(task)
            more = b"begin"
            while more:
                value, error = _run(task)
                parent.send_bytes(_encode(value, error))
                if more := parent.recv_bytes():
                    task = pickle.loads(more)
            assert before is not None
            parent.send_bytes(pickle.dumps(before.clear_away()))
    sys.stdout.flush()
    sys.stderr.flush()
    # This skips the interpreter's shutdown, which would wait for threads that a test has blocked on purpose.
    os._exit(0 if error is None else 1)


def _run(task: RankTask) -> tuple[Any, RankError | None]:
    try:
        function, args = pickle.loads(task.call)
        if task.init and not dist.is_initialized():
            timeout = datetime.timedelta(seconds=task.group_timeout_seconds)
            dist.init_process_group("gloo", timeout=timeout)
        return function(*args), None
    except BaseException as caught:  # CheckpointException does not derive from Exception
        return None, _describe(caught)


def _become_a_rank(task: RankTask) -> None:
    output = os.open(task.output_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # The forkserver's stdout and stderr write to the files that pytest had when the server started.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (open as long as the rank lives)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=False)
    faulthandler.register(ALL_STACKS_SIGNAL, file=2, all_threads=True)
    os.environ.clear()
    os.environ.update(task.env)
    os.chdir(task.directory)


def _describe(error: BaseException) -> RankError:
    to_fields = getattr(error, "to_fields", None)
    fields = to_fields() if callable(to_fields) else {}
    return RankError(
        type_name=type(error).__name__,
        mro_names=tuple(cls.__name__ for cls in type(error).__mro__),
        message=str(fields.get("message", error)),
        traceback_text="".join(traceback.format_exception(type(error), error, error.__traceback__)),
        fields=fields,
        rank_failures=tuple(getattr(error, "rank_failures", ())),
    )


def _encode(value: Any, error: RankError | None) -> bytes:
    """Pickle the outcome. Plain pickle sends a tensor by value. Shared memory would end with this process."""
    try:
        return pickle.dumps((value, error))
    except Exception as caught:
        return pickle.dumps((None, _describe(caught)))
