"""Plots the coordinator's cost against the number of ranks, for first and repeated saves of ours and stock's.

Run it on earlier figures: ``python -m benchmarks.simulation.plot planning.json planning.svg``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.simulation.cases import Row
from benchmarks.simulation.growth import RANKS, Fit, fits_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_COLOURS = {"ours": "#0b6e4f", "stock": "#b3541e"}
_NAMES = {"ours": "robust_dcp", "stock": "torch.distributed.checkpoint"}
_MARKERS = {"first": "o", "repeated": "s"}


def draw(rows: Sequence[Row], path: str) -> None:
    """Draw CPU seconds against ranks into ``path`` (``.svg`` or ``.png``).

    Args:
        rows: the rows of ``cases`` for first and repeated saves. Those with the most common number of items count.

    Raises:
        ModuleNotFoundError: without matplotlib, of the extra ``bench``.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "planning"  # the same figures give the same file
    fits = {(fit.who, fit.save): fit for fit in fits_of(rows) if fit.over == "ranks"}
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for (who, save), fit in fits.items():
        if save in _MARKERS:
            _draw_series(axes, rows, who, save, fit)
    for save, ranks in (("first", 128), ("repeated", 1024), ("repeated", 128), ("first", 1024)):
        if {("ours", save), ("stock", save)} <= fits.keys():
            _draw_ratio(axes, rows, save, ranks)
    axes.set_title(f"What a save costs its coordinator: {_items_each(rows):,} tensors, cut over all ranks", fontsize=11)
    axes.set(
        xlabel="ranks",
        ylabel="CPU seconds on the coordinator",
        xscale="log",
        yscale="log",
    )
    axes.set_xticks(ticks := [2, 4, 8, *RANKS], [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(1.6, 1.9 * RANKS[-1])
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    pyplot.close(figure)


def _draw_series(axes: Axes, rows: Sequence[Row], who: str, save: str, fit: Fit) -> None:
    points = sorted(_points(rows, who, save).items())
    label = f"{_NAMES[who]}, {save} save: ranks^{fit.exponent:.2f}"
    axes.plot(
        [ranks for ranks, _ in points],
        [seconds for _, seconds in points],
        color=_COLOURS[who],
        marker=_MARKERS[save],
        markerfacecolor=_COLOURS[who] if save == "first" else "white",
        label=label,
    )
    if points[-1][0] < RANKS[-1]:
        axes.plot(
            [points[-1][0], RANKS[-1]],
            [points[-1][1], _extrapolated(dict(points), RANKS[-1])],
            color=_COLOURS[who],
            linestyle=(0, (4, 3)),
            linewidth=1,
            label="in proportion to the ranks: not measured" if save == "repeated" else None,
        )


def _extrapolated(points: dict[int, float], ranks: int) -> float:
    """Extrapolate in proportion from the largest measured size. The fitted exponent of small sizes would give more."""
    last = max(points)
    return points[last] * ranks / last


def _draw_ratio(axes: Axes, rows: Sequence[Row], save: str, ranks: int) -> None:
    """Draw an arrow from ours to stock's, and say how many times less ours takes."""
    ours, measured = _points(rows, "ours", save).get(ranks), _points(rows, "stock", save)
    if ours is None:
        return
    is_measured = ranks in measured
    stock = measured[ranks] if is_measured else _extrapolated(measured, ranks)
    at = ranks * (0.92 if save == "first" else 1.09)
    axes.annotate("", (at, ours), (at, stock), arrowprops={"arrowstyle": "<->", "color": "#888888", "lw": 0.8})
    axes.annotate(
        f"{'' if is_measured else '~'}{stock / ours:,.0f}x",
        (at, ours**0.4 * stock**0.6),
        textcoords="offset points",
        xytext=(-5 if save == "first" else 5, 0),
        ha="right" if save == "first" else "left",
        fontsize=9,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
    )


def _points(rows: Sequence[Row], who: str, save: str) -> dict[int, float]:
    items = _items_each(rows)
    return {
        row["ranks"]: row["cpu_seconds"]
        for row in rows
        if (row["who"], row["save"], row["items_each"]) == (who, save, items)
    }


def _items_each(rows: Sequence[Row]) -> int:
    sizes = [row["items_each"] for row in rows]
    return int(max(sizes, key=sizes.count))


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        draw(json.load(file)["costs"], sys.argv[2])
