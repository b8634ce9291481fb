"""Makes a rank fail or be killed in a phase of a save or load of ``robust_dcp`` or of what it takes over.

.. code-block:: python

    with fail_in("write", rank=1):
        robust_dcp.save(state_dict, checkpoint_id=path)  # raises on all ranks

The phases of a save are ``plan``, ``stage`` (async saves only), ``write`` and ``commit``. The phases of a load are
``plan``, ``read``, ``share`` and ``apply``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from msgspec.structs import replace

from robust_dcp.comm import Channel
from robust_dcp.comm.operation import Work
from robust_dcp.phases import AT_PHASE

__all__ = ["fail_in", "kill_in", "stand_still"]


@contextmanager
def fail_in(
    phase: str, *, rank: int, error: BaseException | None = None, operation: tuple[str, ...] | str = ("save", "load")
) -> Iterator[None]:
    """Make a rank raise in its own work in a phase: ``error``, or else an ``OSError``, each time it gets there."""

    def fail() -> NoReturn:
        raise OSError(f"rank {rank} fails in {phase!r}, as the test asked for") if error is None else error

    def fail_next_work(channel: Channel) -> None:
        its_operation: Any = channel._operation

        def run(verb: str, name: str, root: int, work: Work) -> Any:
            del its_operation.run
            return its_operation.run(verb, name, root, replace(work, produce=fail))

        its_operation.run = run

    with _at(phase, rank, operation, fail_next_work):
        yield


@contextmanager
def kill_in(phase: str, *, rank: int) -> Iterator[None]:
    """Kill a rank in a phase by ``SIGKILL``, as the kernel does when memory runs out."""
    with _at(phase, rank, ("save", "load"), lambda channel: os.kill(os.getpid(), signal.SIGKILL)):
        yield


@contextmanager
def _at(phase: str, rank: int, operation: tuple[str, ...] | str, act: Callable[[Channel], object]) -> Iterator[None]:
    def act_there(channel: Channel, begun: str) -> None:
        if channel.rank == rank and begun == phase and channel.operation.startswith(operation):
            act(channel)

    AT_PHASE.append(act_there)
    try:
        yield
    finally:
        AT_PHASE.remove(act_there)


def stand_still(until: Any, then: signal.Signals = signal.SIGCONT) -> None:
    """Stop this process until there is a file ``until``, or for a minute. Then it gets the signal ``then``."""
    wait = 'n=0; until [ -e "$0" ] || [ $n -gt 600 ]; do n=$((n + 1)); sleep 0.1; done; kill -s "$1" "$2"'
    subprocess.Popen(["sh", "-c", wait, str(until), then.name.removeprefix("SIG"), str(os.getpid())])
    seconds = time.monotonic() + 60
    os.kill(os.getpid(), signal.SIGSTOP)
    while not os.path.exists(until) and time.monotonic() < seconds:  # it may be another thread that takes the signal
        time.sleep(0.01)
