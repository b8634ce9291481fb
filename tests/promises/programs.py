"""Programs of several ranks: processes that end as Python does, by the end of main or by an exception.

They are forked from the server of :mod:`tests.harness.ranks`, where torch is imported already.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import socket
import subprocess
import sys
import textwrap
import time
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import robust_dcp_autoload
from tests.harness.ranks import fork_server

__all__ = ["Ended", "free_port", "run_alone", "run_program"]

_HEADER = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import robust_dcp

rank, size, path = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["CHECKPOINT"]


def state(value, n=1000):
    return {"shared": torch.full((n,), float(value)), f"own{rank}": torch.full((n,), float(value + rank))}

"""


@dataclass(frozen=True)
class Ended:
    """How one rank ended. A negative ``exitcode`` is a signal."""

    rank: int
    exitcode: int
    output: str


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_program(
    script: str,
    directory: Path,
    *,
    size: int = 4,
    env: Mapping[str, str] | None = None,
    become_host: Callable[[int], object] | None = None,
    in_new_interpreter: bool = False,
    timeout_seconds: float = 120,
) -> list[Ended]:
    """Run ``script`` on ``size`` ranks. It finds ``rank``, ``size``, ``path`` and ``state(value)``.

    Args:
        become_host: is called first in each process, with its rank.
        in_new_interpreter: takes seconds more, and a child that a rank forks may end as Python does, too.

    Raises:
        AssertionError: some rank was still running after ``timeout_seconds``. All have been killed.
    """
    program = directory / "job.py"
    program.write_text(_HEADER + textwrap.dedent(script))
    common = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CHECKPOINT": str(directory / "checkpoint"),
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    processes = []
    for rank in range(size):
        own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        output = str(directory / f"rank{rank}.txt")
        arguments = ([str(program)], own, output, output, become_host, rank, in_new_interpreter)
        processes.append(fork_server().Process(target=_be_program, args=arguments))
        processes[-1].start()
    until = time.monotonic() + timeout_seconds
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    running = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    ended = [
        Ended(rank, process.exitcode, (directory / f"rank{rank}.txt").read_text())
        for rank, process in enumerate(processes)
    ]
    shown = "\n".join(f"--- rank {each.rank}: {each.exitcode}\n{each.output}" for each in ended)
    print(shown)
    assert not running, f"ranks {running} were still running after {timeout_seconds:g} seconds\n{shown}"
    return ended


def run_alone(
    source: str, directory: Path, *arguments: object, timeout_seconds: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that begins by ``import torch``. Of the variables of robust_dcp it has only those given."""
    program, output, errors = (directory.with_name(f"{directory.name}.{kind}") for kind in ("py", "out", "err"))
    program.write_text(textwrap.dedent(source))
    output.unlink(missing_ok=True)
    errors.unlink(missing_ok=True)
    own = {key: value for key, value in os.environ.items() if not key.startswith("ROBUST_DCP")}
    command = [str(program), *map(str, arguments)]
    process = fork_server().Process(
        target=_be_program, args=(command, {**own, **environment}, str(output), str(errors))
    )
    process.start()
    process.join(timeout_seconds)
    if process.is_alive():
        process.kill()
        raise AssertionError(f"{program} was still running\n{output.read_text()}\n{errors.read_text()}")
    return subprocess.CompletedProcess(command, process.exitcode, output.read_text(), errors.read_text())


def _be_program(
    command: list[str],
    env: Mapping[str, str],
    output: str,
    errors: str,
    become_host: Callable[[int], object] | None = None,
    rank: int = 0,
    in_new_interpreter: bool = False,
) -> None:
    """Be the main module of a process, and end as the interpreter does after it."""
    for number, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    os.environ.clear()
    os.environ.update(env)
    if become_host is not None:
        become_host(rank)
    if in_new_interpreter:
        os.execv(sys.executable, [sys.executable, "-W", "ignore", *command])
    warnings.simplefilter("ignore")
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    sys.argv = command
    code: object = 0
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        robust_dcp_autoload.activate()  # as `import torch` does
        exec(compile(Path(command[0]).read_text(), command[0], "exec"), main.__dict__)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    ctypes.pythonapi.Py_Exit(code or 0)  # as main does: waits for threads, calls exit handlers, clears modules
