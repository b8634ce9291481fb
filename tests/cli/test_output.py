"""What all commands do with output, interruptions and refusals: hostile names are inert, and JSON is JSON.

And what ``copy`` and ``report`` say of what the functions below them do.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import robust_dcp
from robust_dcp.cli.app import COMMANDS
from tests.cli.commands import shell, started
from tests.storage.forged import Call

HOSTILE = "evil\\x1b]0;title\\x07[red]\\n\\tname"


def in_a_terminal(*words: object, typed: bytes = b"", code: int = 0, **environment: str) -> str:
    """What a command prints into a terminal, where a person has ``typed`` something."""
    ours, theirs = pty.openpty()
    env = {"TERM": "xterm", **environment}
    with started(*words, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        os.write(ours, typed)
        said = b""
        with contextlib.suppress(OSError):  # the other end was closed
            while piece := os.read(ours, 65536):
                said += piece
        os.close(ours)
        assert process.wait() == code
    return said.decode()


def test_names_cannot_speak_to_a_terminal_and_stay_one_field(originals: Path) -> None:
    said = in_a_terminal("inspect", originals / "ours", "--table", NO_COLOR="1", COLUMNS="200")
    assert HOSTILE in said and "\x1b]0;" not in said and "\x1b[31m" not in said
    rows = shell("inspect", originals / "ours", "--table").rows
    assert {len(row) for row in rows} == {6} and HOSTILE in {row[0] for row in rows}


def test_prune_asks_in_a_terminal_and_removes_what_was_agreed_to(originals: Path, tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(originals / "ours", tmp_path / f"step_{step}")
    assert "Remove step_1?" in in_a_terminal("prune", tmp_path, "--keep-last", 1, typed=b"n\n", code=2)
    assert "stopped" in in_a_terminal("prune", tmp_path, "--keep-last", 1, typed=b"\x04", code=130)
    assert (tmp_path / "step_1").exists()
    assert "removed: 1 checkpoint" in in_a_terminal("prune", tmp_path, "--keep-last", 1, typed=b"y\n")
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        *(("inspect {} --table | true", 0), ("inspect {} <&- >&- 2>&-", 0), ("ls {} --json >/dev/full", 2)),
        *(("--help | true", 0), ("diff {0} {0}/../megatron 2>&1 | true", 1)),
    ],
)
def test_an_output_that_is_closed_full_or_lacks_letters_hides_nothing(words: str, code: int, originals: Path) -> None:
    line = f"set -o pipefail; {sys.executable} -m robust_dcp.cli {words.format(originals / 'ours')}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == code and "Traceback" not in ended.stderr


@pytest.mark.parametrize(("command", "first"), [("bench", "writes and reads"), ("verify", "20,000 tensors")])
def test_ctrl_c_ends_a_long_command_at_once_and_leaves_nothing(command: str, first: str, tmp_path: Path) -> None:
    if command == "verify":
        robust_dcp.save({f"l.{n}": torch.ones(8) for n in range(20_000)}, checkpoint_id=tmp_path)
    before = sorted(tmp_path.iterdir())
    more = {"bench": ("--seconds", "60"), "verify": ("--jobs", "1")}[command]
    with started(command, tmp_path, *more, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None and first in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
    assert (process.returncode, said) == (130, "robust-dcp: stopped\n") and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_json_and_the_words_of_the_command(name: str) -> None:
    ended = shell(name, "--help")
    assert ended.code == 0 and "--json" in ended.out and f"Examples:\n  robust-dcp {name} " in ended.out


def test_a_narrow_terminal_gets_narrow_help_with_defaults_and_narrow_tables(originals: Path) -> None:
    said = in_a_terminal("copy", "--help", COLUMNS="60")
    options = said[said.index("options:") :]
    assert "Default: 8." in " ".join(options.split()) and max(map(len, options.splitlines())) <= 60
    lines = in_a_terminal("inspect", originals / "ours", "--table", COLUMNS="90").splitlines()
    cut = [line for line in lines if "…" in line]
    assert cut and max(map(len, lines[1:])) <= 90 and any(line.rstrip().endswith(".distcp") for line in cut)


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
def test_a_path_may_be_a_file_url_and_a_place_in_a_store_is_refused(name: str, originals: Path, tmp_path: Path) -> None:
    path = originals if name in ("ls", "prune") else originals / "ours"
    words = [each.format(path=path, target=tmp_path / "target") for each in WORDS_AFTER_THE_PATH[name]]
    for url in (f"file://{path}", f"FILE://localhost{path}"):
        assert shell(name, url, *words).code == 0
    for url in () if name in ("inspect", "verify", "ls", "prune") else ("s3://bucket/run", "file://host/run"):
        ended = shell(name, url, *words)
        assert ended.code == 2
        assert f"{url} is a URL, and this command takes directories" in (ended.err or ended.json["error"])
    if name in ("doctor", "inspect", "ls", "prune", "report", "verify"):
        ended = shell(name, tmp_path / "nowhere", "--json")
        assert ended.code == 2 and "there is no such directory" in ended.json["error"] and ended.json["version"] == 1


def test_names_of_files_that_are_no_text_are_shown_and_can_be_used(originals: Path, tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode(b"run\xff")
    path = Path(shutil.copytree(originals / "ours", root / "step_1"))
    for words in (["ls", root], ["report", root], ["inspect", path], ["verify", path], ["doctor", root]):
        assert "run\\udcff" in str(shell(*words, "--json").json)  # Python's name for the byte, so that it can be opened
    assert shell("copy", path, root / "copied", "--json").json["target"] == str(root / "copied")
    words = ["--to", "safetensors", "--exclude", "*complex"]
    assert shell("convert", path, root / "converted", *words, "--json").json["target"] == str(root / "converted")
    assert shell("diff", path, root / "converted", "model.weight", "--values", "--json").json["are_equal"]


def test_what_may_not_be_used_is_told_with_what_to_check(
    originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    ended = shell("bench", tmp_path / "file/step_1")
    assert ended.code == 2 and "Not a directory" in ended.err
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, who may use everything
    for words in (("inspect", originals / "ours"), ("ls", tmp_path), ("prune", tmp_path, "--keep-last", 1)):
        ended = shell(*words)
        assert ended.code == 2 and f"{words[1]} cannot be read: check who owns the directory" in ended.err
    assert "--json comes after the command" in shell("--json", "ls", tmp_path).err


def test_a_program_in_the_place_of_a_tensor_an_object_or_the_metadata_is_executed_by_no_command(tmp_path: Path) -> None:
    path, ran = tmp_path / "hostile", tmp_path / "ran"
    program = Call(open, str(ran), "x")
    dcp.save({"weight": torch.ones(4)}, checkpoint_id=path, no_dist=True)
    record = io.BytesIO()
    torch.save(program, record)
    metadata = FileSystemReader(path).read_metadata()
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(record.getvalue())
        (path / info.relative_path).write_bytes(record.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert shell("convert", path, tmp_path / "file.pt", "--to", "torch").code == 2
    assert shell("convert", path, tmp_path / "model", "--to", "safetensors").code == 2
    assert shell("diff", path, path, "--values").code == 2
    assert "a load has to trust weight" in shell("verify", path).err
    (path / ".metadata").write_bytes(b"cposix\nabort\n(tR.")
    for command, code in (("inspect", 2), ("verify", 1)):
        ended = shell(command, path)
        assert ended.code == code and "asks for posix.abort" in ended.out + ended.err
    for name, value in (("1", [program]), ("2", [program, 1])):
        dcp.save({"o": value}, checkpoint_id=tmp_path / name, no_dist=True)
    ended = shell("diff", tmp_path / "1", tmp_path / "2", "--values", "--json")
    assert ended.code == 1 and ended.json["objects"][0]["second"].endswith("other bytes")
    assert shell("diff", tmp_path / "1", tmp_path / "1", "--values").code == 0 and not ran.exists()


def test_a_rate_is_written_as_people_do(originals: Path, tmp_path: Path) -> None:
    for rate, code in {"500MB": 0, "1.5GiB": 0, "200000 k": 0, "300MB/s": 0, "fast": 2, "0": 2, "1XB": 2}.items():
        ended = shell("copy", originals / "ours", tmp_path / "copied", f"--limit={rate}")
        assert ended.code == code and ("is no size" in ended.err) == (code == 2)


def test_the_page_of_a_run_lists_its_checkpoints_or_cannot_be_made_and_leaves_nothing(tmp_path: Path) -> None:
    ended = shell("report", tmp_path)
    assert ended.code == 2 and str(tmp_path) in ended.err
    manager = robust_dcp.CheckpointManager(tmp_path / "run")
    for step in (10, 20):
        manager.save(step, {"model": {"w": torch.ones(9) * step}})
    (tmp_path / "taken").mkdir()
    for more in ((), ("--json",)):
        ended = shell("report", tmp_path / "run", "--output", tmp_path / "taken", *more)
        assert ended.code == 2 and str(tmp_path / "taken") in ended.err
    assert {path.name for path in tmp_path.iterdir()} == {"run", "taken"}
    page, linked = tmp_path / "page.html", tmp_path / "linked"
    page.symlink_to(linked)  # as /dev/stdout is one
    ended = shell("report", tmp_path / "run", "--output", page)
    assert (ended.code, ended.out) == (0, f"The page is {page}\n")
    text = linked.read_text()
    assert text.startswith("<!doctype html>") and "step_10" in text and "http://" not in text.partition("<body")[0]
    found = shell("report", tmp_path / "run", "--json").json
    assert [(each["name"], each["plan"]["outcome"]) for each in found["reports"]][1] == ("step_20", "reused")
