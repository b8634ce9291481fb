"""The settings that ``tune`` tries, the tables of what it measured, and the choice of the best setting.

The functions are pure, except that they ask for the number of processors. ``tune`` and ``tune_reads`` call them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

__all__ = [
    "BLOCKS_NBYTES",
    "GOOD_ENOUGH",
    "Measured",
    "Setting",
    "best_of_rounds",
    "choose",
    "settings_for",
    "table_of",
]

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30

BLOCKS_NBYTES: Final = (1 * _MIB, 4 * _MIB, 16 * _MIB)
DEPTHS: Final = (1, 2, 4, 8)
ROUNDS: Final = 3

GOOD_ENOUGH: Final = 0.95
"""A setting with at least this part of the best rate counts as equally fast. A few seconds cannot tell more."""


class Setting(NamedTuple):
    """One way to write or read: ``depth`` threads, in blocks. When writing, each thread has a file of its own."""

    direct: bool
    depth: int
    block_nbytes: int

    @property
    def in_flight_nbytes(self) -> int:
        return self.depth * self.block_nbytes


class Measured(NamedTuple):
    """The result of a setting: the best of three rounds. It includes checksums and, for writes, ``fsync``."""

    setting: Setting
    nbytes: int
    seconds: float
    cpu_seconds: float

    @property
    def nbytes_per_second(self) -> float:
        return self.nbytes / max(self.seconds, 1e-9)


def choose(table: Iterable[Measured]) -> Setting:
    """The cheapest setting with a rate within 5 % of the best. The same table always gives the same choice.

    Direct I/O is cheaper than buffered I/O, which fills the page cache and copies everything once more. Next, less
    memory in flight is cheaper, and then fewer threads.
    """
    rows = list(table)
    enough = GOOD_ENOUGH * max(row.nbytes_per_second for row in rows)
    return min(
        (row.setting for row in rows if row.nbytes_per_second >= enough),
        key=lambda setting: (not setting.direct, setting.in_flight_nbytes, setting.depth),
    )


def settings_for(share_nbytes: int, *, with_direct: bool) -> list[Setting]:
    """The settings to try. None has more bytes in flight than may be on the device at a time."""
    return [
        Setting(direct, depth, block)
        for direct in ((True, False) if with_direct else (False,))
        for block in BLOCKS_NBYTES
        for depth in DEPTHS
        if depth * block <= share_nbytes and depth <= 2 * _cpus()
    ]


def best_of_rounds(
    settings: Sequence[Setting], nbytes: int, measure: Callable[[Setting, int], Measured]
) -> list[Measured]:
    """The best result of each setting, with about ``nbytes`` each time."""
    best: dict[Setting, Measured] = {}
    # Each round tries all settings, so that a short burst of other work does not slow down one setting alone.
    for _ in range(ROUNDS):
        for setting in settings:
            # On a slow device, spend the time only on settings for which the measurement is long enough to mean
            # something.
            if setting.in_flight_nbytes > max(nbytes, 2 * min(BLOCKS_NBYTES)):
                continue
            measured = measure(setting, nbytes)
            if setting not in best or measured.nbytes_per_second > best[setting].nbytes_per_second:
                best[setting] = measured
    return list(best.values())


def table_of(rows: Iterable[Measured], chosen: Setting) -> list[str]:
    """Lines of text."""
    lines = ["     I/O  threads  block MiB  GiB/s  CPU-s/GiB"]
    for row in rows:
        setting, gib = row.setting, row.nbytes / _GIB
        lines.append(
            f"{'direct' if setting.direct else 'buffered':>8}  {setting.depth:7}  "
            f"{setting.block_nbytes / _MIB:9g}  {gib / max(row.seconds, 1e-9):5.2f}  {row.cpu_seconds / gib:9.3f}"
            f"{'  <- chosen' if setting == chosen else ''}"
        )
    return lines


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
