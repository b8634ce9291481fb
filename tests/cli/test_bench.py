"""``bench`` measures and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import robust_dcp
from tests.cli.commands import Shell, in_a_process


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
