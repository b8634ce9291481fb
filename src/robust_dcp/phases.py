"""The phases of a save or load: how long each took, and who is told of it meanwhile."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from robust_dcp.comm import Channel
from robust_dcp.events import LISTENERS, Event, EventName, tell
from robust_dcp.report import PhaseReport

AT_PHASE: list[Callable[[Channel, str], None]] = []
"""Functions to call when a rank begins a phase, with its name. Tests inject faults here."""


class PhaseClock(msgspec.Struct, eq=False):
    """The phases of one call on one channel, in order.

    Attributes:
        channel: the ranks and the operation.
        tells: whether listeners hear of this call. They do not of the saves of stock, which calls our hooks only.
        is_async: whether training goes on meanwhile.
        records: the phases that are over.
        started_seconds: when the call began (``time.perf_counter()``).
        own_write_seconds: how long this rank wrote, without the wait for others.
        blocked_seconds: how long the call of an async save took, until training went on.
        remarks: how the data of a save got to the writer, if there is something to say of that.
    """

    channel: Channel
    tells: bool = True
    is_async: bool = False
    records: list[PhaseReport] = msgspec.field(default_factory=list)
    started_seconds: float = msgspec.field(default_factory=time.perf_counter)
    own_write_seconds: float = 0.0
    blocked_seconds: float = 0.0
    remarks: tuple[str, ...] = ()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the phase that runs in the block. A phase that fails is not recorded."""
        started, before = time.perf_counter(), msgspec.structs.astuple(self.channel.stats)
        self.tell("phase_started", phase=name)
        for each in AT_PHASE:
            each(self.channel, name)
        yield
        cost = map(operator.sub, msgspec.structs.astuple(self.channel.stats), before)
        report = PhaseReport(name, time.perf_counter() - started, *cost)
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

    def tell(self, name: EventName, **more: Any) -> None:
        """Tell listeners what happened in this call."""
        channel = self.channel
        if self.tells and LISTENERS:
            tell(Event(name, channel.operation, channel.rank, channel.size, is_async=self.is_async, **more))
