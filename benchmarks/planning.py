"""Measures what a save costs the coordinator of many ranks, ours and stock's. The other ranks are virtual.

Run it for a table: ``python -m benchmarks.planning --ranks 128 --items 5000 --kinds fsdp2 --json planning.json``. The
real code of both coordinators runs on the same items. ``simulation.ours`` and ``simulation.stock`` say step by step
what is measured. CPU seconds are user and system time. "merging" is the CPU time of other ranks that merge messages on
the way up the tree, while our coordinator waits. Memory is the peak above what the process had before the coordinator's
work began. ``--growth`` measures several numbers of ranks and items, and ``--plot`` draws the result.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ranks import show
from benchmarks.simulation.cases import SAVES, Case, Row, Who, measure
from benchmarks.simulation.growth import GROWTH_SIZES, fits_of, stock_sizes
from benchmarks.simulation.payloads import prepare
from benchmarks.virtual_ranks import KINDS

__all__ = ["main"]

_MIB = 1 << 20

_RATIOS = {
    "kind": "kind",
    "ranks": "ranks",
    "items_each": "items each",
    "save": "save",
    "cpu_ratio": "CPU time",
    "wall_ratio": "wall time",
    "peak_ratio": "peak memory",
    "arrived_ratio": "bytes in",
    "metadata_ratio": "bytes of .metadata",
}
_COSTS = {
    "kind": "kind",
    "ranks": "ranks",
    "items_each": "items each",
    "save": "save",
    "who": "who",
    "cpu_seconds": "CPU s",
    "wall_seconds": "wall s",
    "merging_seconds": "merging, s",
    "peak_mib": "peak MiB",
    "sent_per_item": "sent B/item",
    "arrived_per_item": "arrived B/item",
    "returned_per_item": "returned B/item",
    "metadata_nbytes": ".metadata B",
    "index_nbytes": "index B",
    "written": "written",
}
_FITS = {
    "who": "who",
    "save": "save",
    "over": "over",
    "exponent": "exponent",
    "unit": "largest",
    "seconds": "CPU s there",
    "points": "points",
    "largest_deviation": "off by at most, factor",
}


def main() -> None:
    """Measure, and print the ratios and then the figures of each coordinator."""
    arguments = _arguments()
    rows: list[Row] = []
    for kind in arguments.kinds:
        for size, who in _sizes(arguments).items():
            rows += _measure(kind, size, who, arguments)
            if arguments.json:  # after each size, because a run takes minutes
                _write(arguments.json, rows)
    ratios = _ratios(rows)
    if ratios:
        print("How many times less ours takes than stock's coordinator:")
        show(_RATIOS, ratios, None)
        print()
    show(_COSTS, [_readable(row) for row in rows], None)
    if arguments.growth:
        print("\nCPU time grows with the power of ranks and of items of each:")
        show(_FITS, [fit.as_row() for fit in fits_of(rows)], None)
    if arguments.plot:
        from benchmarks.simulation.plot import draw

        draw(rows, arguments.plot)


def _write(path: str, rows: Sequence[Row]) -> None:
    growth = [fit.as_row() for kind in KINDS for fit in fits_of([row for row in rows if row["kind"] == kind])]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"ratios": _ratios(rows), "costs": rows, "growth": growth}, file, indent=1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=16, help="a power of two (default: %(default)s)")
    parser.add_argument("--items", type=int, default=2000, help="of each rank (default: %(default)s)")
    parser.add_argument("--kinds", default=None, help=f"some of {','.join(KINDS)} (default: all; fsdp2 for --growth)")
    parser.add_argument("--saves", default=",".join(SAVES), help="some of %(default)s (default: all)")
    parser.add_argument("--no-stock", action="store_true", help="ours alone")
    parser.add_argument("--gc-off", action="store_true", help="without Python's cyclic garbage collector")
    parser.add_argument("--growth", action="store_true", help="over ranks and items, instead of --ranks and --items")
    parser.add_argument(
        "--stock-up-to", type=int, default=32, help="ranks of stock's coordinator with --growth (default: %(default)s)"
    )
    parser.add_argument("--directory", help="where payloads and checkpoints lie for the time being")
    parser.add_argument("--json", help="write all figures there as well")
    parser.add_argument("--plot", help="draw the cost against ranks there (.svg or .png; needs --growth)")
    arguments = parser.parse_args()
    arguments.kinds = (arguments.kinds or ("fsdp2" if arguments.growth else ",".join(KINDS))).split(",")
    arguments.saves = tuple(arguments.saves.split(","))
    for chosen, known in ((arguments.kinds, KINDS), (arguments.saves, SAVES)):
        if not set(chosen) <= set(known):
            parser.error(f"{sorted(set(chosen) - set(known))} is none of {list(known)}")
    if arguments.growth and len(arguments.kinds) > 1:
        parser.error("--growth takes one kind at a time")
    if arguments.plot and not arguments.growth:
        parser.error("--plot needs --growth")
    return arguments


def _sizes(arguments: argparse.Namespace) -> dict[tuple[int, int], list[Who]]:
    """The coordinators to measure, by (ranks, items of each)."""
    if not arguments.growth:
        return {(arguments.ranks, arguments.items): ["ours"] if arguments.no_stock else ["ours", "stock"]}
    found: dict[tuple[int, int], list[Who]] = {size: ["ours"] for size in GROWTH_SIZES}
    for size in () if arguments.no_stock else stock_sizes(arguments.stock_up_to):
        found.setdefault(size, []).append("stock")
    return dict(sorted(found.items()))


def _measure(kind: str, size: tuple[int, int], who: Sequence[Who], arguments: argparse.Namespace) -> list[Row]:
    ranks, items = size
    print(f"{kind}: {ranks} ranks x {items} items, {' and '.join(who)} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="planning-", dir=arguments.directory) as directory:
        payloads = prepare(Path(directory, "ranks"), kind, ranks, items, stock="stock" in who)
        cases = [Case(payloads, each, arguments.saves, collects_garbage=not arguments.gc_off) for each in who]
        return [row for case in cases for row in measure(case)]


def _ratios(rows: Sequence[Row]) -> list[Row]:
    """The ratios for each size and save in which both were measured."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in ("kind", "ranks", "items_each", "save")), {})[row["who"]] = row
    return [
        {
            **{key: both["ours"][key] for key in ("kind", "ranks", "items_each", "save")},
            **{
                f"{name}_ratio": _ratio(both["stock"][key], both["ours"][key])
                for name, key in (
                    ("cpu", "cpu_seconds"),
                    ("wall", "wall_seconds"),
                    ("peak", "peak_nbytes"),
                    ("arrived", "arrived_nbytes"),
                    ("metadata", "metadata_nbytes"),
                )
            },
        }
        for both in found.values()
        if both.keys() == {"ours", "stock"}
    ]


def _ratio(stock: float, ours: float) -> float:
    return stock / ours if ours else float("inf")


def _readable(row: Row) -> Row:
    return {
        **row,
        "peak_mib": row["peak_nbytes"] / _MIB,
        **{f"{name}_per_item": row[f"{name}_nbytes"] / row["items"] for name in ("sent", "arrived", "returned")},
    }


if __name__ == "__main__":
    main()
