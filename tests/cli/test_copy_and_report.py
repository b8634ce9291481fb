"""`robust-dcp copy` and `robust-dcp report` do what the functions below them do, and say it."""

from __future__ import annotations

from pathlib import Path

import torch

import robust_dcp
from tests.cli.commands import shell


def test_a_rate_is_written_as_people_do(originals: Path, tmp_path: Path) -> None:
    for rate, code in {"500MB": 0, "1.5GiB": 0, "200000 k": 0, "300MB/s": 0, "fast": 2, "0": 2, "1XB": 2}.items():
        ended = shell("copy", originals / "ours", tmp_path / "copied", f"--limit={rate}")
        assert ended.code == code and ("is no size" in ended.err) == (code == 2)


def test_the_page_of_a_run_lists_its_checkpoints(tmp_path: Path) -> None:
    manager = robust_dcp.CheckpointManager(tmp_path / "run")
    for step in (10, 20):
        manager.save(step, {"model": {"w": torch.ones(9) * step}})
    page = tmp_path / "page.html"
    ended = shell("report", tmp_path / "run", "--output", page)
    assert (ended.code, ended.out) == (0, f"The page is {page}\n")
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "step_10" in text and "http://" not in text.partition("<body")[0]
    found = shell("report", tmp_path / "run", "--json").json
    assert [(each["name"], each["plan"]["outcome"]) for each in found["reports"]][1] == ("step_20", "reused")


def test_a_page_that_cannot_be_made_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    ended = shell("report", tmp_path)
    assert ended.code == 2 and str(tmp_path) in ended.err
    robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "run")
    (tmp_path / "taken").mkdir()
    ended = shell("report", tmp_path / "run", "--output", tmp_path / "taken")
    assert ended.code == 2 and str(tmp_path / "taken") in ended.err
    assert {path.name for path in tmp_path.iterdir()} == {"run", "taken"}
