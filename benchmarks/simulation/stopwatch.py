"""Measures CPU seconds, wall seconds and memory of a process step by step. Pauses leave out the work of other ranks."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Cost", "Stopwatch"]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""proc(5): "To reset the peak resident set size ("high water mark") to the process's current resident set size"."""


@dataclass
class Cost:
    """The cost of a step: user and system time of all threads, and wall time."""

    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0


@dataclass(eq=False)
class Stopwatch:
    """Runs from :meth:`start`. Every :meth:`lap` gives a name to the time since the last lap.

    Attributes:
        laps: costs by name, in the order of their first lap.
        peak_nbytes: the most resident memory above that at the start, while the watch ran. Outside Linux the peak of
            the whole process counts, so that it is an upper bound.
    """

    laps: dict[str, Cost] = field(default_factory=dict)
    peak_nbytes: int = 0
    _floor_nbytes: int = 0
    _mark: tuple[float, float] = (0.0, 0.0)
    _pending: Cost = field(default_factory=Cost)

    def start(self) -> None:
        gc.collect()
        _give_back_memory()
        self._floor_nbytes = _resident_nbytes()
        self._resume()

    def lap(self, name: str) -> None:
        self._halt()
        cost = self.laps.setdefault(name, Cost())
        cost.cpu_seconds += self._pending.cpu_seconds
        cost.wall_seconds += self._pending.wall_seconds
        self._pending = Cost()
        self._resume()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time and memory of the block."""
        self._halt()
        try:
            yield
        finally:
            _give_back_memory()
            self._resume()

    @property
    def total(self) -> Cost:
        """The cost of all laps."""
        return Cost(
            sum(cost.cpu_seconds for cost in self.laps.values()), sum(cost.wall_seconds for cost in self.laps.values())
        )

    def _halt(self) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        self._pending.cpu_seconds += cpu - self._mark[0]
        self._pending.wall_seconds += wall - self._mark[1]
        self.peak_nbytes = max(self.peak_nbytes, _peak_nbytes() - self._floor_nbytes)

    def _resume(self) -> None:
        if _CLEAR_REFS.exists():
            _CLEAR_REFS.write_text(_RESET_PEAK)
        self._mark = time.process_time(), time.perf_counter()


def _resident_nbytes() -> int:
    return _status_nbytes("VmRSS:") if _STATUS.exists() else _peak_nbytes()


def _peak_nbytes() -> int:
    if _STATUS.exists():
        return _status_nbytes("VmHWM:")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status_nbytes(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def _give_back_memory() -> None:
    """Give freed memory back to the system. Otherwise the allocator could use it again without a visible growth."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if malloc_trim is not None:
        malloc_trim(0)
