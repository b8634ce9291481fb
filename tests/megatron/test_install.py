"""``install`` and ``uninstall``: what differs between them, and what does not before and after."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.megatron.small_megatron import run_python

_ROOT = Path(__file__).parents[2]


def _run_attributes(order: str, rank: int) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "tests.megatron.attributes", order, path=_ROOT, environment={"RANK": str(rank)})


def test_install_refuses_a_planner_that_it_does_not_know() -> None:
    from robust_dcp.megatron import install

    with pytest.raises(ValueError, match=r"install\(planner='mcore'\): expected 'robust_dcp' or 'default'"):
        install("mcore")  # type: ignore[arg-type]


def test_every_attribute_of_megatron_is_the_same_object_before_install_and_after_uninstall() -> None:
    done = _run_attributes("megatron_first", rank=0)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "is the planner of Megatron's checkpoints" in line]
    assert len(lines) == 1
    assert all(part in lines[0] for part in ("saves of torch_dist", "megatron-core ", "torch "))
    assert "has no" not in done.stderr


def test_no_attribute_of_megatron_is_ours_after_uninstall_if_megatron_came_after_install() -> None:
    done = _run_attributes("install_first", rank=1)
    assert done.returncode == 0, done.stderr
    assert "is the planner of" not in done.stderr
