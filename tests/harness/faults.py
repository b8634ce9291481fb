"""Makes a rank fail, come late, or be killed on purpose in a phase of a save or load.

.. code-block:: python

    def save_while_rank_1_fails(path: str) -> None:
        with testing.fail_in("write", rank=1):
            robust_dcp.save(state_dict, checkpoint_id=path)  # raises on all ranks

The phases of a save are ``plan``, ``stage`` (async saves only), ``write`` and ``commit``. The phases of a load are
``plan``, ``read``, ``share`` and ``apply``. Faults work in ``robust_dcp.save``, ``load`` and ``async_save``, and in
other calls that ``robust_dcp.install()`` takes over.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NoReturn

from robust_dcp.comm import Channel
from robust_dcp.comm.operation import Work
from robust_dcp.report_rows import AT_PHASE

__all__ = ["delay_in", "fail_in", "kill_in"]

Operation = Literal["save", "load"]

_PHASES = {"save": ("plan", "stage", "write", "commit"), "load": ("plan", "read", "share", "apply")}


@contextmanager
def fail_in(
    phase: str, *, rank: int, error: BaseException | None = None, operation: Operation | None = None
) -> Iterator[None]:
    """Make a rank raise in its own work in a phase. Within the block this happens each time it reaches the phase.

    Args:
        phase: one of the phases above.
        rank: the number of the rank in the group that saves or loads. All ranks may enter the block.
        error: the error to raise; an ``OSError`` if ``None``.
        operation: ``"save"`` or ``"load"``, for a phase that both have. ``None`` means both.

    Raises:
        ValueError: there is no such phase.
    """

    def fail() -> NoReturn:
        raise OSError(f"rank {rank} fails in {phase!r}, as the test asked for") if error is None else error

    def fail_next_work(channel: Channel) -> None:
        its_operation: Any = channel._operation

        def run(verb: str, name: str, root: int, work: Work) -> Any:
            del its_operation.run
            return its_operation.run(verb, name, root, replace(work, contribute=fail))

        its_operation.run = run

    with _at(phase, rank, operation, fail_next_work):
        yield


@contextmanager
def delay_in(
    phase: str,
    *,
    rank: int,
    seconds: float | None = None,
    until: Callable[[], object] | None = None,
    operation: Operation | None = None,
) -> Iterator[None]:
    """Make a rank come late to a phase.

    Args:
        phase: one of the phases above.
        rank: the number of the rank in the group that saves or loads.
        seconds: how late it comes.
        until: a function that waits instead, such as ``threading.Event().wait``.
        operation: as for :func:`fail_in`.

    Raises:
        ValueError: there is no such phase.
    """

    def wait(channel: Channel) -> None:
        if seconds is not None:
            time.sleep(seconds)
        if until is not None:
            until()

    with _at(phase, rank, operation, wait):
        yield


@contextmanager
def kill_in(phase: str, *, rank: int, operation: Operation | None = None) -> Iterator[None]:
    """Kill a rank in a phase by ``SIGKILL``, as the kernel does when memory runs out.

    Raises:
        ValueError: there is no such phase.
    """
    with _at(phase, rank, operation, lambda channel: os.kill(os.getpid(), signal.SIGKILL)):
        yield


@contextmanager
def _at(phase: str, rank: int, operation: Operation | None, act: Callable[[Channel], object]) -> Iterator[None]:
    operations = tuple(_PHASES) if operation is None else (operation,)
    if not any(phase in _PHASES[each] for each in operations):
        known = "; ".join(f"{each}: {', '.join(_PHASES[each])}" for each in operations)
        raise ValueError(f"there is no phase {phase!r}; the phases are: {known}")

    def act_there(channel: Channel, begun: str) -> None:
        if channel.rank == rank and begun == phase and channel.operation.startswith(operations):
            act(channel)

    AT_PHASE.append(act_there)
    try:
        yield
    finally:
        AT_PHASE.remove(act_there)
