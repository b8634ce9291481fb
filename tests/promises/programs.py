"""Programs of several ranks: real processes that end as Python does, by the end of main or by an exception."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Ended", "free_port", "run_program"]

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
    command: Sequence[Sequence[str]] | None = None,
    timeout_seconds: float = 120,
) -> list[Ended]:
    """Run ``script`` on ``size`` ranks. It finds ``rank``, ``size``, ``path`` and ``state(value)``.

    Args:
        command: for each rank what comes before the interpreter, for example ``ip netns exec a``.

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
        "PYTHONFAULTHANDLER": "1",
        **(env or {}),
    }
    processes = []
    for rank in range(size):
        output = (directory / f"rank{rank}.txt").open("w")
        before = command[rank] if command is not None else ()
        processes.append(
            subprocess.Popen(
                [*before, sys.executable, "-W", "ignore", str(program)],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        )
        output.close()
    running = []
    until = time.monotonic() + timeout_seconds
    for rank, process in enumerate(processes):
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        if process.poll() is None:
            running.append(rank)
    for process in processes:
        process.kill()
        process.wait()
    ended = [
        Ended(rank, process.returncode, (directory / f"rank{rank}.txt").read_text())
        for rank, process in enumerate(processes)
    ]
    shown = "\n".join(f"--- rank {each.rank}: {each.exitcode}\n{each.output}" for each in ended)
    print(shown)
    assert not running, f"ranks {running} were still running after {timeout_seconds:g} seconds\n{shown}"
    return ended
