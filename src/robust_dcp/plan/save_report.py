"""The report that a save leaves beside its checkpoint: what each rank tells, who was late, how large the modules are.

What a rank tells travels with what it sends after it has written, so it takes no exchange of its own. ``report`` has
the form of the file.
"""

from __future__ import annotations

import platform
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from robust_dcp import __version__
from robust_dcp.environment import node_name
from robust_dcp.phases import PhaseClock
from robust_dcp.report import LoadBefore, LoadReport, Modules, PlanReport, Ranks, SavedReport, Straggler, shortened
from robust_dcp.storage.writing.engine import WrittenFiles

_ROW: Final = struct.Struct("<fffQI")
"""What a rank tells of its part of a save, as in ``report.Ranks``: the seconds that it planned, staged and wrote, bytes
and files. It takes as many bytes in each save."""

_LONG: Final = 4096
_MOST_TEXTS: Final = 8
_MOST_WAITS: Final = 20
_MOST_STRAGGLERS: Final = 32
_SLOW_FACTOR: Final = 1.5
_SLOW_SECONDS: Final = 0.1

_SMALLEST_PART: Final = 400
"""A module is listed if it has at least one of so many equal parts of all bytes. So there are few."""


LOADS: Final = deque[LoadBefore](maxlen=8)
"""The loads that no report tells of yet."""


class Written(msgspec.Struct, frozen=True):
    """What a rank tells the coordinator of what it has written: only what does not follow from the plan.

    Attributes:
        row: for the report of the save; no bytes if there is to be none.
        node, how: the name of the rank's node, and how it wrote. They are not in the row, because what many ranks have
            in common is sent once.
        piece: the length of its piece of ``.metadata``, and its CRC-32.
        block_nbytes: the length of its block of the index.
        places: int64 ``[n, 2]``, offset and length of the rank's items of variable size, in plan order, for the sizes
            of modules. No bytes if the coordinator has these.
        unloadable: objects that a load would refuse, and why, by key.
        hashes: the SHA-256 of the rank's files, if they are wanted.
    """

    row: bytes = b""
    node: str = ""
    how: tuple[str, ...] = ()
    piece: tuple[int, int] = (0, 0)
    block_nbytes: int = 0
    places: bytes = b""
    unloadable: dict[str, str] = {}
    hashes: dict[str, str] = {}


def with_row(message: Written, rank: int, clock: PhaseClock, files: WrittenFiles) -> Written:
    """The message with the row of the rank in the report. Its texts have bounded lengths."""
    seconds = {phase.name: phase.seconds for phase in clock.records}
    row = _ROW.pack(seconds["plan"], seconds.get("stage", 0.0), clock.own_write_seconds, files.nbytes, len(files.names))
    how = tuple(map(shortened, (*files.how, *clock.remarks)[:_MOST_TEXTS]))
    return msgspec.structs.replace(message, row=row, node=shortened(node_name(rank)), how=how)


def make_report(
    messages: Sequence[Written | None],
    clock: PhaseClock,
    *,
    checkpoint: str,
    save_id: str,
    plan: PlanReport,
    fallbacks: Sequence[str],
    identical_to: str,
    loads: tuple[LoadBefore, ...],
    modules: Modules | None,
) -> SavedReport:
    """The report of a save that was just committed.

    Args:
        messages: what each rank has told, if it has.
        clock: that of the coordinator.
        plan, fallbacks, identical_to, loads: as in :class:`SavedReport`.
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
        checkpoint=shortened(checkpoint, _LONG),
        save_id=save_id,
        saved_at_seconds=round(time.time(), 3),
        seconds=round(clock.seconds, 6),
        blocked_seconds=round(clock.blocked_seconds if clock.is_async else clock.seconds, 6),
        world_size=clock.channel.size,
        coordinator_rank=clock.channel.rank,
        is_async=clock.is_async,
        total_nbytes=sum(ranks.nbytes),
        versions={"robust_dcp": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        phases=tuple(clock.records),
        plan=PlanReport(plan.outcome, shortened(plan.reason, _LONG), plan.changes),
        nodes=tuple(nodes),
        ways=tuple(ways),
        ranks=ranks,
        stragglers=find_stragglers(ranks, tuple(nodes)),
        waits=tuple(map(shortened, clock.channel.stragglers[:_MOST_WAITS])),
        fallbacks=tuple(fallbacks),
        identical_to=shortened(identical_to, _LONG),
        loads=loads,
        modules=modules,
    )


def note_load(load: LoadReport) -> None:
    """Let the report of the next save tell of a load that this coordinator has made."""
    waits = tuple(map(shortened, load.stragglers[:_MOST_WAITS]))
    name, seconds = shortened(load.checkpoint_id, _LONG), round(load.seconds, 6)
    LOADS.append(LoadBefore(name, round(time.time(), 3), seconds, load.nbytes, load.phases, waits))


def tell_again(loads: Sequence[LoadBefore]) -> None:
    """Let the next report tell of loads, because the one that told of them is lost."""
    later = tuple(LOADS)
    LOADS.clear()
    LOADS.extend((*loads, *later))


def find_stragglers(ranks: Ranks, nodes: Sequence[str]) -> tuple[Straggler, ...]:
    """The ranks that took half as long again as the median rank, and at least 0.1 seconds longer; the slowest first."""
    if len(ranks.rank) < 2:
        return ()
    stragglers, middle = [], (len(ranks.rank) - 1) // 2
    longest = sorted(ranks.plan_seconds)[middle]
    late = [max(longest - seconds, 0.0) for seconds in ranks.plan_seconds]
    for phase, seconds in (("plan", late), ("stage", ranks.stage_seconds), ("write", ranks.write_seconds)):
        median = 0.0 if phase == "plan" else sorted(seconds)[middle]
        limit = max(median * _SLOW_FACTOR, median + _SLOW_SECONDS)
        for rank, node, taken in zip(ranks.rank, ranks.node, seconds, strict=True):
            if taken > limit:
                stragglers.append(Straggler(rank, nodes[node], phase, round(taken, 6), round(median, 6)))
    return tuple(sorted(stragglers, key=lambda each: each.median_seconds - each.seconds)[:_MOST_STRAGGLERS])


def module_sizes(names: Sequence[str], nbytes: npt.NDArray[np.int64]) -> Modules:
    """The tree of modules that are not too small to be seen, the largest of a module first.

    A chain of modules that hold nothing but each other counts as one part.

    Args:
        names: FQNs, such as ``layers.0.attention.wq.weight``.
        nbytes: int64 ``[N]``, the bytes of each.
    """
    sizes: dict[str, int] = {"": 0}
    parts: dict[str, list[str]] = {}
    for name, size in zip(names, nbytes.tolist(), strict=True):
        sizes[""] += size
        module = ""
        for word in name.split("."):
            part = f"{module}.{word}" if module else word
            if part not in sizes:
                parts.setdefault(module, []).append(part)
                sizes[part] = 0
            sizes[part] += size if part else 0
            module = part
    listed, modules = [("", -1, sizes[""])], [""]
    for row, module in enumerate(modules):  # it grows
        inside = parts.get(module, [])
        while len(inside) == 1 and inside[0] in parts:
            inside = parts[inside[0]]
        large = (part for part in inside if _SMALLEST_PART * sizes[part] >= max(sizes[""], 1))
        for part in sorted(large, key=sizes.__getitem__, reverse=True):
            listed.append((shortened(part[len(module) + 1 if module else 0 :]), row, sizes[part]))
            modules.append(part)
    return Modules(*map(tuple, zip(*listed, strict=True)))
