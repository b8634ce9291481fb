"""Runs a program that knows nothing of robust_dcp under ``torchrun``, with or without ``ROBUST_DCP=1``. With it each
load is proved.

Owns starting the job and what it printed. The packages lie on ``PYTHONPATH``, where ``make test-compat`` has put them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PROGRAMS", "Job", "checkpoints_in", "is_ours", "run_command", "run_job", "torchrun"]

PROGRAMS = Path(__file__).parent / "programs"
_ANNOUNCEMENT = "takes over save, load and async_save of torch.distributed.checkpoint"


@dataclass(frozen=True)
class Job:
    """A job that has ended well.

    Attributes:
        output: all that its ranks have printed.
    """

    output: str

    @property
    def announcements(self) -> int:
        """How often robust_dcp has said that it takes over."""
        return self.output.count(_ANNOUNCEMENT)

    @property
    def equal(self) -> list[str]:
        """The names of the states that the program has found equal, bit for bit, on every rank."""
        return sorted(re.findall(r"equal: (\S+)", self.output))  # a line of another rank may stand before it

    @property
    def losses(self) -> list[str]:
        """The losses of rank 0 in the order of the steps, as they were printed."""
        return re.findall(r"\bloss: (\S+)", self.output)

    @property
    def stays_stock(self) -> list[str]:
        """What the log says that stock code does."""
        mark = "robust_dcp was asked for, but "
        return [line.split(mark, 1)[1] for line in self.output.splitlines() if mark in line]


def run_job(program: str, *arguments: str | Path, robust: bool) -> Job:
    """Run a program of the folder ``programs`` on two ranks.

    Raises:
        AssertionError: it has failed; the message is what it printed.
    """
    words = (PROGRAMS / "rank.py", PROGRAMS / f"{program}.py", *arguments)
    return run_command(*torchrun(2), *words, robust=robust)


def torchrun(n_ranks: int) -> tuple[str, ...]:
    return "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"


def run_command(*arguments: str | Path, robust: bool) -> Job:
    """Run this Python, with the variable or without it.

    Raises:
        AssertionError: it has failed; the message is what it printed.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("ROBUST_DCP")}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**own, "OMP_NUM_THREADS": "1", **({"ROBUST_DCP": "1", "ROBUST_DCP_PROVE": "1"} if robust else {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout
    return Job(done.stdout)


def is_ours(directory: Path) -> bool:
    """Whether robust_dcp has written this checkpoint: only robust_dcp writes an index."""
    return (directory / ".robust_dcp.index").is_file()


def checkpoints_in(directory: Path) -> list[Path]:
    """Every directory below this one that holds a checkpoint of ``torch.distributed.checkpoint``."""
    return sorted(metadata.parent for metadata in directory.rglob(".metadata"))
