"""What a save leaves as its report: each rank's row, and the report that the coordinator makes of all rows.

A row travels with what a rank sends after it has written, so it takes no exchange of its own. ``plan.session`` and, for
planners that are not ours, ``writer`` call this module; ``report_file`` has the form of the file.
"""

from __future__ import annotations

import platform
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from robust_dcp.comm import node_name
from robust_dcp.report_file import Modules, Phase, Plan, Ranks, SavedReport, find_stragglers, shortened
from robust_dcp.storage.writing.engine import WrittenFiles
from robust_dcp.version import __version__

__all__ = ["RankRow", "SaidOfRank", "SaveTimes", "make_report", "said_of_rank"]

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

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the phase that runs in the block."""
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    def ends(self, name: str) -> None:
        """A phase ends now. It began when the one before ended."""
        self.seconds[name] = time.perf_counter() - self.began_seconds - sum(self.seconds.values())

    @contextmanager
    def own_write(self) -> Iterator[None]:
        """Time the block, in which this rank writes."""
        started = time.perf_counter()
        yield
        self.own_write_seconds = time.perf_counter() - started


def said_of_rank(rank: int, written: WrittenFiles, times: SaveTimes) -> SaidOfRank:
    """What a rank tells the coordinator for the report. Its texts have bounded lengths."""
    row = RankRow(
        times.seconds.get("plan", 0.0),
        times.stage_seconds,
        times.own_write_seconds,
        written.nbytes,
        len(written.names),
    )
    how = tuple(shortened(text, _TEXT_LENGTH) for text in (*written.how, *times.remarks)[:_MOST_TEXTS])
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
