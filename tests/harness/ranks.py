"""Real ranks for tests. :func:`run_ranks` starts processes, makes each a rank on gloo, and collects their outcomes.

This module starts, watches and ends the processes. :mod:`tests.harness.rank_process` runs inside each of them. No
process is left behind, and nobody waits longer than the timeout. If the timeout passes, the test fails with the stacks
of all ranks.

    def save_something(path: str) -> int:              # top level of a test module: ranks import it by name
        ...
        return dist.get_rank()

    outcomes = run_ranks(4, save_something, str(tmp_path))
    assert values(outcomes) == [0, 1, 2, 3]
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.harness.rank_process import ALL_STACKS_SIGNAL, STACK_SIGNAL, RankError, RankTask, serve

__all__ = ["Job", "Outcome", "RankError", "RanksOverran", "errors", "fork_server", "in_ranks", "run_ranks", "values"]

_STACKS_WITHIN_SECONDS = 2.0
_GONE_WITHIN_SECONDS = 10.0
_BACK_WITHIN_SECONDS = 20.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rank.

    Attributes:
        rank: its rank in the world.
        value: what the function returned; ``None`` if it did not return.
        error: the exception that ended the function; ``None`` if it returned, or if the rank was killed.
        exitcode: 0 if it returned, 1 if it raised, ``-n`` if signal ``n`` killed it.
        output: what it wrote to stdout and stderr, also from C++.
    """

    rank: int
    value: Any
    error: RankError | None
    exitcode: int
    output: str

    def __str__(self) -> str:
        if self.error is not None:
            what = self.error.traceback_text
        elif self.exitcode == 0:
            what = "returned\n"
        else:
            what = f"ended with exit code {self.exitcode}\n"
        return f"--- rank {self.rank} {what}" + _indented("output", self.output)


class RanksOverran(AssertionError):
    """Some ranks were still running after ``timeout_seconds``. All were killed, and the message has their stacks."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 60,
    init: bool = True,
    group_timeout_seconds: float | None = None,
    env: Mapping[str, str] | None = None,
    failed_ranks_stay_seconds: float = 1.0,
) -> list[Outcome]:
    """Call ``function(*args)`` in ``world_size`` new processes, one for each rank, and return their outcomes in order.

    The ranks have the environment and directory that the caller has now (``monkeypatch.setenv`` works), and the
    variables that ``torchrun`` sets (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ...). As with
    ``torchrun``, the rendezvous store is outside of the ranks, so it survives the end of any rank.

    Args:
        world_size: the number of ranks.
        function: a function at the top level of an importable module. It is pickled together with ``args``.
        args: the same for all ranks. The function finds its rank by ``dist.get_rank()`` or ``RANK``.
        timeout_seconds: the limit for all of it. Loading torch into the server, once a session, does not count.
        init: whether to call ``init_process_group("gloo")`` first. With ``False`` the function may do that itself.
        group_timeout_seconds: the timeout of the default group; ``timeout_seconds`` if not given.
        env: more environment variables, the same for all ranks.
        failed_ranks_stay_seconds: how long a rank that raised keeps its process and its connections while others
            still run. A rank that returned keeps them until all ranks have ended.

    Raises:
        RanksOverran: some rank was still running after ``timeout_seconds``.
    """
    job = Job(
        world_size,
        timeout_seconds=timeout_seconds,
        init=init,
        group_timeout_seconds=group_timeout_seconds,
        env=env,
        is_new=True,
        failed_ranks_stay_seconds=failed_ranks_stay_seconds,
    )
    with job:
        return job.outcomes(function, *args)


def in_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 60,
    env: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """As :func:`run_ranks`, in processes that have been other ranks before, and will be again.

    Each call has a process group of its own. What a scenario saved, loaded and said before is forgotten. A process that
    was killed, or that has other functions, threads, signal handlers, limits or children than before, is replaced.
    """
    with Job(world_size, timeout_seconds=timeout_seconds, env=env) as job:
        return job.outcomes(function, *args)


class Job:
    """Ranks that stay in one group, and run one function after the other. The arguments are those of `run_ranks`.

    .. code-block:: python

        with Job(2) as job:
            assert job.run(save_something, path) == [0, 1]
            job.restart()
    """

    def __init__(
        self,
        n_ranks: int,
        *,
        timeout_seconds: float = 60,
        init: bool = True,
        group_timeout_seconds: float | None = None,
        env: Mapping[str, str] | None = None,
        is_new: bool = False,
        failed_ranks_stay_seconds: float = float("inf"),
    ) -> None:
        self._n_ranks, self._timeout_seconds, self._is_new = n_ranks, timeout_seconds, is_new
        self._failed_ranks_stay_seconds = failed_ranks_stay_seconds
        group_seconds = timeout_seconds if group_timeout_seconds is None else group_timeout_seconds
        self._make_tasks = functools.partial(
            _tasks, n_ranks, timeout_seconds, group_seconds, init, env or {}, comes_back=not is_new
        )
        self.restart()

    def restart(self) -> None:
        """Begin anew, with ranks that remember nothing."""
        self.end()
        self._stack = contextlib.ExitStack()
        self._tasks = self._stack.enter_context(self._make_tasks())
        self._ranks = [_idle.pop() if _idle and not self._is_new else _Rank() for _ in self._tasks]
        self._stack.callback(_end_all, self._ranks)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``function(*args)`` returned on each rank."""
        return values(self.outcomes(function, *args))

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Outcome]:
        """How ``function(*args)`` ended on each rank."""
        call, failed_may_leave = pickle.dumps((function, args)), float("inf")
        for rank, task in zip(self._ranks, self._tasks, strict=True):
            rank.begin(dataclasses.replace(task, call=call))
        deadline = time.monotonic() + self._timeout_seconds
        while running := [rank for rank in self._ranks if rank.is_running]:
            now = time.monotonic()
            if now > deadline:
                _dump_stacks(self._ranks)
                raise RanksOverran(_overrun_message(self._ranks, self._timeout_seconds))
            failed = [rank for rank in self._ranks if rank.has_raised]
            if failed:
                failed_may_leave = min(failed_may_leave, now + self._failed_ranks_stay_seconds)
            if now >= failed_may_leave:
                for rank in failed:
                    rank.connection.close()
            events = [each for rank in running for each in (rank.connection, rank.process.sentinel)]
            wait(events, min(deadline, failed_may_leave if failed_may_leave > now else deadline) - now)
            for rank in running:
                rank.receive()
        return [rank.outcome() for rank in self._ranks]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """End the group. Processes that are as they were will be ranks again, others are killed."""
        if hasattr(self, "_stack"):
            self._stack.close()


