"""Measures one coordinator in its own process, for a kind of model and a number of ranks and items.

Owns the rows that ``planning`` prints. Other processes make the payloads of the other ranks beforehand.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.measuring import Row, in_new_process
from benchmarks.simulation.others import SaveName
from benchmarks.simulation.ours import OurCoordinator, SimulatedSave
from benchmarks.simulation.payloads import Payloads
from benchmarks.simulation.stock import StockCoordinator

__all__ = ["SAVES", "Case", "Who", "measure"]

Who = Literal["ours", "stock"]
SAVES: tuple[SaveName, ...] = ("first", "repeated", "change")

_MAX_ROUNDS = 5
_MAX_ROUNDS_SECONDS = 10.0
"""A repeated save is measured again until this much time has passed. Its row is the median by CPU time."""


@dataclass(frozen=True)
class Case:
    """Several saves by one coordinator, one after the other.

    Attributes:
        payloads: the payloads of the other ranks.
        who: the coordinator: ours or stock's.
        saves: the saves to measure.
        collects_garbage: whether Python's cyclic garbage collector runs, as it does for users.
    """

    payloads: Payloads
    who: Who
    saves: tuple[SaveName, ...] = SAVES
    collects_garbage: bool = True


def measure(case: Case) -> list[Row]:
    """Measure each save of the case in new processes, and return a row for each.

    Raises:
        BrokenProcessPool: a process ended without a result. Its output says why.
    """
    if case.who == "ours":
        rows: list[Row] = in_new_process(_run, case, case.saves)
        return rows
    # Stock's first save is measured without a plan cache, which is stock's default. Its other saves have the cache.
    cached = tuple(save for save in case.saves if save != "first")
    rows = in_new_process(_run, case, ("first",)) if "first" in case.saves else []
    return rows + (in_new_process(_run, case, cached) if cached else [])


def _run(case: Case, saves: Sequence[SaveName]) -> list[Row]:
    if not case.collects_garbage:
        gc.disable()
    coordinator: OurCoordinator | StockCoordinator
    if case.who == "ours":
        coordinator = OurCoordinator(case.payloads)
    else:
        coordinator = StockCoordinator(case.payloads, caching="first" not in saves)
    with tempfile.TemporaryDirectory(dir=case.payloads.directory) as directory:
        if "first" not in saves:
            _save(coordinator, "first", directory)
        return [_row(case, save, _median(coordinator, save, directory)) for save in saves]


def _median(coordinator: OurCoordinator | StockCoordinator, name: SaveName, directory: str) -> SimulatedSave:
    rounds = [_save(coordinator, name, directory)]
    while (
        name == "repeated"
        and len(rounds) < _MAX_ROUNDS
        and sum(each.watch.total.wall_seconds for each in rounds) < _MAX_ROUNDS_SECONDS
    ):
        rounds.append(_save(coordinator, name, directory))
    middle = statistics.median_low(each.watch.total.cpu_seconds for each in rounds)
    return next(each for each in rounds if each.watch.total.cpu_seconds == middle)


def _save(coordinator: OurCoordinator | StockCoordinator, name: SaveName, directory: str) -> SimulatedSave:
    checkpoint = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=directory))
    return coordinator.save(name, str(checkpoint))


def _row(case: Case, name: SaveName, save: SimulatedSave) -> Row:
    payloads, total = case.payloads, save.watch.total
    return {
        "kind": payloads.kind,
        "ranks": payloads.ranks,
        "items_each": payloads.items,
        "items": payloads.n_items,
        "who": case.who,
        "garbage_collection": case.collects_garbage,
        "save": name,
        "outcome": save.outcome,
        "cpu_seconds": total.cpu_seconds,
        "wall_seconds": total.wall_seconds,
        "peak_nbytes": save.watch.peak_nbytes,
        "sent_nbytes": save.sent_nbytes,
        "arrived_nbytes": save.arrived_nbytes,
        "returned_nbytes": save.returned_nbytes,
        "merging_seconds": save.merging_seconds,
        "metadata_nbytes": save.metadata_nbytes,
        "index_nbytes": save.index_nbytes,
        "written": save.n_written,
        "steps": {
            step: {"cpu_seconds": cost.cpu_seconds, "wall_seconds": cost.wall_seconds}
            for step, cost in save.watch.laps.items()
        },
    }
