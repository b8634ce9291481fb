"""Real ranks for tests: starts, watches and ends processes, each a rank on gloo, and collects their outcomes.

:mod:`tests.harness.rank_process` runs inside each of them. No process is left behind, and nobody waits longer than the
timeout. If the timeout passes, the test fails with the stacks of all ranks.

    def save_something(path: str) -> int:              # top level of a test module: ranks import it by name
        ...
        return dist.get_rank()

    outcomes = run_ranks(4, save_something, str(tmp_path))
    assert values(outcomes) == [0, 1, 2, 3]
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.harness.rank_process import STACK_SIGNAL, RankTask, be_program, serve
from tests.harness.verdicts import Verdict

__all__ = [
    "Job",
    "Outcome",
    "RanksOverran",
    "end_shared_ranks",
    "errors",
    "on_ranks",
    "run_alone",
    "run_program",
    "run_ranks",
    "values",
]

HANG_SECONDS = 300.0
"""Ranks that take longer hang, also on a machine that is busy with much else."""

_STACKS_WITHIN_SECONDS = 2.0
_GONE_WITHIN_SECONDS = 10.0
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
    error: Verdict | None
    exitcode: int
    output: str

    def __str__(self) -> str:
        if self.error is not None:
            what = self.error.traceback_text
        elif self.exitcode == 0:
            what = "returned or still runs\n"
        else:
            what = f"ended with exit code {self.exitcode}\n"
        return f"--- rank {self.rank} {what}" + textwrap.indent(self.output, "    ")


class RanksOverran(AssertionError):
    """Some ranks were still running after ``timeout_seconds``. All were killed, and the message has their stacks."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
    """Call ``function(*args)`` in ``world_size`` new processes, one for each rank, and return their outcomes in order.

    A process is forked in milliseconds from a server that has imported torch. The options are those of :class:`Job`.
    The function is pickled together with ``args``, so it stands at the top level of a module. It finds its rank by
    ``dist.get_rank()`` or ``RANK``.

    Raises:
        RanksOverran: some rank was still running after ``timeout_seconds``.
    """
    with Job(world_size, failed_ranks_stay_seconds=1.0, **options) as job:
        return job.outcomes(function, *args)


_shared_jobs: dict[tuple[int, bool], Job] = {}


def on_ranks(n_ranks: int, function: Callable[..., Any], *args: Any, init: bool = True) -> list[Any]:
    """What ``function(*args)`` returned on ranks that all tests of a module share, in one group.

    A test that needs fresh processes, or ends some, uses :func:`run_ranks`.
    """
    key = n_ranks, init
    if key not in _shared_jobs:
        _shared_jobs[key] = Job(n_ranks, init=init)
    try:
        return _shared_jobs[key].run(function, *args)
    except BaseException:
        _shared_jobs.pop(key).end()  # they may not be in step any more
        raise


def end_shared_ranks() -> None:
    """End the ranks of :func:`on_ranks`; called after each module."""
    while _shared_jobs:
        _shared_jobs.popitem()[1].end()


_PROGRAM = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import robust_dcp

rank, size, path = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]


def state(value, n=1000):
    return {"shared": torch.full((n,), float(value)), f"own{rank}": torch.full((n,), float(value + rank))}


def store_of_rank_0():
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=rank == 0)


def join_by(store):
    # A group whose backend keeps nothing in the store and opens no port: robust_dcp alone uses both.
    from torch.testing._internal.distributed import fake_pg

    dist.init_process_group("fake", store=store, rank=rank, world_size=size)


def stay_until_all_are_done(store):
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < size:
        time.sleep(0.05)

