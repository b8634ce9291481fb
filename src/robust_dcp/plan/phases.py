"""How long the phases of a save or load took, and what they exchanged, for its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from robust_dcp.comm import Channel, ExchangeStats

__all__ = ["AT_PHASE", "PhaseClock", "PhaseRecord"]

AT_PHASE: list[Callable[[Channel, str], None]] = []
"""Functions to call when a rank begins a phase, with its name. ``robust_dcp.testing`` injects faults here."""


@dataclass(frozen=True)
class PhaseRecord:
    """How long one phase took, including the wait for other ranks, and what this rank exchanged in it."""

    name: str
    seconds: float
    stats: ExchangeStats


@dataclass(eq=False)
class PhaseClock:
    """The phases of one call on one channel, in order."""

    channel: Channel
    records: list[PhaseRecord] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the phase that runs in the block. A phase that fails is not recorded."""
        started = time.perf_counter()
        with self.channel.recording() as stats:
            for each in AT_PHASE:
                each(self.channel, name)
            yield
        self.records.append(PhaseRecord(name, time.perf_counter() - started, stats))
