"""The switch: what ``ROBUST_DCP`` and its relatives may be, what wins, and that a mistake ends the process at once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from robust_dcp.environment import check
from robust_dcp_autoload import planner_asked_for
from tests.harness.ranks import run_alone

SAVES_BY_STOCK = """
import sys
import torch
import torch.distributed.checkpoint as dcp
{first}
dcp.save({{"w": torch.ones(3)}}, checkpoint_id=sys.argv[1])
print("trained", flush=True)
"""
INSTALL = "import robust_dcp; robust_dcp.install()"
INSTALL_MEGATRON = "import robust_dcp.megatron; robust_dcp.megatron.install()"
TAKES_OVER = "takes over save, load and async_save of torch.distributed.checkpoint"
IGNORED = "robust_dcp.install() does nothing, because ROBUST_DCP=0 is in the environment"
ON_OR_OFF = "one of 1, true, yes, on, 0, false, no, off"


@pytest.mark.parametrize(
    ("value", "first", "is_on", "said"),
    [
        *((value, "", True, TAKES_OVER) for value in ("1", "true", "YES", "On")),
        *((value, "", False, "") for value in ("0", "False", "no", "OFF", "")),
        ("0", INSTALL, False, IGNORED),
        ("false", INSTALL_MEGATRON, False, None),
    ],
)
def test_it_is_on_or_off_by_any_of_the_usual_words_and_off_wins_over_install(
    value: str, first: str, is_on: bool, said: str | None, tmp_path: Path
) -> None:
    done = run_alone(SAVES_BY_STOCK.format(first=first), tmp_path, ROBUST_DCP=value)
    assert done.exitcode == 0 and done.output.endswith("trained\n"), done
    assert (tmp_path / ".metadata").exists() and (tmp_path / ".robust_dcp.report.json").exists() is is_on
    assert said is None or (done.output.count(said) == 1 if said else "robust_dcp" not in done.output)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("ROBUST_DCP", "ture", ON_OR_OFF),
        ("ROBUST_DCP", "2", ON_OR_OFF),
        ("ROBUST_DCP_TRUSTED", "maybe", ON_OR_OFF),
        ("ROBUST_DCP_WRITER_THREADS", "many", "a whole number from 1 on"),
        ("ROBUST_DCP_RANKS_PER_NODE", "0", "a whole number from 1 on"),
        ("ROBUST_DCP_EXCHANGE_TIMEOUT_SECONDS", "nan", "a positive number of seconds"),
        ("ROBUST_DCP_SAVE_FAILURE", "ignore", "one of raise, warn"),
        ("ROBUST_DCP_PROVES", "1", "the name ROBUST_DCP_PROVE"),
        ("ROBUST_DCP_RANK_PER_NODE", "8", "the name ROBUST_DCP_RANKS_PER_NODE"),
    ],
)
def test_a_value_that_nobody_understands_ends_the_process_at_its_start(
    variable: str, value: str, expected: str, tmp_path: Path
) -> None:
    done = run_alone(SAVES_BY_STOCK.format(first=""), tmp_path / "saved", **{"ROBUST_DCP": "1", variable: value})
    assert done.exitcode == 1
    assert done.output == f"robust_dcp: {variable}={value!r} in the environment: expected {expected}\n"
    assert not (tmp_path / "saved").exists()


def test_a_name_that_is_mistyped_strikes_only_who_asks_for_robust_dcp() -> None:
    check({"ROBUST_DCP_STAGING_DIR": "/nvme", "ROBUST_DCP_PROGRESS_BAR": "1", "ROBUST_DCP_X": "1", "ROBUST_DCP_": "1"})
    check({"ROBUST_DCP_PROVES": ""})
    assert planner_asked_for([], {"ROBUST_DCP_PROVES": "1"}) is None
    asks = ["--ckpt-planner=robust_dcp"]
    assert planner_asked_for(asks, {"ROBUST_DCP": "0", "ROBUST_DCP_PROVES": "1"}) == "default"
    for arguments, switch in ((asks, {}), ([], {"ROBUST_DCP": "1"})):
        with pytest.raises(ValueError, match="expected the name ROBUST_DCP_PROVE"):
            planner_asked_for(arguments, {**switch, "ROBUST_DCP_PROVES": "1"})


@pytest.mark.parametrize(
    ("raised", "returncode", "said"),
    [
        ('ImportError("half an update")', 1, "cannot be switched on: ImportError: half an update"),
        ("KeyboardInterrupt", 0, ""),
        ("", 0, "takes over"),
    ],
)
def test_an_installation_that_does_not_work_ends_the_process_and_ctrl_c_is_not_lost(
    raised: str, returncode: int, said: str, tmp_path: Path
) -> None:
    """In a fresh interpreter, where ``import torch`` switches robust_dcp on, or ``import robust_dcp`` before it."""
    program = f"""
        import sys

        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "robust_dcp.installation":
                    raise {raised}

        if {raised!r}:
            sys.meta_path.insert(0, Finder())
        else:
            import robust_dcp
        try:
            import torch
            import torch.distributed.checkpoint as dcp
        except KeyboardInterrupt:
            print("interrupted")
        else:
            dcp.save({{"w": torch.ones(3)}}, checkpoint_id={str(tmp_path / "saved")!r})
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env={**os.environ, "ROBUST_DCP": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == returncode and said in done.stderr
    assert done.stdout == ("interrupted\n" if not said else "")
    assert (tmp_path / "saved" / ".robust_dcp.report.json").exists() is (raised == "")
