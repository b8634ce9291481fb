"""Moments within an async save at which a process is killed: the trainer of a rank, or its writer process.

Owns the order to kill, which a rank leaves in a file, and the places that look at it: each call of a disk, in
whichever process it is made, and the steps of a save. Never decides what becomes of the others. Used by
``torture.async_kills``.
"""

from __future__ import annotations

import functools
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from robust_dcp.background import StagedSource
from robust_dcp.started_save import StartedSave
from robust_dcp.storage.files.posix_disk import PosixDisk
from torture.survivors import end_process

__all__ = ["PHASES", "KillDisk", "Order", "arm", "child_pids", "is_gone"]

PHASES = ("staging", "writing", "committing", "at any time")

_DIRECTORY = "TORTURE_KILL_DIRECTORY"
_LONGEST_SECONDS = 0.5
_CALLS = (
    *("open_new", "close", "pwrite", "preallocate", "truncate", "fsync", "fsync_directory", "rename"),
    *("unlink", "mkdirs", "list_directory", "exists", "fingerprint", "lock"),
)


class Order(NamedTuple):
    """Whom to kill, and when.

    Attributes:
        victim: ``"trainer"`` or ``"writer"``.
        phase: one of :data:`PHASES`.
        number: how many calls to the disk of that phase are made before; if there are fewer, the end of the phase.
    """

    victim: str
    phase: str
    number: int


class _Process:
    """This process: what it does, and how many calls of its phase it has counted."""

    phase = "writing"  # a writer process does nothing else
    is_trainer = False
    n_calls = 0
    order_path = ""
    lock = threading.Lock()


def arm(order: Order) -> None:
    """Have it happen, from now on, in this rank."""
    _watch_steps()
    _Process.is_trainer, _Process.phase, _Process.n_calls = True, "", 0
    path = _order_path()
    Path(f"{path}.new").write_text(" ".join((order.victim, order.phase.replace(" ", "_"), str(order.number))))
    os.replace(f"{path}.new", path)
    if order.phase == "at any time":
        seconds = random.Random(order.number).uniform(0, _LONGEST_SECONDS)
        timer = threading.Timer(seconds, _strike, args=[order.victim])
        timer.daemon = True
        timer.start()


def child_pids(pid: int | None = None) -> list[int]:
    """The processes that a process (by default this one) has started; those that have ended are not among them."""
    pids: list[int] = []
    for path in Path(f"/proc/{os.getpid() if pid is None else pid}/task").glob("*/children"):
        pids += map(int, path.read_text().split())
    return [each for each in pids if not is_gone(each)]


def is_gone(pid: int) -> bool:
    """Whether a process has ended, even if nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def writer_pids() -> list[int]:
    """The writer processes of this rank."""
    return [pid for pid in child_pids() if b"writing_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _order_path() -> str:
    return os.path.join(os.environ[_DIRECTORY], f"order{os.environ['RANK']}")


def _order() -> Order | None:
    try:
        victim, phase, number = Path(_order_path()).read_text().split()
    except (FileNotFoundError, KeyError):
        return None
    return Order(victim, phase.replace("_", " "), int(number))


def _strike(victim: str) -> None:
    """Kill it, from whichever of the two processes this is. Once."""
    with _Process.lock:
        try:
            os.unlink(_order_path())
        except FileNotFoundError:
            return
        if victim == "trainer":
            end_process(os.getpid() if _Process.is_trainer else os.getppid())
        elif not _Process.is_trainer:
            end_process()
        else:
            for pid in writer_pids():
                end_process(pid)


class KillDisk(PosixDisk):
    """A disk that counts its calls, and kills as it was ordered to. It has no attributes: writer processes make it."""


def _watched(name: str) -> Callable[..., Any]:
    method = getattr(PosixDisk, name)

    @functools.wraps(method)
    def call(self: KillDisk, *args: Any, **kwargs: Any) -> Any:
        order = _order()
        if order is not None and order.phase == _Process.phase:
            with _Process.lock:
                number, _Process.n_calls = _Process.n_calls, _Process.n_calls + 1
            if number == order.number:
                _strike(order.victim)
        return method(self, *args, **kwargs)

    return call


for _name in _CALLS:
    setattr(KillDisk, _name, _watched(_name))


@functools.cache
def _watch_steps() -> None:
    """Know in which phase the saves of this rank are."""

    def in_phase(phase: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def take(*args: Any, **kwargs: Any) -> Any:
            _Process.phase = phase
            order = _order()
            is_meant = order is not None and order.phase == phase
            if order is not None and is_meant and phase == "staging" and order.number % 2 == 0:
                _strike(order.victim)
            try:
                return step(*args, **kwargs)
            finally:
                if order is not None and is_meant:
                    _strike(order.victim)  # there were fewer calls
                _Process.phase = ""

        return take

    StagedSource.copy = in_phase("staging", StagedSource.copy)  # type: ignore[method-assign]
    StartedSave.write = in_phase("writing", StartedSave.write)  # type: ignore[method-assign]
    StartedSave.commit = in_phase("committing", StartedSave.commit)  # type: ignore[method-assign]
