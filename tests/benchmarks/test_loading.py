"""The benchmark of load planning compares like with like: all contenders plan the same reads of one checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import loading


def test_contenders_plan_the_same_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "loading.json"
    options = ["--ranks", "4", "--items", "9", "--chunks", "8", "--json", str(told), "--directory", str(tmp_path)]
    options += ["--cases", "same,reshard 1"]
    monkeypatch.setattr(sys, "argv", ["loading", *options])
    loading.main()
    found = json.loads(told.read_text())
    reads = {(row["case"], row["who"]): row["reads"] for row in found["costs"]}
    for case in ("same", "reshard 1"):
        assert len({reads[case, who] for who in ("ours", "ours, no index", "stock")}) == 1
    assert reads["same", "ours"] == 10
    assert reads["reshard 1", "ours"] == 8 * 64
    assert [row["case"] for row in found["ratios"]] == ["same", "reshard 1"]
    assert "How many times less" in capsys.readouterr().out
