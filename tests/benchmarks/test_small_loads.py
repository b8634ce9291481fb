"""The benchmark of small loads compares whole loads of the same tensors."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import bench_small_loads


def test_all_cases_are_loaded_by_both(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--tensors", "20", "--bytes", "64", "--rounds", "1"]
    assert bench_small_loads.main([*sizes, "--directory", str(tmp_path), "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [row["case"].split()[1] for row in rows] == ["plain", "plain", "DTensor"]
    assert all(row[f"{who}_us"] > 0 for row in rows for who in ("ours", "stock"))
