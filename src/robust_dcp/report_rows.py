"""What a save leaves as its report: each rank's row, the sizes of modules, and the report that the coordinator makes.

A row travels with what a rank sends after it has written, so it takes no exchange of its own. ``report_file`` has the
form of the file.
"""

from __future__ import annotations

import heapq
import platform
import struct
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.comm import node_name
from robust_dcp.report_file import Modules, Phase, Plan, Ranks, SavedReport, find_stragglers, shortened
from robust_dcp.version import __version__

__all__ = ["RankRow", "SaidOfRank", "SaveTimes", "make_report", "module_sizes", "said_of_rank"]

_ROW: Final = struct.Struct("<fffQI")
_LINE_LENGTH: Final = 300
_TEXT_LENGTH: Final = 160
_MOST_TEXTS: Final = 8
_MOST_WAITS: Final = 20
_NODE_LENGTH: Final = 64
_PATH_LENGTH: Final = 4096


class RankRow(NamedTuple):
    """What a rank tells of its part of a save, in 24 bytes.

    Attributes:
        plan_seconds, stage_seconds, write_seconds, nbytes, files: as in ``report_file.Ranks``.
    """

    plan_seconds: float
    stage_seconds: float
    write_seconds: float
    nbytes: int
    files: int

    def encode(self) -> bytes:
        """Bytes of a fixed number, so that a save sends as much as the one before."""
        return _ROW.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> RankRow:
        """The inverse of :meth:`encode`. Times are rounded to microseconds."""
        plan, stage, write, *sizes = _ROW.unpack(data)
        return cls(round(plan, 6), round(stage, 6), round(write, 6), *sizes)


class SaidOfRank(NamedTuple):
    """A rank's :class:`RankRow`, encoded, the name of its node, and how it wrote."""

    row: bytes
    node: str
    how: tuple[str, ...]


@dataclass
class SaveTimes:
    """How long the parts of a save took on this rank, in seconds.

    Attributes:
        began_seconds: when it began (``time.perf_counter()``).
        seconds: each phase, with the wait for other ranks.
        stage_seconds: how long this rank copied what it saves, in an async save.
        own_write_seconds: how long this rank wrote, without the wait for others.
        remarks: how the data got to the writer, if there is something to say of that.
        is_async: whether the caller goes on while the save writes.
    """

    began_seconds: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)
    stage_seconds: float = 0.0
    own_write_seconds: float = 0.0
    remarks: tuple[str, ...] = ()
    is_async: bool = False

    def ends(self, name: str) -> None:
        """A phase ends now. It began when the one before ended."""
        self.seconds[name] = time.perf_counter() - self.began_seconds - sum(self.seconds.values())

    @contextmanager
    def own_write(self) -> Iterator[None]:
        """Time the block, in which this rank writes."""
        started = time.perf_counter()
        yield
        self.own_write_seconds = time.perf_counter() - started


def said_of_rank(rank: int, times: SaveTimes, nbytes: int, files: int, how: Sequence[str]) -> SaidOfRank:
    """What a rank tells the coordinator for the report. Its texts have bounded lengths.

    Args:
        nbytes, files, how: what it has written, into how many files, and in which ways.
    """
    row = RankRow(times.seconds.get("plan", 0.0), times.stage_seconds, times.own_write_seconds, nbytes, files)
    how = tuple(shortened(text, _TEXT_LENGTH) for text in (*how, *times.remarks)[:_MOST_TEXTS])
    return SaidOfRank(row.encode(), shortened(node_name(rank), _NODE_LENGTH), how)


