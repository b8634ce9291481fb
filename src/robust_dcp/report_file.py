"""The report that a save leaves beside its checkpoint: ``.robust_dcp.report.json``.

This module owns the name of the file, its form, and its limits. The coordinator of a save makes one, and
``report_page`` reads them. It needs no torch, so that a report can be shown where no torch is installed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from statistics import median_low
from typing import Any, Final

import msgspec

__all__ = [
    "MAX_NBYTES",
    "REPORT_NAME",
    "VERSION",
    "Changes",
    "Modules",
    "Phase",
    "Plan",
    "Ranks",
    "SavedReport",
    "Straggler",
    "decode_report",
    "encode_report",
    "find_stragglers",
    "shortened",
]

REPORT_NAME: Final = ".robust_dcp.report.json"
"""No reader of checkpoints looks for a file of this name."""

VERSION: Final = 1
MAX_NBYTES: Final = 64 << 20
"""A report of 100,000 ranks has about 9 MB. A file that is larger than this is no report."""

MAX_RANKS: Final = 1_000_000
_SAVE_ID: Final = re.compile(r"[0-9a-f-]{16,64}")

_SLOW_FACTOR: Final = 1.5
_SLOW_SECONDS: Final = 0.1
_MOST_STRAGGLERS: Final = 32


class Phase(msgspec.Struct, frozen=True):
    """One phase as the coordinator saw it, with the wait for other ranks."""

    name: str
    seconds: float


_MOST_KEYS: Final = 100
"""How many keys of each kind a report names."""

_KEY_LENGTH: Final = 300


class Changes(msgspec.Struct, frozen=True):
    """What differs from the structure of the save before.

    Attributes:
        n_added, n_removed, n_changed: how many keys.
        added, removed: the first of these keys, in order.
        changed: the first of these keys, each with what it was and what it is now.
    """

    n_added: int = 0
    n_removed: int = 0
    n_changed: int = 0
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: dict[str, str] = {}

    @classmethod
    def of(cls, diff: Any) -> Changes:
        """The first keys of each kind of a ``StructureDiff``, and how many there are."""
        some = itertools.islice(diff.changed.items(), _MOST_KEYS)
        return cls(
            n_added=len(diff.added),
            n_removed=len(diff.removed),
            n_changed=len(diff.changed),
            added=tuple(shortened(key, _KEY_LENGTH) for key in diff.added[:_MOST_KEYS]),
            removed=tuple(shortened(key, _KEY_LENGTH) for key in diff.removed[:_MOST_KEYS]),
            changed={shortened(key, _KEY_LENGTH): shortened(how, _KEY_LENGTH) for key, how in some},
        )


class Plan(msgspec.Struct, frozen=True):
    """How the save came by its plan.

    Attributes:
        outcome: ``built``, ``reused`` or ``rebuilt``; ``foreign`` if another planner made it.
        reason: why, in words.
        changes: ``None`` if there was nothing to compare with.
    """

    outcome: str = "built"
    reason: str = ""
    changes: Changes | None = None


class Ranks(msgspec.Struct, frozen=True):
    """One column for each thing that is known of each rank. Row ``i`` of all columns is about rank ``rank[i]``.

    Attributes:
        rank: in the group that saved.
        node: place in ``nodes`` of the report.
        plan_seconds: from the call until all ranks had agreed. The rank that came last has the least.
        stage_seconds: how long it copied its data, in an async save.
        write_seconds: how long it wrote, without the wait for others.
        nbytes, files: what it wrote.
        write_nbytes_per_second: ``nbytes / write_seconds``.
        how: place in ``ways`` of the report.
    """

    rank: tuple[int, ...] = ()
    node: tuple[int, ...] = ()
    plan_seconds: tuple[float, ...] = ()
    stage_seconds: tuple[float, ...] = ()
    write_seconds: tuple[float, ...] = ()
    nbytes: tuple[int, ...] = ()
    files: tuple[int, ...] = ()
    write_nbytes_per_second: tuple[int, ...] = ()
    how: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.rank)


class Modules(msgspec.Struct, frozen=True):
    """The bytes of the checkpoint by module, as a tree. Row 0 is the whole.

    Attributes:
        name: a part of FQNs, such as ``layers`` or ``attention.wq.weight``.
        parent: place of the module around it, always an earlier row; -1 for row 0.
        nbytes: bytes in the files. If those of a module are more than those of its parts, the rest are parts that are
            too small to be listed.
    """

    name: tuple[str, ...] = ("",)
    parent: tuple[int, ...] = (-1,)
    nbytes: tuple[int, ...] = (0,)


class Straggler(msgspec.Struct, frozen=True):
    """A rank that others waited for.

    Attributes:
        phase: ``plan`` (it came late), ``stage`` or ``write``.
        seconds: how long it took; in ``plan`` how much later than the median rank it came.
        median_seconds: how long the median rank took; 0 in ``plan``.
    """

    rank: int
    node: str
    phase: str
    seconds: float
    median_seconds: float


class SavedReport(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file.

    Attributes:
        version: of this form.
        checkpoint: the directory that was saved to.
        save_id: the id in ``.metadata``. A file with another id is the report of another save.
        saved_at_seconds: when it was committed, in seconds since 1970, by the clock of the coordinator.
        seconds: wall time on the coordinator, from the call until the commit.
        world_size, coordinator_rank: of the group that saved.
        is_async: whether it was written while training went on.
        total_nbytes: what all ranks wrote together.
        versions: of robust_dcp, torch and Python.
        phases: as the coordinator saw them.
        plan: how the save came by its plan.
        nodes: host names.
        ways: how ranks wrote, such as ``["direct"]`` or ``["buffered: the file system has no direct I/O"]``.
        ranks: what is known of each rank. A rank that sent nothing has no row.
        stragglers: the slowest first.
        waits: what the log said about ranks that all others waited for.
        fallbacks: what the save went without, such as the index.
        modules: the bytes of the checkpoint by module; ``None`` if they are not known.
    """

    save_id: str
    version: int = VERSION
    checkpoint: str = ""
    saved_at_seconds: float = 0.0
    seconds: float = 0.0
    world_size: int = 1
    coordinator_rank: int = 0
    is_async: bool = False
    total_nbytes: int = 0
    versions: dict[str, str] = {}
    phases: tuple[Phase, ...] = ()
    plan: Plan = Plan()
    nodes: tuple[str, ...] = ()
    ways: tuple[tuple[str, ...], ...] = ()
    ranks: Ranks = Ranks()
    stragglers: tuple[Straggler, ...] = ()
    waits: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    modules: Modules | None = None


