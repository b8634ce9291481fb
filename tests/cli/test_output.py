"""What all commands do with output: hostile names are inert, pipes may close, JSON is JSON, and help has examples."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from robust_dcp.cli.app import COMMANDS
from tests.cli.commands import Shell


def in_a_terminal(*words: object, typed: bytes = b"", code: int = 0, **environment: str) -> str:
    """What a command prints into a terminal, where a person has ``typed`` something."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "robust_dcp.cli", *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TERM": "xterm", **environment},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        os.write(ours, typed)
        said = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end was closed
                break
            if not piece:
                break
            said += piece
        os.close(ours)
        assert process.wait() == code
    return said.decode()


def test_names_cannot_speak_to_a_terminal(originals: Path) -> None:
    said = in_a_terminal("inspect", originals / "ours", "--table", NO_COLOR="1", COLUMNS="200")
    assert "evil\\x1b]0;title\\x07[red]\\n\\tname" in said
    assert "\x1b]0;" not in said and "\x1b[31m" not in said


def test_prune_asks_in_a_terminal_and_removes_what_was_agreed_to(originals: Path, tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(originals / "ours", tmp_path / f"step_{step}")
    assert "Remove step_1?" in in_a_terminal("prune", tmp_path, "--keep-last", 1, typed=b"n\n", code=2)
    assert "stopped" in in_a_terminal("prune", tmp_path, "--keep-last", 1, typed=b"\x04", code=130)
    assert (tmp_path / "step_1").exists()
    assert "1 checkpoint removed" in in_a_terminal("prune", tmp_path, "--keep-last", 1, typed=b"y\n")
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_a_name_with_a_tab_and_a_line_break_stays_one_field(originals: Path, shell: Shell) -> None:
    rows = shell("inspect", originals / "ours", "--table").rows
    assert {len(row) for row in rows} == {6}
    assert "evil\\x1b]0;title\\x07[red]\\n\\tname" in {row[0] for row in rows}


def test_a_pipe_that_is_closed_ends_a_command_quietly(originals: Path) -> None:
    words = f"inspect {originals / 'ours'} --table"
    command = f"{sys.executable} -m robust_dcp.cli {words} 2>&1 | true; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.stdout, ran.stderr) == ("0\n", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_json_and_the_words_of_the_command(name: str, shell: Shell) -> None:
    ended = shell(name, "--help")
    assert ended.code == 0
    assert "--json" in ended.out
    assert f"Examples:\n  robust-dcp {name} " in ended.out


@pytest.mark.parametrize("name", sorted({"doctor", "inspect", "ls", "prune", "verify"}))
def test_an_error_is_json_if_json_was_asked_for(name: str, shell: Shell, tmp_path: Path) -> None:
    ended = shell(name, tmp_path / "nowhere", "--json")
    assert ended.code == 2
    assert "there is no such directory" in ended.json["error"] and ended.json["version"] == 1


WORDS_AFTER_THE_PATH = {
    "inspect": ["--json"],
    "verify": ["--fast"],
    "diff": ["{path}"],
    "convert": ["{target}", "--to", "dcp", "--force"],
    "report": ["--output", "{target}"],
    "ls": [],
    "prune": ["--keep-last", "1", "--dry-run"],
    "bench": ["--seconds", "0.1"],
    "doctor": [],
}


@pytest.mark.parametrize("name", WORDS_AFTER_THE_PATH)
def test_a_path_may_be_a_file_url_and_a_place_in_a_store_is_refused(
    name: str, originals: Path, shell: Shell, tmp_path: Path
) -> None:
    path = originals if name in ("ls", "prune") else originals / "ours"
    words = [each.format(path=path, target=tmp_path / "target") for each in WORDS_AFTER_THE_PATH[name]]
    for url in (f"file://{path}", f"FILE://localhost{path}"):
        assert shell(name, url, *words).code == 0
    for url in () if name in ("inspect", "verify") else ("s3://bucket/run", "file://host/run"):
        ended = shell(name, url, *words)
        assert ended.code == 2
        assert f"{url} is a URL, and this command takes directories" in (ended.err or ended.json["error"])


@pytest.mark.parametrize("words", [["no-such-command"], ["ls"], ["ls", ".", "--no-such-option"], ["ls", ".", "more"]])
def test_words_that_make_no_sense_are_told_as_json_if_that_was_asked_for(words: list[str], shell: Shell) -> None:
    ended = shell(*words, "--json")
    assert ended.code == 2 and list(ended.json) == ["version", "error"] and ended.json["error"]
    ended = shell(*words)
    assert ended.code == 2 and ended.out == "" and ended.err


def test_names_of_files_that_are_no_text_are_shown_and_can_be_used(
    originals: Path, tmp_path: Path, shell: Shell
) -> None:
    root = tmp_path / os.fsdecode(b"run\xff")
    shutil.copytree(originals / "ours", root / "step_1")
    path = root / "step_1"
    assert shell("inspect", path).code == shell("verify", path).code == 0
    assert f"{tmp_path}/run\\udcff/step_1:" in shell("inspect", path).err
    for words in (["ls", root], ["report", root], ["inspect", path], ["verify", path], ["doctor", root]):
        assert "run\\udcff" in str(shell(*words, "--json").json)  # Python's name for the byte, so that it can be opened
    assert shell("copy", path, root / "copied", "--json").json["target"] == str(root / "copied")
    assert shell("verify", root / "copied").code == 0
    words = ["--to", "safetensors", "--exclude", "*complex"]
    assert shell("convert", path, root / "converted", *words, "--json").json["target"] == str(root / "converted")
    assert shell("diff", path, root / "converted", "model.weight", "--values", "--json").json["are_equal"]
