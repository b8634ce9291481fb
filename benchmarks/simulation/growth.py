"""Finds how the coordinator's cost grows with ranks and with items.

Owns the sizes to measure, and the exponents of the cost. Called by ``planning``. ``plot`` draws the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.simulation.cases import Row

__all__ = ["GROWTH_SIZES", "RANKS", "Fit", "fits_of", "stock_sizes"]

RANKS = (16, 32, 64, 128, 256, 512, 1024, 2048)
ITEMS = (500, 1000, 2000, 5000, 10000, 20000)
_RANKS_OF_ITEMS = 128
_ITEMS_OF_RANKS = 5000

GROWTH_SIZES = tuple(
    dict.fromkeys([*((ranks, _ITEMS_OF_RANKS) for ranks in RANKS), *((_RANKS_OF_ITEMS, items) for items in ITEMS)])
)
"""The sizes (ranks, items of each) for ours: first with more and more ranks, then with more and more items."""


def stock_sizes(max_ranks: int = 32) -> list[tuple[int, int]]:
    """The sizes (ranks, items of each) for stock. By default each takes less than about a minute.

    Args:
        max_ranks: the last of the doubled numbers of ranks.
    """
    ranks = [2**power for power in range(1, 20) if 2**power <= max_ranks]
    return [
        *((each, _ITEMS_OF_RANKS) for each in ranks),
        *((_RANKS_OF_ITEMS, items) for items in (125, 250, 500, 1000)),
    ]


@dataclass(frozen=True)
class Fit:
    """``seconds * (x / unit) ** exponent``: the least squares line through CPU seconds in log-log.

    Attributes:
        who, save: the coordinator (ours or stock's) and the save.
        over: ``ranks`` or ``items_each``: the one that grows. The other is fixed.
        exponent: the exponent of the growth.
        seconds: the CPU seconds at ``unit``.
        unit: the largest measured size.
        points: the number of measured sizes.
        largest_deviation: the largest factor between a measured point and the line.
    """

    who: str
    save: str
    over: str
    exponent: float
    seconds: float
    unit: int
    points: int
    largest_deviation: float

    def at(self, size: float) -> float:
        """CPU seconds at ``size``."""
        return self.seconds * math.pow(size / self.unit, self.exponent)

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


def fits_of(rows: Sequence[Row]) -> list[Fit]:
    """The fits for each coordinator and save that was measured in at least three sizes."""
    found = []
    for over, fixed, value in (("ranks", "items_each", _ITEMS_OF_RANKS), ("items_each", "ranks", _RANKS_OF_ITEMS)):
        series: dict[tuple[str, str], dict[int, float]] = {}
        for row in rows:
            if row[fixed] == value:
                series.setdefault((row["who"], row["save"]), {})[row[over]] = row["cpu_seconds"]
        found += [_fit(who, save, over, points) for (who, save), points in series.items() if len(points) > 2]
    return found


def _fit(who: str, save: str, over: str, points: dict[int, float]) -> Fit:
    sizes = [math.log(size) for size in points]
    costs = [math.log(cost) for cost in points.values()]
    mean_size, mean_cost = sum(sizes) / len(sizes), sum(costs) / len(costs)
    exponent = sum((size - mean_size) * (cost - mean_cost) for size, cost in zip(sizes, costs, strict=True)) / sum(
        (size - mean_size) ** 2 for size in sizes
    )
    unit = max(points)
    fit = Fit(
        who=who,
        save=save,
        over=over,
        exponent=exponent,
        seconds=math.exp(mean_cost + exponent * (math.log(unit) - mean_size)),
        unit=unit,
        points=len(points),
        largest_deviation=1.0,
    )
    deviations = [abs(math.log(cost / fit.at(size))) for size, cost in points.items()]
    return Fit(**{**fit.as_row(), "largest_deviation": math.exp(max(deviations))})
