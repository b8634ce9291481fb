"""The benchmark of frozen weights runs, and tells what was not written again."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.bench_frozen import device_of, main


def test_a_run_prints_both_tables(tmp_path: Path) -> None:
    told = tmp_path / "frozen.json"
    options = ["--gib", "0.1", "--frozen", "0.5", "--repeats", "1", "--directory", str(tmp_path), "--json", str(told)]
    assert main(options) == 0
    found = json.loads(told.read_text())
    assert [(row["frozen"], row["shares"]) for row in found["saves"]] == [("50%", "off"), ("50%", "on")]
    assert found["saves"][0]["unchanged_mib"] == 0
    assert all(row["cpu_seconds_per_gib"] > 0 for row in found["proofs"])


def test_a_file_system_without_a_device_has_no_counters() -> None:
    assert device_of("/proc") == (None, "proc")