"""


def with_store_of_rank_0() -> dict[str, str | None]:
    """The environment in which rank 0 has the store of the group, and takes it along when it ends."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    held.detach()  # it stays open, so nobody gets this port by chance. Rank 0 may listen there, as this one does not
    return {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": None}


def run_program(
    script: str,
    directory: Path,
    *,
    size: int = 4,
    env: Mapping[str, str | None] | None = None,
    become_host: Callable[[int], object] | None = None,
    in_new_interpreter: bool = False,
    timeout_seconds: float = HANG_SECONDS,
) -> list[Outcome]:
    """Run ``script`` on ``size`` ranks that end as Python does. It finds what is defined above.

    Rank 0 has the store of the group, and takes it along when it ends.

    Args:
        become_host: is called first in each process, with its rank.
        in_new_interpreter: takes seconds more, and a child that a rank forks may end as Python does, too.
    """
    source, arguments = _PROGRAM + textwrap.dedent(script), [str(directory / "checkpoint")]
    return run_ranks(
        size,
        be_program,
        source,
        arguments,
        become_host,
        in_new_interpreter,
        init=False,
        env={**with_store_of_rank_0(), **(env or {})},
        timeout_seconds=timeout_seconds,
    )


def run_alone(source: str, *arguments: object, **environment: str) -> Outcome:
    """Run a program that begins by ``import torch``. Of the variables of robust_dcp it has only those given."""
    env = {**{name: None for name in os.environ if name.startswith("ROBUST_DCP")}, **environment}
    words = [str(each) for each in arguments]
    return run_ranks(1, be_program, textwrap.dedent(source), words, init=False, env=env)[0]


class Job:
    """Ranks that stay in one group and run one function after the other, in new processes.

    .. code-block:: python

        with Job(2) as job:
            assert job.run(save_something, path) == [0, 1]
            job.restart()

    The ranks have the environment and directory that the caller has now (``monkeypatch.setenv`` works), and the
    variables that ``torchrun`` sets (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ...). As with
    ``torchrun``, the rendezvous store is outside of the ranks, so it survives the end of any rank.

    Args:
        timeout_seconds: the limit for one function. Loading torch into the server, once a session, does not count.
        init: whether to call ``init_process_group("gloo")`` first. With ``False`` the function may do that itself.
        group_timeout_seconds: the timeout of the default group; ``timeout_seconds`` if not given.
        env: more environment variables, the same for all ranks. What is ``None`` they do not have.
        failed_ranks_stay_seconds: how long a rank that raised keeps its process and its connections while others
            still run. A rank that returned keeps them until all ranks have ended.
    """

    def __init__(
        self,
        n_ranks: int,
        *,
        timeout_seconds: float = HANG_SECONDS,
        init: bool = True,
        group_timeout_seconds: float | None = None,
        env: Mapping[str, str | None] | None = None,
        failed_ranks_stay_seconds: float = float("inf"),
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._failed_ranks_stay_seconds = failed_ranks_stay_seconds
        group_seconds = timeout_seconds if group_timeout_seconds is None else group_timeout_seconds
        self._make_tasks = functools.partial(_tasks, n_ranks, timeout_seconds, group_seconds, init, env or {})
        self.restart()

    def restart(self) -> None:
        """Begin anew, with ranks that remember nothing."""
        self.end()
        self._stack = contextlib.ExitStack()
        self._tasks = self._stack.enter_context(self._make_tasks())
        self._ranks = [_Rank() for _ in self._tasks]
        for rank in self._ranks:
            self._stack.callback(rank.end)

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
                what = f"were still running after {self._timeout_seconds:g} seconds"
                outcomes = [rank.outcome() for rank in self._ranks]
                raise RanksOverran(_report(what, [outcomes[rank.task.rank] for rank in running], outcomes))
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
        """End the ranks that wait for a task, and kill the others and all that they have started."""
        if hasattr(self, "_stack"):
            for rank in self._ranks:
                rank.connection.close()
            self._stack.close()


@contextlib.contextmanager
def _tasks(
    world_size: int, timeout_seconds: float, group_timeout_seconds: float, init: bool, env: Mapping[str, str | None]
) -> Iterator[list[RankTask]]:
    """What each rank is to do. Their outputs and the store of their group last as long as the block."""
    fork_server()
    timeout = datetime.timedelta(seconds=timeout_seconds)
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        # The rendezvous store runs in this process.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        yield [
            RankTask(
                rank=rank,
                call=b"",
                env=_rank_environment(rank, world_size, store.port, env),
                directory=os.getcwd(),
                output_path=os.path.join(directory, f"rank{rank}.txt"),
                init=init,
                group_timeout_seconds=group_timeout_seconds,
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


def errors(outcomes: Sequence[Outcome], ranks: Sequence[int] | None = None) -> list[Verdict]:
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
    result: Verdict | None = None

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
        return self.result is not None and self.result.type_name != ""

    def output(self) -> str:
        path = Path(self.task.output_path)
        return path.read_text(errors="replace") if path.exists() else ""

    def outcome(self) -> Outcome:
        exitcode = self.process.exitcode if self.result is None else int(self.has_raised)
        value = None if self.result is None else self.result.value
        return Outcome(self.task.rank, value, self.result if self.has_raised else None, exitcode or 0, self.output())

    def end(self) -> None:
        """Kill the rank and all processes that it started. They may still run after the rank itself has ended."""
        self.connection.close()
        if self.result is not None:
            self.process.join(_GONE_WITHIN_SECONDS)  # by itself: a rank that is killed does not write what it covered
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has no process group yet, or all of them are gone
                os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.exitcode is None:
            self.process.kill()
        self.process.join()
        self.process.close()


def _dump_stacks(ranks: Sequence[_Rank]) -> None:
    """Make every living rank write its stacks to its output, and wait until they have arrived."""
    for rank in ranks:
        if rank.process.is_alive() and rank.process.pid is not None:
            os.kill(rank.process.pid, STACK_SIGNAL)
            os.kill(rank.process.pid, signal.SIGCONT)  # a test may have stopped the process
    time.sleep(_STACKS_WITHIN_SECONDS)


def _report(what: str, culprits: Sequence[Outcome], outcomes: Sequence[Outcome]) -> str:
    ranks = [outcome.rank for outcome in culprits]
    return f"ranks {ranks} {what}\n" + "\n".join(str(outcome) for outcome in outcomes)


def _rank_environment(rank: int, world_size: int, port: int, more: Mapping[str, str | None]) -> dict[str, str]:
    """The caller's environment and what ``torchrun`` would add on one node."""
    found = {
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
    return {name: value for name, value in found.items() if value is not None}


@functools.cache
def fork_server() -> Any:
    """The forkserver context. The first call starts the server, and waits until it has loaded torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.preload"])
    # The server takes its search path from the environment only, and thread pools that NumPy and torch start when
    # they are imported would not survive a fork.
    with mock.patch.dict(os.environ, {**_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
        # Coverage measures each rank. It fails at the end of a process that was forked while it measured the server.
        os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
        forkserver.ensure_running()
    process = context.Process(target=os.getpid)
    process.start()
    process.join()
    return context
