"""Measures what a save costs the coordinator of many ranks, ours and stock's. The other ranks are virtual.

Run it for a table: ``python -m benchmarks.planning --ranks 128 --items 5000 --kinds fsdp2 --json planning.json``. The
real code of both coordinators runs on the same items. ``simulation.ours`` and ``simulation.stock`` say step by step
what is measured. CPU seconds are user and system time. "merging" is the CPU time of other ranks that merge messages on
the way up the tree, while our coordinator waits. Memory is the peak above what the process had before the coordinator's
work began. Several numbers of ranks and of items can be given. Stock takes part as long as the items are not too many.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import Row, show, write_json
from benchmarks.simulation.cases import SAVES, Case, Who, measure
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


def main() -> None:
    """Measure, and print the ratios and then the figures of each coordinator."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16], help="powers of two (default: 16)")
    parser.add_argument("--items", type=int, nargs="+", default=[2000], help="of each rank (default: 2000)")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--saves", nargs="+", default=SAVES, choices=SAVES)
    parser.add_argument("--stock-up-to", type=int, default=1 << 18, help="items of all ranks (default: %(default)s)")
    parser.add_argument("--gc-off", action="store_true", help="without Python's cyclic garbage collector")
    parser.add_argument("--directory", help="where payloads and checkpoints lie for the time being")
    parser.add_argument("--json", help="write all figures there as well")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for kind, ranks, items in itertools.product(arguments.kinds, arguments.ranks, arguments.items):
        rows += _measure(kind, ranks, items, arguments)
        write_json(arguments.json, {"ratios": _ratios(rows), "costs": rows})  # each time, because a run takes minutes
    ratios = _ratios(rows)
    if ratios:
        print("How many times less ours takes than stock's coordinator:")
        show(_RATIOS, ratios)
        print()
    show(_COSTS, [_readable(row) for row in rows])


def _measure(kind: str, ranks: int, items: int, arguments: argparse.Namespace) -> list[Row]:
    who: list[Who] = ["ours", "stock"] if ranks * items <= arguments.stock_up_to else ["ours"]
    print(f"{kind}: {ranks} ranks x {items} items, {' and '.join(who)} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="planning-", dir=arguments.directory) as directory:
        payloads = prepare(Path(directory, "ranks"), kind, ranks, items, stock="stock" in who)
        cases = [Case(payloads, each, tuple(arguments.saves), collects_garbage=not arguments.gc_off) for each in who]
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
