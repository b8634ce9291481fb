"""Measures how fast ours, torch and other packages write and read checkpoints, compared with the drive itself.

``python -m benchmarks.storage --path /data --gib 2 --rounds 3 --json storage.json --plot storage.svg``

All contenders take part in one run, one after the other in each round. Each save and load has its own process
(``drive.measurement`` says what counts). ``benchmarks/fastdisk.sh`` makes a drive that is faster than this machine's.
``--tune`` first prints what ``robust_dcp.storage.tune`` finds on the drive.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Container, Sequence
from typing import Any

import torch

from benchmarks.drive import measurement, probe
from benchmarks.drive.contenders import READERS, WRITERS, why_not
from benchmarks.drive.figures import RATIOS, Case, Row, rows_of
from benchmarks.drive.measurement import Figures, in_new_process
from benchmarks.drive.probe import Probe
from benchmarks.drive.shapes import SHAPE_NAMES, nbytes_of, ranks_of
from benchmarks.ranks import show

__all__ = ["main", "run"]

_GIB = 1 << 30
_SPARE = 1.3
"""A factor that leaves room for file headers, and for space that the file system has not freed yet."""

_COLUMNS = {
    "shape": "shape",
    "what": "what",
    "who": "who",
    "checkpoint": "checkpoint by",
    "to_probe": "x raw probe",
    "to_stock": "x stock",
    "to_stock_best": "x stock's best",
    "gib_per_second": "GiB/s",
    "cpu_seconds_per_gib": "CPU-s/GiB",
    "peak_mib": "extra MiB",
    "seconds": "s",
    "items": "items",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print. Then write JSON and a plot if asked to."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory(prefix="storage-", dir=options.path) as directory:
        if options.tune:
            from robust_dcp.storage import tune

            print(tune(directory), end="\n\n")
        found = run(
            directory,
            options.shapes,
            int(options.gib * _GIB),
            options.rounds,
            options.who,
            loads=not options.saves_only,
        )
    found["machine"]["drive"] = options.name or os.path.abspath(options.path)
    show(_COLUMNS, [_readable(row) for row in found["rows"]], None)
    for who, why in found["not_run"].items():
        print(f"not run: {who}: {why}")
    for who, note in found["notes"].items():
        print(f"{who}: {note}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    if options.plot:
        from benchmarks.drive.plot import draw

        draw([found], options.plot)


def run(
    directory: str,
    shapes: Sequence[str],
    nbytes: int,
    rounds: int,
    who: Sequence[str] = tuple(WRITERS),
    *,
    loads: bool = True,
) -> dict[str, Any]:
    """Make all measurements.

    Args:
        directory: an empty directory on the drive to measure. It is empty again afterwards.
        shapes: some of ``SHAPE_NAMES``.
        nbytes: the approximate size of each checkpoint. At most two of them exist at a time.
        rounds: how often each case is measured.
        who: some of ``WRITERS``.
        loads: whether to measure loads as well as saves.

    Returns:
        ``machine``, ``rows`` (see ``drive.figures``), ``not_run`` (who, or "reader < writer", to why) and ``notes``
        (who to what to know).

    Raises:
        OSError: there is not enough room.
    """
    free = shutil.disk_usage(directory).free
    if free < _SPARE * nbytes:
        raise OSError(f"{directory} has {free} bytes free, and a checkpoint takes {nbytes}: choose less with --gib")
    not_run: dict[str, str] = {}
    for name in who:
        not_run |= in_new_process(why_not, name, directory)
    writers = [name for name in who if name not in not_run]
    measured: dict[Case, list[Figures]] = defaultdict(list)
    order: list[Probe | str] = [*probe.PROBES, probe.ONE_BUFFER, *writers]
    for number in range(rounds):
        # Each round begins with another contender, so a drive that gets slower does so for all, also the raw probe.
        first = number * len(order) // rounds
        for shape in shapes:
            print(f"round {number + 1} of {rounds}: {shape}", file=sys.stderr)
            for each in order[first:] + order[:first]:
                if isinstance(each, Probe):
                    _measure_probe(measured, shape, nbytes, directory, each, loads=loads)
                else:
                    _measure_writer(measured, shape, nbytes, directory, each, not_run, loads=loads)
    return {
        "machine": _machine(directory, nbytes, rounds),
        "rows": rows_of(_in_order(measured)),
        "not_run": not_run,
        "notes": {name: WRITERS[name].note for name in writers if WRITERS[name].note},
    }


def _measure_probe(
    measured: dict[Case, list[Figures]], shape: str, nbytes: int, directory: str, chosen: Probe, *, loads: bool
) -> None:
    if chosen.one_buffer and not loads:
        return
    path = os.path.join(directory, "probe")
    nbytes = nbytes_of(shape, nbytes)
    try:
        saved = in_new_process(measurement.probe_save, chosen, nbytes, path)
        loaded = in_new_process(measurement.probe_load, chosen, nbytes, path) if loads else None
    finally:
        shutil.rmtree(path, ignore_errors=True)
    if not chosen.one_buffer:
        measured[Case(shape, "save", chosen.name)].append(saved)
    if loaded is not None:
        measured[Case(shape, "load", chosen.name)].append(loaded)


def _measure_writer(
    measured: dict[Case, list[Figures]],
    shape: str,
    nbytes: int,
    directory: str,
    writer: str,
    not_run: Container[str],
    *,
    loads: bool,
) -> None:
    has_ranks = ranks_of(shape) > 1
    if has_ranks and not WRITERS[writer].takes_ranks:
        return
    path = os.path.join(directory, "checkpoint")
    measure = measurement.measure
    try:
        measured[Case(shape, "save", writer)].append(measure(measurement.save, writer, shape, nbytes, path))
        for reader in WRITERS[writer].readers if loads else ():
            if f"{reader} < {writer}" in not_run or (has_ranks and not READERS[reader].takes_ranks):
                continue
            case = Case(shape, "load", reader, writer)
            measured[case].append(measure(measurement.load, reader, shape, nbytes, path))
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _in_order(measured: dict[Case, list[Figures]]) -> dict[Case, list[Figures]]:
    """Sort by shape, saves before loads, and then probes before the contenders in their listed order."""
    probes, shapes, writers = (
        [each.name for each in (*probe.PROBES, probe.ONE_BUFFER)],
        list(SHAPE_NAMES),
        list(WRITERS),
    )

    def place(case: Case) -> tuple[int, ...]:
        is_load = case.what == "load"
        names = probes + (list(READERS) if is_load else writers)
        return (
            shapes.index(case.shape),
            int(is_load),
            names.index(case.who),
            writers.index(case.checkpoint) if case.checkpoint else -1,
        )

    return {case: measured[case] for case in sorted(measured, key=place)}


def _machine(directory: str, nbytes: int, rounds: int) -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "direct_io": probe.is_direct(directory),
        "nbytes": nbytes,
        "rounds": rounds,
    }


def _readable(row: Row) -> Row:
    return {
        **row,
        **{key: "" if row[key] is None else row[key] for key in RATIOS},
        "peak_mib": round(row["peak_nbytes"] / (1 << 20)),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the drive (default: %(default)s)")
    parser.add_argument("--name", help="what to call the drive in JSON and plot (default: the path)")
    parser.add_argument("--gib", type=float, default=2.0, help="of each checkpoint (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--shapes", default=",".join(SHAPE_NAMES), help="default: %(default)s")
    parser.add_argument("--who", help="a part of the names of those to measure; several with commas (default: all)")
    parser.add_argument("--saves-only", action="store_true", help="no loads")
    parser.add_argument("--tune", action="store_true", help="print what robust_dcp.storage.tune finds, first")
    parser.add_argument("--json", help="write all figures there as well")
    parser.add_argument("--plot", help="draw the rates there (.svg or .png)")
    options = parser.parse_args(arguments)
    options.shapes = options.shapes.split(",")
    if not set(options.shapes) <= set(SHAPE_NAMES):
        parser.error(f"{sorted(set(options.shapes) - set(SHAPE_NAMES))} is none of {list(SHAPE_NAMES)}")
    parts = options.who.split(",") if options.who else [""]
    options.who = [name for name in WRITERS if any(part in name for part in parts)]
    if not options.who or options.rounds < 1:
        parser.error(f"nothing to measure: --who takes parts of {', '.join(WRITERS)}; --rounds at least 1")
    return options


if __name__ == "__main__":
    main()
