"""What commands say where they may not read or write, and of options and roots that hold nothing to do."""

from __future__ import annotations

import os
from pathlib import Path

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
