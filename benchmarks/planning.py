"""Measures what a save costs the coordinator of many ranks, ours and stock's. The other ranks are virtual.

Run it for a table: ``python -m benchmarks.planning --ranks 128 --items 5000 --json planning.json``. The real code of
both coordinators runs on the same items, each in its own process; ``coordinators`` says what is measured. CPU seconds
are user and system time, of a repeated save the median. Memory is the peak above what the process had before the
coordinator's work began. Stock takes part as long as the items of all ranks are not too many. The last line is what
each other rank does for ``.metadata`` and the index in a save.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.coordinators import SAVES, OurCoordinator, SaveName, StockCoordinator
from benchmarks.measuring import Row, Stopwatch, in_new_process, show, with_ratios, write_json
from benchmarks.virtual_ranks import Payloads, prepare

__all__ = ["main"]

_MAX_ROUNDS, _MAX_ROUNDS_SECONDS = 5, 10.0  # a repeated save is measured again until one of them is reached

_COLUMNS = {
    "ranks": "ranks",
    "items_each": "items each",
    "save": "save",
    "who": "who",
    "cpu_ratio": "CPU, stock / this",
    "peak_ratio": "memory, stock / this",
    "cpu_seconds": "CPU s",
    "wall_seconds": "wall s",
    "peak_mib": "peak MiB",
    "written_mib": "written MiB",
}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--items", type=int, default=2000, help="of each rank (default: 2000)")
    parser.add_argument("--stock-up-to", type=int, default=1 << 18, help="items of all ranks (default: %(default)s)")
    parser.add_argument("--json", help="write all figures there as well")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for ranks in arguments.ranks:
        rows += _measure(ranks, arguments.items, has_stock=ranks * arguments.items <= arguments.stock_up_to)
    with_ratios(rows, ("ranks", "items_each", "save"), {"cpu_ratio": "cpu_seconds", "peak_ratio": "peak_mib"})
    show(_COLUMNS, rows)
    write_json(arguments.json, rows)


def _measure(ranks: int, items: int, *, has_stock: bool) -> list[Row]:
    print(f"{ranks} ranks x {items} items ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="planning-") as directory:
        payloads = Payloads(Path(directory), ranks, items)
        prepare(payloads, stock=has_stock)
        rows: list[Row] = in_new_process(_run, payloads, "ours", SAVES)
        if has_stock:  # its first save is measured without a plan cache, which is its default
            rows += in_new_process(_run, payloads, "stock", SAVES[:1]) + in_new_process(
                _run, payloads, "stock", SAVES[1:]
            )
    return rows


def _run(payloads: Payloads, who: str, saves: Sequence[SaveName]) -> list[Row]:
    coordinator = (
        OurCoordinator(payloads) if who == "ours" else StockCoordinator(payloads, caching="first" not in saves)
    )

    def save(name: SaveName) -> Stopwatch:
        return coordinator.save(name, tempfile.mkdtemp(dir=payloads.directory))

    if "first" not in saves:
        save("first")
    rows = []
    for name in saves:
        rounds = [save(name)]
        while name == "repeated" and len(rounds) < _MAX_ROUNDS:
            if sum(each.wall_seconds for each in rounds) > _MAX_ROUNDS_SECONDS:
                break
            rounds.append(save(name))
        watch = sorted(rounds, key=lambda each: each.cpu_seconds)[(len(rounds) - 1) // 2]
        row = {"ranks": payloads.ranks, "items_each": payloads.n_items, "save": name, "who": who, **watch.figures()}
        if isinstance(coordinator, OurCoordinator):
            row["written_mib"] = coordinator.written_nbytes / (1 << 20)
        rows.append(row)
    if isinstance(coordinator, OurCoordinator):
        figures = coordinator.piece_of_another().figures()
        rows.append(rows[-1] | figures | {"save": "another rank's piece", "written_mib": 0.0})
    return rows


if __name__ == "__main__":
    main()
