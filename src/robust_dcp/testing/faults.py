"""Faults on purpose: a rank that fails, is late, or is killed, in a phase of a save or a load.

.. code-block:: python

    def save_while_rank_1_fails(path: str) -> None:
        with testing.fail_in("write", rank=1):
            robust_dcp.save(state_dict, checkpoint_id=path)  # raises on all ranks

The phases of a save are ``plan``, ``stage`` (async saves only), ``write`` and ``commit``; those of a load are ``plan``,
``read``, ``share`` and ``apply``. Faults hold for ``robust_dcp.save``, ``load`` and ``async_save``, and for what the
switch makes of other calls.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from robust_dcp.comm import Channel
from robust_dcp.plan.phases import AT_PHASE

__all__ = ["delay_in", "fail_in", "kill_in"]

Operation = Literal["save", "load"]

_PHASES = {"save": ("plan", "stage", "write", "commit"), "load": ("plan", "read", "share", "apply")}


@contextmanager
def fail_in(
    phase: str, *, rank: int, error: BaseException | None = None, operation: Operation | None = None
) -> Iterator[None]:
    """Have a rank raise in its own work in a phase. Each time it comes there, as long as the block lasts.

    Args:
        phase: see above.
        rank: within the group that saves or loads. The block may be entered on all ranks.
        error: what it raises; an ``OSError`` if ``None``.
        operation: ``"save"`` or ``"load"``, for a phase that both have; either of them if ``None``.

    Raises:
        ValueError: no operation has such a phase.
    """

    def fail() -> None:
        raise OSError(f"rank {rank} fails in {phase!r}, as the test asked for") if error is None else error

    with _at(phase, rank, operation, lambda channel: channel.fail_next_work(fail)):
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
    """Have a rank come late into a phase.

    Args:
        phase: see above.
        rank: within the group that saves or loads.
        seconds: how late.
        until: or what it waits for, such as ``threading.Event().wait``.
        operation: as for :func:`fail_in`.

    Raises:
        ValueError: no operation has such a phase.
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
    """Have a rank killed in a phase, by ``SIGKILL``, as the kernel does when memory runs out.

    Raises:
        ValueError: no operation has such a phase.
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
