"""`robust-dcp copy` and `robust-dcp report` do what the functions below them do, and say it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import robust_dcp
from tests.cli.checkpoints import KINDS
from tests.cli.commands import Shell


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_any_checkpoint_is_equal_and_made_once(
    kind: str, originals: Path, tmp_path: Path, shell: Shell
) -> None:
    first = shell("copy", originals / kind, f"file://{tmp_path}/copied", "--json")
    assert first.code == 0 and first.json["files"] > 0 and first.json["skipped_files"] == 0
    assert shell("diff", originals / kind, tmp_path / "copied", "--values").code == 0
    assert shell("verify", tmp_path / "copied").code == 0
    assert shell("copy", originals / kind, tmp_path / "copied", "--json").json["files"] == 0


@pytest.mark.parametrize(
    ("target", "said"), [("there/inside", "to a place in itself"), ("nosuch://x/y", "Protocol not known: nosuch")]
)
def test_a_target_that_makes_no_sense_is_refused(
    target: str, said: str, copy_of: Callable[[str], Path], tmp_path: Path, shell: Shell
) -> None:
    copy_of("ours").rename(tmp_path / "there")
    ended = shell("copy", tmp_path / "there", target if "://" in target else tmp_path / target)
    assert ended.code == 2 and said in ended.err
    assert not (tmp_path / "there" / "inside").exists()


@pytest.mark.parametrize("rate", ["500MB", "1.5GiB", "100000000", "200000 k", "300MB/s"])
def test_a_rate_is_written_as_people_do(rate: str, originals: Path, tmp_path: Path, shell: Shell) -> None:
    assert shell("copy", originals / "ours", tmp_path / "copied", "--limit", rate).code == 0


@pytest.mark.parametrize("rate", ["fast", "0", "-1MB", "1XB", ""])
def test_a_rate_that_is_none_is_refused(rate: str, originals: Path, tmp_path: Path, shell: Shell) -> None:
    ended = shell("copy", originals / "ours", tmp_path / "copied", f"--limit={rate}")
    assert ended.code == 2 and "is no size" in ended.err


def test_a_copy_says_how_much_it_has_sent(originals: Path, shell: Shell) -> None:
    ended = shell("copy", originals / "ours", "memory://cli/step_1")
    assert ended.code == 0 and "0 files, 0 B were there already" in ended.out
    again = shell("copy", originals / "ours", "memory://cli/step_1")
    assert again.code == 0 and "Sent 0 files" in again.out


def test_the_page_of_a_run_lists_its_checkpoints(tmp_path: Path, shell: Shell) -> None:
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


def test_a_page_that_cannot_be_made_is_an_error_and_leaves_nothing(tmp_path: Path, shell: Shell) -> None:
    ended = shell("report", tmp_path)
    assert ended.code == 2 and str(tmp_path) in ended.err
    robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "run")
    (tmp_path / "taken").mkdir()
    ended = shell("report", tmp_path / "run", "--output", tmp_path / "taken")
    assert ended.code == 2 and "cannot be written" in ended.err
    assert {path.name for path in tmp_path.iterdir()} == {"run", "taken"}
