"""Plots the rates of ours, torch and other packages on drives, beside the raw probe.

Run it on earlier figures of one drive or several:
``python -m benchmarks.drive.plot disk.json fast.json storage-speed.svg``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.drive.contenders import OURS
from benchmarks.drive.figures import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_COLOURS = {"ours": "#0b6e4f", "torch": "#b3541e", "other": "#8a8a8a"}
_TITLES = {"large": "few large tensors", "small": "many small tensors", "moe": "mixed, mixture of experts"}


def draw(runs: Sequence[dict[str, Any]], path: str) -> None:
    """Draw GiB/s as bars into ``path`` (``.svg`` or ``.png``). Each run has a row, with saves and loads of each shape.

    Args:
        runs: what ``benchmarks.storage`` wrote as JSON.

    Raises:
        ModuleNotFoundError: without matplotlib, of the extra ``bench``.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "storage"  # the same figures give the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    panels = [
        (run, shape, what)
        for run in runs
        for shape in dict.fromkeys(row["shape"] for row in run["rows"])
        for what in ("save", "load")
    ]
    columns = 2
    lines = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(lines, columns, figsize=(14, 3.3 * lines), layout="constrained", squeeze=False)
    for axes, (run, shape, what) in zip(grid.flat, panels, strict=True):
        _draw_rates(axes, [row for row in run["rows"] if (row["shape"], row["what"]) == (shape, what)])
        axes.set_title(f"{run['machine']['drive']}: {what}, {_TITLES[shape]}", fontsize=10)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    pyplot.close(figure)


def _draw_rates(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw bars with the rate and the CPU time for each GiB, and a line for the fastest raw probe."""
    probes = [row for row in rows if _is_probe(row)]
    others = [row for row in rows if not _is_probe(row)]
    fastest = max(row["gib_per_second"] for row in probes)
    bars = axes.barh(
        [_label(row) for row in others],
        [row["gib_per_second"] for row in others],
        color=[_COLOURS[_kind(row["who"])] for row in others],
    )
    axes.bar_label(
        bars,
        [f"{row['gib_per_second']:.2f} GiB/s, {row['cpu_seconds_per_gib']:.2f} CPU-s/GiB" for row in others],
        fontsize=7,
        padding=3,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
    )
    axes.axvline(fastest, color="#333333", linestyle=(0, (4, 3)), linewidth=1, zorder=0)
    axes.text(1.01 * fastest, len(others) - 0.6, f"raw probe: {fastest:.2f}", fontsize=7, va="bottom")
    axes.set_xlim(0, 1.35 * max(fastest, *(row["gib_per_second"] for row in others)))
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _is_probe(row: Row) -> bool:
    return str(row["who"]).startswith("raw probe")


def _label(row: Row) -> str:
    who, checkpoint = str(row["who"]), str(row["checkpoint"])
    if not checkpoint or _kind(who) == _kind(checkpoint):
        return who
    return f"{who}, {'robust_dcp' if _kind(checkpoint) == 'ours' else 'torch'}'s files"


def _kind(who: str) -> str:
    if who.startswith(OURS):
        return "ours"
    return "torch" if who.startswith("torch ") else "other"


if __name__ == "__main__":
    runs = []
    for name in sys.argv[1:-1]:
        with open(name, encoding="utf-8") as file:
            runs.append(json.load(file))
    draw(runs, sys.argv[-1])
