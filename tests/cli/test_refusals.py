"""What commands say where they may not read or write, and of options and roots that hold nothing to do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Shell


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Paths that this user may not use. Root may use all of them, and tests may run as root."""
    paths: set[str] = set()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in paths and access(path, mode))
    return paths


def test_what_may_not_be_read_is_told_with_what_to_check(
    originals: Path, tmp_path: Path, denied: set[str], shell: Shell
) -> None:
    denied |= {str(originals / "ours"), str(tmp_path)}
    for words in (("inspect", originals / "ours"), ("ls", tmp_path), ("prune", tmp_path, "--keep-last", 1)):
        ended = shell(*words)
        assert ended.code == 2 and f"{words[1]} cannot be read: check who owns the directory" in ended.err


def test_bench_needs_a_directory_that_it_may_write_to(tmp_path: Path, denied: set[str], shell: Shell) -> None:
    (tmp_path / "file").touch()
    ended = shell("bench", tmp_path / "file/step_1")
    assert ended.code == 2 and f"{tmp_path}/file is not a directory" in ended.err
    denied.add(str(tmp_path))
    ended = shell("bench", tmp_path / "not/yet")
    assert ended.code == 2 and f"{tmp_path} cannot be written to: check who owns it" in ended.err


def test_options_reach_the_store_and_a_copy_says_how_much_it_has_sent(originals: Path, shell: Shell) -> None:
    ended = shell("copy", originals / "ours", "memory://cli/step_1", "--target-option", "skip_instance_cache=true")
    assert ended.code == 0 and "0 files, 0 B were there already" in ended.out
    again = shell("copy", originals / "ours", "memory://cli/step_1")
    assert again.code == 0 and "Sent 0 files" in again.out


class TestPrune:
    @pytest.fixture
    def run(self, originals: Path, tmp_path: Path) -> Path:
        for step in (1, 2):
            shutil.copytree(originals / "ours", tmp_path / f"step_{step}")
        return tmp_path

    def test_where_nothing_is_to_be_removed_it_does_not_ask(self, run: Path, shell: Shell) -> None:
        ended = shell("prune", run, "--keep-last", 2)
        assert ended.code == 0 and "0 checkpoints removed" in ended.out + ended.err

    def test_it_says_which_leftovers_it_has_swept(self, run: Path, shell: Shell) -> None:
        (run / "step_9").mkdir()
        (run / "step_9/.robust_dcp.saving.0123456789abcdef").touch()
        (run / "step_8").mkdir()  # nothing says that it is ours
        os.utime(run / "step_8", (0, 0))
        ended = shell("prune", run, "--keep-last", 2, "--yes")
        assert ended.code == 0 and "step_9 was the leftover of a crashed save" in ended.out + ended.err
        assert not (run / "step_9").exists() and (run / "step_8").exists()

    def test_one_that_cannot_be_removed_shows_in_the_exit_code(
        self, run: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(path: str) -> Any:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(shutil, "rmtree", fail)
        ended = shell("prune", run, "--keep-last", 1, "--yes")
        assert ended.code != 0 and "0 checkpoints removed" in ended.out + ended.err


def test_ls_counts_files_below_and_none_that_vanish(
    originals: Path, tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(originals / "ours", tmp_path / "step_1")
    (before,) = shell("ls", tmp_path, "--json").json["checkpoints"]
    (tmp_path / "step_1/below").mkdir()
    (tmp_path / "step_1/below/file").write_bytes(bytes(1000))
    (after,) = shell("ls", tmp_path, "--json").json["checkpoints"]
    assert after["nbytes"] == before["nbytes"] + 1000

    scandir = os.scandir

    def vanished(path: Any) -> Any:
        if str(path).endswith("below"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanished)
    (third,) = shell("ls", tmp_path, "--json").json["checkpoints"]
    assert third["nbytes"] == before["nbytes"]
