"""Turns the figures of single measurements into rows with medians over rounds, and with ratios within one run.

Called by ``benchmarks.storage``. Its tests check the ratios on invented figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks.drive.contenders import STOCK, STOCK_DEFAULT, STOCK_READER
from benchmarks.drive.measurement import Figures
from benchmarks.drive.probe import PROBES

__all__ = ["RATIOS", "Case", "Row", "rows_of"]

Row = dict[str, Any]

_GIB = 1 << 30

RATIOS = ("to_probe", "to_stock", "to_stock_best")
"""Keys of a row. The ratios are speeds relative to the fastest raw probe, to stock's default, and to stock's best
thread count. For loads the last two refer to stock's reader on stock's checkpoint."""


class Case(NamedTuple):
    """What was measured. For a load ``checkpoint`` is the writer of the checkpoint. For a save it is empty."""

    shape: str
    what: str
    who: str
    checkpoint: str = ""


def rows_of(measured: dict[Case, list[Figures]]) -> list[Row]:
    """Make a row for each case, in the order of ``measured``.

    Args:
        measured: the figures of all rounds, for each case.

    Returns:
        Rows with ``seconds`` and ``cpu_seconds_per_gib`` as medians, ``peak_nbytes`` as the maximum, and the ratios. A
        ratio is ``None`` if the run did not measure what it refers to.
    """
    seconds = {case: statistics.median(each.seconds for each in rounds) for case, rounds in measured.items()}
    return [_row(case, rounds, seconds) for case, rounds in measured.items()]


def _row(case: Case, rounds: list[Figures], seconds: dict[Case, float]) -> Row:
    gib = rounds[0].nbytes / _GIB

    def times_as_fast_as(who: Iterable[str], checkpoint: str = "") -> float | None:
        others = (Case(case.shape, case.what, name, checkpoint) for name in who)
        found = [seconds[other] for other in others if other in seconds]
        return min(found) / seconds[case] if found else None

    is_save = case.what == "save"
    return {
        **case._asdict(),
        "items": rounds[0].items,
        "nbytes": rounds[0].nbytes,
        "to_probe": times_as_fast_as(probe.name for probe in PROBES),
        "to_stock": times_as_fast_as([STOCK_DEFAULT]) if is_save else times_as_fast_as([STOCK_READER], STOCK_DEFAULT),
        "to_stock_best": times_as_fast_as(STOCK) if is_save else times_as_fast_as([STOCK_READER], STOCK_DEFAULT),
        "gib_per_second": gib / seconds[case],
        "seconds": seconds[case],
        "cpu_seconds_per_gib": statistics.median(each.cpu_seconds for each in rounds) / gib,
        "peak_nbytes": max(each.peak_nbytes for each in rounds),
        "rounds_seconds": [each.seconds for each in rounds],
    }
