"""The switch: what ``ROBUST_DCP`` and its relatives may be, what wins, and that a mistake ends the process at once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.promises.programs import run_alone

SAVES_BY_STOCK = """
import sys
import torch
import torch.distributed.checkpoint as dcp
{first}
dcp.save({"w": torch.ones(3)}, checkpoint_id=sys.argv[1])
print("trained", flush=True)
"""

OURS = ".robust_dcp.report.json"


def run(path: Path, *, first: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return run_alone(SAVES_BY_STOCK.replace("{first}", first), path, path, **environment)


@pytest.mark.parametrize("value", ["1", "true", "YES", "On"])
def test_it_is_on_by_any_of_the_usual_words(value: str, tmp_path: Path) -> None:
    done = run(tmp_path, ROBUST_DCP=value)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert (tmp_path / OURS).exists()


@pytest.mark.parametrize("value", ["0", "False", "no", "OFF", ""])
def test_it_is_off_by_any_of_the_usual_words(value: str, tmp_path: Path) -> None:
    done = run(tmp_path, ROBUST_DCP=value)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert (tmp_path / ".metadata").exists() and not (tmp_path / OURS).exists()
    assert "robust_dcp" not in done.stderr


@pytest.mark.parametrize("value", ["0", "false"])
@pytest.mark.parametrize("module", ["robust_dcp", "robust_dcp.megatron"])
def test_off_wins_over_install(value: str, module: str, tmp_path: Path) -> None:
    done = run(tmp_path, first=f"import {module}; {module}.install()", ROBUST_DCP=value)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert (tmp_path / ".metadata").exists() and not (tmp_path / OURS).exists()


def test_install_says_that_it_does_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, first="import robust_dcp; robust_dcp.install()", ROBUST_DCP="0")
    assert done.stderr.count("robust_dcp.install() does nothing, because ROBUST_DCP=0 is in the environment") == 1


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("ROBUST_DCP", "ture", "one of 1, true, yes, on, 0, false, no, off"),
        ("ROBUST_DCP", "2", "one of 1, true, yes, on, 0, false, no, off"),
        ("ROBUST_DCP_TRUSTED", "maybe", "one of 1, true, yes, on, 0, false, no, off"),
        ("ROBUST_DCP_WRITER_THREADS", "many", "a whole number from 1 on"),
        ("ROBUST_DCP_RANKS_PER_NODE", "0", "a whole number from 1 on"),
        ("ROBUST_DCP_EXCHANGE_TIMEOUT_SECONDS", "nan", "a positive number of seconds"),
        ("ROBUST_DCP_SAVE_FAILURE", "ignore", "one of raise, warn"),
    ],
)
def test_a_value_that_nobody_understands_ends_the_process_at_its_start(
    variable: str, value: str, expected: str, tmp_path: Path
) -> None:
    done = run(tmp_path / "saved", **{"ROBUST_DCP": "1", variable: value})
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr == f"robust_dcp: {variable}={value!r} in the environment: expected {expected}\n"
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("raised", "returncode", "said"),
    [
        ('ImportError("half an update")', 1, "cannot be switched on: ImportError: half an update"),
        ("KeyboardInterrupt", 0, ""),
    ],
)
def test_an_installation_that_does_not_work_ends_the_process_and_ctrl_c_is_not_lost(
    raised: str, returncode: int, said: str, tmp_path: Path
) -> None:
    """In a fresh interpreter, where ``import torch`` itself switches robust_dcp on."""
    program = f"""
        import sys

        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "robust_dcp.installation":
                    raise {raised}

        sys.meta_path.insert(0, Finder())
        try:
            import torch
            import torch.distributed.checkpoint as dcp
        except KeyboardInterrupt:
            print("interrupted")
        else:
            dcp.save({{"w": torch.ones(3)}}, checkpoint_id={str(tmp_path / "saved")!r})
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env={**os.environ, "ROBUST_DCP": "1"}, capture_output=True, text=True, timeout=170)
    assert done.returncode == returncode and said in done.stderr
    assert done.stdout == ("interrupted\n" if not said else "")
    assert not (tmp_path / "saved").exists()


def test_a_program_that_imports_robust_dcp_first_is_switched_on_as_well(tmp_path: Path) -> None:
    program = "import robust_dcp\n" + SAVES_BY_STOCK.replace("{first}", "")
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, env={**os.environ, "ROBUST_DCP": "1"}, timeout=170, check=True)
    assert (tmp_path / OURS).exists()
