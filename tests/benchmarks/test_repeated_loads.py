"""The benchmark of repeated loads measures real ranks, and its ratios are of the same run."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bench_repeated_loads import BOUND, LOADS, Sample, measure, rows_of
from benchmarks.drive.contenders import OURS
from benchmarks.ranks import run


def test_each_load_is_measured_beside_stocks_and_beside_a_copy(tmp_path: Path) -> None:
    rows = rows_of("replicas", run(2, measure, str(tmp_path), "replicas", 4 << 20, 1))

    assert {(row["who"], row["load"]) for row in rows} == {
        *((who, load) for who in (OURS, "stock") for load in LOADS),
        (BOUND, "warm"),
    }
    for row in rows:
        assert row["seconds"] > 0
        assert row["cpu_seconds_per_gib"] > 0
        assert row["gib"] == 4 / 1024
        assert row["who"] != "stock" or row["to_stock"] == 1.0


def test_seconds_are_those_of_the_slowest_rank_and_cpu_seconds_of_all() -> None:
    ranks = [
        (1 << 29, {(OURS, "warm"): [Sample(1.0, 2.0, 3 << 30)], ("stock", "warm"): [Sample(4.0, 9.0, 0)]}),
        (1 << 29, {(OURS, "warm"): [Sample(2.0, 1.0, 1 << 30)], ("stock", "warm"): [Sample(3.0, 9.0, 0)]}),
    ]

    ours, stock = rows_of("moe", ranks)

    assert (ours["seconds"], ours["to_stock"], ours["cpu_seconds_per_gib"], ours["device_gib"]) == (2.0, 2.0, 3.0, 4.0)
    assert (stock["seconds"], stock["to_stock"]) == (4.0, 1.0)