def make_report(
    said: Sequence[tuple[int, SaidOfRank]],
    times: SaveTimes,
    *,
    checkpoint: str,
    save_id: str,
    world_size: int,
    coordinator_rank: int,
    plan: Plan,
    waits: Sequence[str] = (),
    fallbacks: Sequence[str] = (),
    modules: Modules | None = None,
) -> SavedReport:
    """The report of a save that was just committed.

    Args:
        said: each rank that has told something, and what.
        times: those of the coordinator.
        waits, fallbacks: as in :class:`SavedReport`, of any length.
    """
    nodes: dict[str, int] = {}
    ways: dict[tuple[str, ...], int] = {}
    ranks = _columns_of(said, nodes, ways)
    seconds = {"plan": 0.0, "stage": times.stage_seconds, "write": 0.0, "commit": 0.0, **times.seconds}
    return SavedReport(
        checkpoint=shortened(checkpoint, _PATH_LENGTH),
        save_id=save_id,
        saved_at_seconds=round(time.time(), 3),
        seconds=round(time.perf_counter() - times.began_seconds, 6),
        world_size=world_size,
        coordinator_rank=coordinator_rank,
        is_async=times.is_async,
        total_nbytes=sum(ranks.nbytes),
        versions={
            "robust_dcp": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        phases=tuple(Phase(name, round(each, 6)) for name, each in seconds.items() if name != "stage" or each),
        plan=plan,
        nodes=tuple(nodes),
        ways=tuple(ways),
        ranks=ranks,
        stragglers=find_stragglers(ranks, tuple(nodes)),
        waits=tuple(shortened(wait, _LINE_LENGTH) for wait in waits[:_MOST_WAITS]),
        fallbacks=tuple(shortened(each, _LINE_LENGTH) for each in fallbacks[:_MOST_WAITS]),
        modules=modules,
    )


def _columns_of(
    said: Sequence[tuple[int, SaidOfRank]], nodes: dict[str, int], ways: dict[tuple[str, ...], int]
) -> Ranks:
    """The columns of all ranks. Nodes and ways get their places when they are first seen."""
    rows = [RankRow.decode(each.row) for _, each in said]
    return Ranks(
        rank=tuple(rank for rank, _ in said),
        node=tuple(nodes.setdefault(each.node, len(nodes)) for _, each in said),
        plan_seconds=tuple(row.plan_seconds for row in rows),
        stage_seconds=tuple(row.stage_seconds for row in rows),
        write_seconds=tuple(row.write_seconds for row in rows),
        nbytes=tuple(row.nbytes for row in rows),
        files=tuple(row.files for row in rows),
        write_nbytes_per_second=tuple(int(row.nbytes / max(row.write_seconds, 1e-6)) for row in rows),
        how=tuple(ways.setdefault(each.how, len(ways)) for _, each in said),
    )


# How many bytes belong to which module: a tree of bounded size out of any number of names.

_MOST_MODULES: Final = 400
_MOST_PARTS: Final = 64
"""How many parts of one module are listed, the largest first."""

_MOST_LOOKED_AT: Final = 20_000
"""A module with more parts than this has none listed: nobody could see them."""

_NAME_LENGTH: Final = 80

# It sorts before all other characters. So the names in a module stand together, though "a-b" would come between "a" and
# "a.b".
_SEPARATOR: Final = "\0"
_AFTER_SEPARATOR: Final = "\1"


def module_sizes(names: Sequence[str], nbytes: npt.NDArray[np.int64]) -> Modules:
    """The tree of modules, with at most 400 rows. Of every module that is listed, the largest parts are.

    Args:
        names: FQNs, such as ``layers.0.attention.wq.weight``.
        nbytes: int64 ``[N]``, the bytes of each.
    """
    pieces = sorted((name.replace(".", _SEPARATOR), place) for place, name in enumerate(names))
    ordered = [name for name, _ in pieces]
    until = np.concatenate(([0], np.cumsum(nbytes[[place for _, place in pieces]]))).tolist()

    def size(begin: int, end: int) -> int:
        return int(until[end] - until[begin])

    listed: list[tuple[str, int, int]] = [("", -1, size(0, len(ordered)))]
    # Modules to open, the largest first: (-bytes, row, prefix, first name, end).
    closed = [(-listed[0][2], 0, "", 0, len(ordered))]
    while closed and len(listed) < _MOST_MODULES:
        _, row, prefix, begin, end = heapq.heappop(closed)
        parts = _parts(ordered, prefix, begin, end)
        parts = heapq.nlargest(_MOST_PARTS, parts, key=lambda part: size(part[1], part[2]))
        for part, first, last in parts[: _MOST_MODULES - len(listed)]:
            own = size(first, last)
            if own == 0:
                break
            listed.append((_shown(part, prefix), row, own))
            heapq.heappush(closed, (-own, len(listed) - 1, part, first, last))
    return Modules(
        name=tuple(name for name, _, _ in listed),
        parent=tuple(parent for _, parent, _ in listed),
        nbytes=tuple(own for _, _, own in listed),
    )


def _parts(names: Sequence[str], prefix: str, begin: int, end: int) -> list[tuple[str, int, int]]:
    """The parts of a module: for each its full name, the place of its first name, and the end of its names.

    A chain of modules that hold nothing but each other counts as one part.
    """
    while True:
        found: list[tuple[str, int, int]] = []
        first = begin
        while first < end:
            if len(found) == _MOST_LOOKED_AT:
                return []
            part = _first_part(names[first], prefix)
            last = bisect_left(names, part + _AFTER_SEPARATOR, first, end)
            found.append((part, first, last))
            first = last
        if len(found) != 1 or found[0][0] == prefix or found[0][0] == names[begin]:
            return [part for part in found if part[0] != prefix]
        prefix = found[0][0]


def _first_part(name: str, prefix: str) -> str:
    """``a.b`` for the name ``a.b.c`` in the module ``a``."""
    start = len(prefix) + len(_SEPARATOR) if prefix else 0
    stop = name.find(_SEPARATOR, start)
    return name if stop < 0 else name[:stop]


def _shown(part: str, prefix: str) -> str:
    own = part[len(prefix) + len(_SEPARATOR) :] if prefix else part
    return shortened(own.replace(_SEPARATOR, "."), _NAME_LENGTH)
