"""What a save or load notes while it runs, and what a save leaves as its report: each rank's row, the sizes of modules.

A row travels with what a rank sends after it has written, so it takes no exchange of its own. ``report`` has the
form of the file.
"""

from __future__ import annotations

import platform
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from robust_dcp import __version__
from robust_dcp.comm import Channel
from robust_dcp.environment import node_name
from robust_dcp.events import LISTENERS, Event, EventName, tell
from robust_dcp.report import Modules, PhaseReport, PlanReport, Ranks, SavedReport, find_stragglers, shortened

AT_PHASE: list[Callable[[Channel, str], None]] = []
"""Functions to call when a rank begins a phase, with its name. Tests inject faults here."""

_ROW: Final = struct.Struct("<fffQI")
"""What a rank tells of its part of a save, as in ``report.Ranks``: the seconds that it planned, staged and wrote, bytes
and files. It takes as many bytes in each save."""

_REASON_LENGTH: Final = 2000
_TEXT_LENGTH: Final = 160
_MOST_TEXTS: Final = 8
_MOST_WAITS: Final = 20
_NODE_LENGTH: Final = 64
_PATH_LENGTH: Final = 4096


class Written(msgspec.Struct, frozen=True):
    """What a rank tells the coordinator of what it has written: only what does not follow from the plan.

    Attributes:
        row: for the report of the save; no bytes if there is to be none.
        node, how: the name of the rank's node, and how it wrote. They are not in the row, because what many ranks have
            in common is sent once.
        places: int64 ``[n, 2]``, offset and length of the rank's items of variable size, in plan order. No bytes if the
            coordinator knows these places.
        unloadable: objects that a load would refuse, and why, by key.
    """

    row: bytes = b""
    node: str = ""
    how: tuple[str, ...] = ()
    places: bytes = b""
    unloadable: dict[str, str] = {}

    def with_row(self, rank: int, clock: PhaseClock, nbytes: int, files: int, how: Sequence[str]) -> Written:
        """The message of a rank whose row is to be in the report. Its texts have bounded lengths.

        Args:
            nbytes, files, how: what it has written, into how many files, and in which ways.
        """
        seconds = {phase.name: phase.seconds for phase in clock.records}
        row = _ROW.pack(seconds["plan"], seconds.get("stage", 0.0), clock.own_write_seconds, nbytes, files)
        how = tuple(shortened(text, _TEXT_LENGTH) for text in (*how, *clock.remarks)[:_MOST_TEXTS])
        return msgspec.structs.replace(self, row=row, node=shortened(node_name(rank), _NODE_LENGTH), how=how)


class PhaseClock(msgspec.Struct, eq=False):
    """The phases of one call on one channel, in order.

    Attributes:
        channel: the ranks and the operation.
        tells: whether listeners hear of this call. They do not of the saves of stock, which calls our hooks only.
        is_async: whether training goes on meanwhile.
        records: the phases that are over.
        started_seconds: when the call began (``time.perf_counter()``).
        own_write_seconds: how long this rank wrote, without the wait for others.
        remarks: how the data of a save got to the writer, if there is something to say of that.
    """

    channel: Channel
    tells: bool = True
    is_async: bool = False
    records: list[PhaseReport] = msgspec.field(default_factory=list)
    started_seconds: float = msgspec.field(default_factory=time.perf_counter)
    own_write_seconds: float = 0.0
    remarks: tuple[str, ...] = ()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the phase that runs in the block. A phase that fails is not recorded."""
        started = time.perf_counter()
        with self.channel.recording() as stats:
            self.tell("phase_started", phase=name)
            for each in AT_PHASE:
                each(self.channel, name)
            yield
        report = PhaseReport(name, time.perf_counter() - started, *msgspec.structs.astuple(stats))
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


def make_report(
    messages: Sequence[Written | None],
    clock: PhaseClock,
    *,
    checkpoint: str,
    save_id: str,
    plan: PlanReport,
    fallbacks: Sequence[str],
    modules: Modules | None,
) -> SavedReport:
    """The report of a save that was just committed.

    Args:
        messages: what each rank has told, if it has.
        clock: that of the coordinator.
        plan, fallbacks: as in :class:`SavedReport`, of any length.
    """
    nodes: dict[str, int] = {}
    ways: dict[tuple[str, ...], int] = {}
    rows = []
    for rank, each in enumerate(messages):
        if each is not None and each.row:
            plan_seconds, stage_seconds, write_seconds, nbytes, files = _ROW.unpack(each.row)
            seconds = round(plan_seconds, 6), round(stage_seconds, 6), round(write_seconds, 6)
            node, way = nodes.setdefault(each.node, len(nodes)), ways.setdefault(each.how, len(ways))
            rows.append((rank, node, *seconds, nbytes, files, way))
    ranks = Ranks(*zip(*rows, strict=True))
    return SavedReport(
        checkpoint=shortened(checkpoint, _PATH_LENGTH),
        save_id=save_id,
        saved_at_seconds=round(time.time(), 3),
        seconds=round(clock.seconds, 6),
        world_size=clock.channel.size,
        coordinator_rank=clock.channel.rank,
        is_async=clock.is_async,
        total_nbytes=sum(ranks.nbytes),
        versions={
            "robust_dcp": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        phases=tuple(clock.records),
        plan=PlanReport(
            plan.outcome,
            shortened(plan.reason, _REASON_LENGTH),
            None if plan.changes is None else plan.changes.for_file(),
        ),
        nodes=tuple(nodes),
        ways=tuple(ways),
        ranks=ranks,
        stragglers=find_stragglers(ranks, tuple(nodes)),
        waits=tuple(map(shortened, clock.channel.stragglers[:_MOST_WAITS])),
        fallbacks=tuple(map(shortened, fallbacks[:_MOST_WAITS])),
        modules=modules,
    )


# How many bytes belong to which module: a tree of bounded size out of any number of names.

_SMALLEST_PART: Final = 400
"""A module is listed if it has at least one of so many equal parts of all bytes. So there are few."""

_NAME_LENGTH: Final = 80


def module_sizes(names: Sequence[str], nbytes: npt.NDArray[np.int64]) -> Modules:
    """The tree of modules that are not too small to be seen, the largest of a module first.

    A chain of modules that hold nothing but each other counts as one part.

    Args:
        names: FQNs, such as ``layers.0.attention.wq.weight``.
        nbytes: int64 ``[N]``, the bytes of each.
    """
    sizes: dict[str, int] = {"": 0}
    parts: dict[str, list[str]] = {}
    for name, own in zip(names, nbytes.tolist(), strict=True):
        sizes[""] += own
        module = ""
        for word in name.split("."):
            part = f"{module}.{word}" if module else word
            if part not in sizes:
                parts.setdefault(module, []).append(part)
                sizes[part] = 0
            sizes[part] += own if part else 0
            module = part
    listed, modules = [("", -1, sizes[""])], [""]
    for row, module in enumerate(modules):  # it grows
        inside = parts.get(module, [])
        while len(inside) == 1 and inside[0] in parts:
            inside = parts[inside[0]]
        large = (part for part in inside if _SMALLEST_PART * sizes[part] >= max(sizes[""], 1))
        for part in sorted(large, key=sizes.__getitem__, reverse=True):
            listed.append((shortened(part[len(module) + 1 if module else 0 :], _NAME_LENGTH), row, sizes[part]))
            modules.append(part)
    return Modules(*map(tuple, zip(*listed, strict=True)))