def encode_report(report: SavedReport) -> bytes:
    """The bytes of the file: JSON that people can read, with one line for each column."""
    fields = msgspec.to_builtins(report)
    columns = fields.pop("ranks")
    modules = fields.pop("modules")
    lines = [f'  "{name}": {_json(value)}' for name, value in fields.items()]
    lines.append('  "ranks": {\n' + _lines_of(columns) + "\n  }")
    lines.append('  "modules": ' + ("null" if modules is None else "{\n" + _lines_of(modules) + "\n  }"))
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _lines_of(columns: dict[str, object]) -> str:
    return ",\n".join(f'    "{name}": {_json(column)}' for name, column in columns.items())


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


_NEWER: Final = "it has version {} of the form, and this robust_dcp knows {}: update robust_dcp"


class _Version(msgspec.Struct):
    version: int = 0


def decode_report(data: bytes) -> SavedReport:
    """Read what :func:`encode_report` made.

    Raises:
        ValueError: ``data`` is no report, or one whose parts do not fit together. The message says what is wrong.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            raise ValueError(_NEWER.format(version, VERSION))
        report = msgspec.json.decode(data, type=SavedReport)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no report of a save: {error}") from None
    _check(report)
    return report


def _check(report: SavedReport) -> None:
    """Make sure that places exist and numbers are ones that can be drawn."""
    ranks = report.ranks
    columns = {name: getattr(ranks, name) for name in ranks.__struct_fields__}
    for name, column in columns.items():
        _expect(len(column) == len(ranks), f"ranks.{name} has {len(column)} rows, and ranks.rank {len(ranks)}")
        _expect(all(0 <= value < math.inf for value in column), f"ranks.{name} has a value that is no size or time")
    _expect(len(ranks) <= MAX_RANKS, f"it has {len(ranks)} ranks")
    _expect(len(set(ranks.rank)) == len(ranks), "a rank has two rows")
    _expect(max(ranks.node, default=-1) < len(report.nodes), "a rank is on a node without a name")
    _expect(max(ranks.how, default=-1) < len(report.ways), "a rank wrote in a way that is not listed")
    _expect(_SAVE_ID.fullmatch(report.save_id) is not None, "its save_id is not one of robust_dcp")
    for name, number in (
        *((name, getattr(report, name)) for name in ("saved_at_seconds", "seconds", "world_size", "total_nbytes")),
        *((f"phase {phase.name!r}", phase.seconds) for phase in report.phases),
    ):
        _expect(0 <= number < 1e18, f"{name} is {number}")
    modules = report.modules
    if modules is not None:
        n_modules = len(modules.name)
        _expect(n_modules > 0 and n_modules == len(modules.parent) == len(modules.nbytes), "modules has uneven columns")
        _expect(modules.parent[0] == -1, "the first module is not the whole")
        for row, parent in enumerate(modules.parent[1:], 1):
            _expect(0 <= parent < row, f"module {row} is in module {parent}, which does not come before it")
        _expect(all(0 <= nbytes < 1 << 63 for nbytes in modules.nbytes), "a module has a size that is none")


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ValueError(f"it is no report of a save: {otherwise}")


def find_stragglers(ranks: Ranks, nodes: Sequence[str]) -> tuple[Straggler, ...]:
    """The ranks that took half as long again as the median rank, and at least 0.1 seconds longer; the slowest first."""
    if len(ranks) < 2:
        return ()
    found = []
    longest = median_low(ranks.plan_seconds)
    late = [max(longest - seconds, 0.0) for seconds in ranks.plan_seconds]
    for phase, seconds in (("plan", late), ("stage", ranks.stage_seconds), ("write", ranks.write_seconds)):
        median = 0.0 if phase == "plan" else median_low(seconds)
        limit = max(median * _SLOW_FACTOR, median + _SLOW_SECONDS)
        found += [
            Straggler(ranks.rank[row], nodes[ranks.node[row]], phase, round(taken, 6), round(median, 6))
            for row, taken in enumerate(seconds)
            if taken > limit
        ]
    return tuple(sorted(found, key=lambda each: each.median_seconds - each.seconds)[:_MOST_STRAGGLERS])


def shortened(text: str, length: int) -> str:
    """``text``, with ``…`` for what is longer than ``length`` characters, and as UTF-8 can hold it."""
    whole = text.encode(errors="backslashreplace").decode()
    return whole if len(whole) <= length else f"{whole[: length - 1]}…"
