"""What saves and loads tell while they run: to a monitoring system, a progress bar, or a log.

    with robust_dcp.on_event(print):
        robust_dcp.save(state_dict, checkpoint_id="checkpoints/step_1000")

A listener is called on the rank and in the thread that the event happens in. It costs that rank its time, but it cannot
make a save fail: what it raises is logged once. This module knows no other one, so every layer may tell events.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

logger = logging.getLogger(__name__)

_LAST_NUMBER: Final = re.compile(r"(\d{1,18})\D*$")

EventName = Literal["started", "phase_started", "progress", "phase_ended", "ended", "failed"]


class Slowest(NamedTuple):
    """The rank that has done the smallest part of its work.

    Attributes:
        rank: which one.
        done_nbytes, total_nbytes: how much it has copied, written or read in this phase, and how much there is.
        seconds: for how long it has been at that.
    """

    rank: int
    done_nbytes: int
    total_nbytes: int
    seconds: float


@dataclass(frozen=True)
class Event:
    """Something that happened in a save or load.

    Attributes:
        name: ``started``; ``phase_started`` and ``phase_ended`` with ``phase``; ``progress`` with ``done_nbytes``;
            ``ended`` with ``report``; ``failed`` with ``error``. Each call ends with one of the last two.
        operation: what the rank does, for example ``"save checkpoints/step_1000"``.
        rank, world_size: this rank in the group, and the size of the group.
        phase: as in ``SaveReport.phases`` and ``LoadReport.phases``.
        seconds: how long the phase, or the whole call, has taken.
        done_nbytes, total_nbytes: how many bytes this rank has copied, written or read in this phase, and how many
            there are; ``None`` if it does not know.
        slowest: on rank 0, with ``progress``: how far the slowest rank is, by what the ranks tell each other each
            second; ``None`` if none has told how much it has to do.
        report: a ``SaveReport`` or ``LoadReport``.
        error: what the call raises.
        is_async: whether training goes on meanwhile.
        at_seconds: when it happened, in seconds since 1970.
    """

    name: EventName
    operation: str
    rank: int
    world_size: int
    phase: str | None = None
    seconds: float | None = None
    done_nbytes: int | None = None
    total_nbytes: int | None = None
    slowest: Slowest | None = None
    report: Any = None
    error: BaseException | None = None
    is_async: bool = False
    at_seconds: float = field(default_factory=time.time)

    @property
    def kind(self) -> str:
        """``"save"``, ``"load"`` or ``"protect"``; or ``"drain"``, which tells of its progress and nothing else."""
        return self.operation.partition(" ")[0]

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's directory."""
        return self.operation.partition(" ")[2]

    @property
    def step(self) -> int | None:
        """The last number in the name of the checkpoint: 1000 for ``runs/7b/step_1000``; ``None`` if there is none."""
        found = _LAST_NUMBER.search(self.checkpoint_id.rstrip("/").rpartition("/")[2])
        return None if found is None else int(found[1])

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of an ``ended`` or ``failed`` event, for a monitoring system; none of other events.

        Example: ``{"robust_dcp/save/seconds": 1.5, "robust_dcp/save/write_seconds": 1.2, "robust_dcp/save/nbytes":
        4096.0, "robust_dcp/save/nbytes_per_second": 2730.6, "robust_dcp/save/failures": 0.0}``.

        ``nbytes`` are those of this rank. ``nbytes_per_second`` is their rate over the whole call.
        """
        if self.name not in ("ended", "failed"):
            return {}
        found = {"seconds": self.seconds or 0.0, "failures": float(self.name == "failed")}
        report = self.report
        if report is not None:
            for phase in report.phases:  # a load that was begun again has some of them twice
                found[f"{phase.name}_seconds"] = found.get(f"{phase.name}_seconds", 0.0) + phase.seconds
            found["nbytes"] = float(report.nbytes)
            if self.seconds:
                found["nbytes_per_second"] = report.nbytes / self.seconds
            if getattr(report, "blocked_seconds", None) is not None:
                found["blocked_seconds"] = report.blocked_seconds
            if getattr(report, "plan", None) is not None:
                found["plan_reused"] = float(report.plan == "reused")
        return {f"robust_dcp/{self.kind}/{name}": value for name, value in found.items()}


Listener = Callable[[Event], object]

LISTENERS: Final[list[Listener]] = []
"""Those that are called. Code that is called often first looks whether there are any."""

_FAILED: Final[set[int]] = set()
"""Ids of listeners that have raised. Only the first error of each is logged."""


class Listening:
    """A listener that is called until :meth:`stop`, or until the end of a ``with`` block."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        LISTENERS.append(listener)

    def stop(self) -> None:
        """Call the listener no more."""
        if self._listener in LISTENERS:
            LISTENERS.remove(self._listener)
            _FAILED.discard(id(self._listener))

    def __enter__(self) -> Listening:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def on_event(listener: Listener) -> Listening:
    """Call ``listener`` with each :class:`Event` of the saves and loads of this process.

    Args:
        listener: a function of one argument. It is called in the thread that saves or loads, and should be quick.

    Returns:
        What ends it: ``on_event(listener).stop()``, or ``with on_event(listener): …``.

    Example:
        >>> import tempfile, torch, robust_dcp
        >>> names = []
        >>> with tempfile.TemporaryDirectory() as path, robust_dcp.on_event(lambda event: names.append(event.name)):
        ...     _ = robust_dcp.save({"weight": torch.ones(4)}, checkpoint_id=path)
        >>> names[0], names[-1]
        ('started', 'ended')
    """
    return Listening(listener)


def tell(event: Event) -> None:
    """Call all listeners."""
    for listener in tuple(LISTENERS):
        try:
            listener(event)
        except Exception:  # noqa: PERF203 (there are few)
            if id(listener) not in _FAILED:
                _FAILED.add(id(listener))
                logger.exception(
                    "rank %d: %r raised at the event %r of %r; the %s goes on, and further errors of it are not logged",
                    event.rank,
                    listener,
                    event.name,
                    event.operation,
                    event.kind,
                )
