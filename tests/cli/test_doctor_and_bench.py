"""``doctor`` says what to do about what it finds; ``bench`` measures and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import robust_dcp
from robust_dcp.storage.files.mounts import mount_in
from tests.cli.commands import Shell, in_a_process


def findings(shell: Shell, *words: object) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in shell("doctor", *words, "--json").json["findings"]}


def test_the_file_system_is_tried_and_left_as_it_was(shell: Shell, tmp_path: Path) -> None:
    found = findings(shell, tmp_path)
    assert {"direct I/O", "preallocation", "locks", "commit", "shared extents", "clock", "space"} <= set(found)
    assert found["locks"]["state"] == "ok" and found["commit"]["state"] == "ok" and found["clock"]["state"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_interface_is_a_problem_with_what_to_do(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    ended = shell("doctor")
    assert ended.code == 1
    (row,) = [row for row in ended.rows if row[0] == "problem"]
    assert "nosuch0" in row[2] and "GLOO_SOCKET_IFNAME to one of" in row[3]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert shell("doctor").code == 0


def test_a_switch_that_pytorch_ignores_and_a_mistyped_option_are_told(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROBUST_DCP", "1")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setenv("ROBUST_DCP_LAYOT", "torch")
    monkeypatch.setenv("ROBUST_DCP_LAYOUT", "torch")
    found = findings(shell)
    assert found["taken over"]["state"] == "problem"
    assert found["ROBUST_DCP_LAYOT"]["state"] == "warning" and "ROBUST_DCP_LAYOUT" not in found


def test_a_directory_that_cannot_be_written_to_is_a_problem(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = findings(shell, "/proc")  # where nobody can make a directory
    assert found["writing"]["state"] == "problem"


def test_a_mount_is_read_with_its_source_and_options() -> None:
    lines = ["36 35 0:9 / /mnt/a\\040b rw shared:1 - nfs4 server:/x rw,acdirmax=60,local_lock=none\n"]
    found = mount_in(lines, "/mnt/a b/step_1")
    assert found is not None
    assert (found.type, found.source, found.options[1]) == ("nfs4", "server:/x", "acdirmax=60")


def test_bench_says_options_that_the_writer_takes(shell: Shell, tmp_path: Path) -> None:
    found = shell("bench", tmp_path, "--seconds", "0.1", "--json").json
    robust_dcp.WriteOptions(**found["writer_options"])
    robust_dcp.ReadOptions(**found["reader_options"])
    assert {each["what"] for each in found["measured"]} == {"read", "write"}
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def benching(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "robust_dcp.cli", "bench", str(tmp_path), "--seconds", "60"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait()


def test_ctrl_c_ends_a_measurement_and_leaves_nothing(benching: subprocess.Popen[str], tmp_path: Path) -> None:
    assert benching.stderr is not None
    assert "writes and reads" in benching.stderr.readline()
    benching.send_signal(signal.SIGINT)
    _, said = benching.communicate(timeout=60)
    assert benching.returncode == 130
    assert said == "robust-dcp: stopped\n"
    assert list(tmp_path.iterdir()) == []


IMPORT_THAT_CATCHES_ALL = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
"""


def test_ctrl_c_while_torch_is_imported_ends_a_command_although_imports_catch_it(tmp_path: Path) -> None:
    module = tmp_path / "packages" / "torch" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text(IMPORT_THAT_CATCHES_ALL)
    path = os.pathsep.join([str(module.parents[1]), *filter(None, sys.path)])
    ended = in_a_process("bench", tmp_path, "--json", PYTHONPATH=path)
    assert (ended.code, ended.err.splitlines()[-1]) == (130, "robust-dcp: stopped")
    assert ended.json == {"version": 1, "error": "stopped"}
