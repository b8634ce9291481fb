"""Starts a job of the demo under torchrun in new processes, and waits for it.

Owns the command line and environment of ``torchrun``. It only reads a job's output, and only if the job failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Finished", "JobFailed", "torchrun"]

_ROOT = Path(__file__).resolve().parent.parent
_LINES_SHOWN = 60


@dataclass(frozen=True)
class Finished:
    """A job that ended well.

    Attributes:
        command: the command that a person would type.
        seconds: the wall time, with the start of Python and imports.
    """

    command: str
    seconds: float


class JobFailed(RuntimeError):
    """A job exited with a code other than 0, or ran too long. The message has the end of its output."""


def torchrun(job: str, work: Path, *, ranks: int, timeout_seconds: float = 240.0) -> Finished:
    """Run ``demo.<job>.main(work)`` on ``ranks`` fresh processes.

    Raises:
        JobFailed: the job failed. The message has the last lines of its output.
    """
    arguments = ["--standalone", f"--nproc-per-node={ranks}", "-m", "demo.rank", f"demo.{job}", str(work)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0"),
    }
    begin = time.perf_counter()
    log = work / f"{job}_{ranks}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=_ROOT,
        )
        try:
            code = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its workers
            process.wait()
            raise JobFailed(f"{job} ran longer than {timeout_seconds:g} s\n{_end_of(log)}") from None
    if code != 0:
        raise JobFailed(f"{job} exited with code {code}\n{_end_of(log)}")
    return Finished(f"torchrun --nproc-per-node={ranks} demo/{job}.py", time.perf_counter() - begin)


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LINES_SHOWN:])