_idle: list[_Rank] = []


@atexit.register
def _end_the_idle() -> None:
    while _idle:
        _idle.pop().end()


def _end_all(ranks: Sequence[_Rank]) -> None:
    can_come_back = [rank for rank in ranks if rank.ask_back()]
    for rank in ranks:
        if rank in can_come_back and rank.has_come_back():
            _idle.append(rank)
        else:
            rank.end()


@contextlib.contextmanager
def _tasks(
    world_size: int,
    timeout_seconds: float,
    group_timeout_seconds: float,
    init: bool,
    env: Mapping[str, str],
    comes_back: bool,
) -> Iterator[list[RankTask]]:
    """What each rank is to do. Their outputs and the store of their group last as long as the block."""
    fork_server()
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory, _store(timeout_seconds) as port:
        yield [
            RankTask(
                rank=rank,
                call=b"",
                env=_rank_environment(rank, world_size, port, env),
                directory=os.getcwd(),
                output_path=os.path.join(directory, f"rank{rank}.txt"),
                init=init,
                group_timeout_seconds=group_timeout_seconds,
                comes_back=comes_back,
            )
            for rank in range(world_size)
        ]


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What the ranks returned, in rank order.

    Raises:
        AssertionError: some rank raised or was killed. The message has all tracebacks and outputs.
    """
    failed = [outcome for outcome in outcomes if outcome.exitcode != 0]
    if failed:
        raise AssertionError(_report("did not return", failed, outcomes))
    return [outcome.value for outcome in outcomes]


def errors(outcomes: Sequence[Outcome], ranks: Sequence[int] | None = None) -> list[RankError]:
    """The exceptions that ended ``ranks`` (default: all), in that order.

    Raises:
        AssertionError: some of these ranks returned or were killed.
    """
    chosen = outcomes if ranks is None else [outcomes[rank] for rank in ranks]
    if any(outcome.error is None for outcome in chosen):
        raise AssertionError(_report("did not raise", [o for o in chosen if o.error is None], chosen))
    return [outcome.error for outcome in chosen if outcome.error is not None]


class _Rank:
    """One process, and the connection over which it gets tasks and sends outcomes. It exits when that is closed."""

    task: RankTask
    result: tuple[Any, RankError | None] | None = None

    def __init__(self) -> None:
        context = fork_server()
        self.connection: Connection
        self.connection, theirs = context.Pipe(duplex=True)
        self.process: BaseProcess = context.Process(target=serve, args=(theirs,), name="rank")
        self.process.start()
        theirs.close()

    def begin(self, task: RankTask) -> None:
        self.task, self.result = task, None
        self.connection.send_bytes(pickle.dumps(task))

    @property
    def exitcode(self) -> int | None:
        return self.process.exitcode

    @property
    def is_running(self) -> bool:
        """Whether the rank's function still runs."""
        return self.result is None and self.exitcode is None

    def receive(self) -> None:
        """Receive the outcome if there is one. A killed rank leaves none, or half of one."""
        if self.result is None and not self.connection.closed:
            try:
                if self.connection.poll():
                    self.result = pickle.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                self.process.join(_GONE_WITHIN_SECONDS)

    @property
    def has_raised(self) -> bool:
        return self.result is not None and self.result[1] is not None

    def ask_back(self) -> bool:
        """Ask the process to leave its group. Returns whether it can: one that still runs something cannot."""
        if self.is_running or not self.task.comes_back:
            return False
        with contextlib.suppress(OSError):
            self.connection.send_bytes(b"")
        return True

    def has_come_back(self) -> bool:
        """Whether the process has left its group, and is as it was."""
        try:
            return self.connection.poll(_BACK_WITHIN_SECONDS) and bool(pickle.loads(self.connection.recv_bytes()))
        except (EOFError, OSError):
            return False

    def output(self) -> str:
        path = Path(self.task.output_path)
        return path.read_text(errors="replace") if path.exists() else ""

    def outcome(self) -> Outcome:
        value, error = self.result or (None, None)
        exitcode = self.process.exitcode if self.result is None else int(error is not None)
        return Outcome(self.task.rank, value, error, exitcode or 0, self.output())

    def end(self) -> None:
        """Kill the rank and all processes that it started. They may still run after the rank itself has ended."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has no process group yet, or all of them are gone
                os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.exitcode is None:
            self.process.kill()
        self.process.join()
        self.connection.close()
        self.process.close()


def _dump_stacks(ranks: Sequence[_Rank]) -> None:
    """Make every living rank write its stacks to its output, and wait until they have arrived."""
    for stacks_signal in (STACK_SIGNAL, ALL_STACKS_SIGNAL):
        waiting = []
        for rank in ranks:
            if rank.process.is_alive() and rank.process.pid is not None:
                waiting.append((rank, len(rank.output())))
                os.kill(rank.process.pid, stacks_signal)
                os.kill(rank.process.pid, signal.SIGCONT)  # a test may have stopped the process
        deadline = time.monotonic() + _STACKS_WITHIN_SECONDS
        while time.monotonic() < deadline and any(len(rank.output()) == before for rank, before in waiting):
            time.sleep(0.01)
        time.sleep(0.05)  # the signal handler writes line by line


def _overrun_message(ranks: Sequence[_Rank], timeout_seconds: float) -> str:
    lines = []
    for rank in ranks:
        if rank.is_running:
            what = "still running"
        elif rank.result is None:
            what = f"ended with exit code {rank.exitcode}"
        else:
            what = f"raised {rank.result[1]}" if rank.result[1] is not None else "returned"
        lines.append(f"--- rank {rank.task.rank} {what}\n" + _indented("output", rank.output()))
    running = [rank.task.rank for rank in ranks if rank.is_running]
    return f"ranks {running} were still running after {timeout_seconds:g} seconds\n" + "\n".join(lines)


def _report(what: str, culprits: Sequence[Outcome], outcomes: Sequence[Outcome]) -> str:
    ranks = [outcome.rank for outcome in culprits]
    return f"ranks {ranks} {what}\n" + "\n".join(str(outcome) for outcome in outcomes)


def _indented(title: str, text: str) -> str:
    return f"  {title}:\n" + "".join(f"    {line}\n" for line in text.splitlines()) if text else ""


def _rank_environment(rank: int, world_size: int, port: int, more: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment and what ``torchrun`` would add on one node."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **more,
    }


@contextlib.contextmanager
def _store(timeout_seconds: float) -> Iterator[int]:
    """Run the rendezvous store in this process. Yields its port."""
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    yield store.port
    del store


def fork_server() -> Any:
    """The forkserver context. The first call starts the server, with torch loaded and no thread running."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.preload"])
    # The server takes its search path from the environment only, and thread pools that NumPy and torch start when
    # they are imported would not survive a fork.
    with _environment({**_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
        forkserver.ensure_running()
        _wait_for_the_server()
    return context


@functools.cache
def _wait_for_the_server() -> None:
    """Wait for the server's answer, which comes when it has loaded everything."""
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    process.start()
    process.join()


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
