"""The benchmark of slices runs, and what it reads is verified."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.bench_slices import main


def test_a_run_prints_both_tables(tmp_path: Path) -> None:
    told = tmp_path / "slices.json"
    options = ["--gib", "0.1", "--repeats", "1", "--directory", str(tmp_path), "--json", str(told)]
    assert main(options) == 0
    rows = json.loads(told.read_text())
    assert [row["case"][:8] for row in rows] == ["Shard(0)"] * 3 + ["Shard(1)"]
    assert all(row["unverified"] == 0 and row["bytes"] < 1.05 for row in rows if "Shard(0)" in row["case"])
