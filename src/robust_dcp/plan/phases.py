"""How long the phases of a save or load took, and what they exchanged, for its report. Listeners are told of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from robust_dcp.comm import Channel
from robust_dcp.events import Event, EventName, is_heard, tell
from robust_dcp.report import PhaseReport

__all__ = ["AT_PHASE", "PhaseClock"]

AT_PHASE: list[Callable[[Channel, str], None]] = []
"""Functions to call when a rank begins a phase, with its name. Tests inject faults here."""


@dataclass(eq=False)
class PhaseClock:
    """The phases of one call on one channel, in order.

    Attributes:
        channel: the ranks and the operation.
        tells: whether listeners hear of this call. They do not of the saves of stock, which calls our hooks only.
        is_async: whether training goes on meanwhile.
        records: the phases that are over.
        started_seconds: when the call began (``time.perf_counter()``).
    """

    channel: Channel
    tells: bool = True
    is_async: bool = False
    records: list[PhaseReport] = field(default_factory=list)
    started_seconds: float = field(default_factory=time.perf_counter)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the phase that runs in the block. A phase that fails is not recorded."""
        started = time.perf_counter()
        with self.channel.recording() as stats:
            self.tell("phase_started", phase=name)
            for each in AT_PHASE:
                each(self.channel, name)
            yield
        report = PhaseReport(
            name,
            time.perf_counter() - started,
            stats.exchanges,
            stats.messages_sent,
            stats.header_nbytes_sent,
            stats.payload_nbytes_sent,
        )
        self.records.append(report)
        self.tell("phase_ended", phase=name, seconds=report.seconds)

    @contextmanager
    def telling_failures(self) -> Iterator[None]:
        """Tell listeners if the block raises."""
        try:
            yield
        except BaseException as error:
            self.tell("failed", error=error, seconds=self.seconds)
            raise

    @property
    def seconds(self) -> float:
        """Wall time since the call, in seconds."""
        return time.perf_counter() - self.started_seconds

    def seconds_of(self, name: str) -> float:
        """How long the phases of this name have taken together."""
        return sum(record.seconds for record in self.records if record.name == name)

    def tell(self, name: EventName, **more: Any) -> None:
        """Tell listeners what happened in this call."""
        if self.tells and is_heard():
            channel = self.channel
            tell(Event(name, channel.operation, channel.rank, channel.size, is_async=self.is_async, **more))
