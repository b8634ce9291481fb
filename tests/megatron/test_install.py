"""``install`` and ``uninstall``: what differs between them, and what does not before and after."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.small_megatron import run_python


def test_install_refuses_a_planner_that_it_does_not_know() -> None:
    from robust_dcp.megatron import install

    with pytest.raises(ValueError, match=r"install\(planner='mcore'\): expected 'robust_dcp' or 'default'"):
        install("mcore")  # type: ignore[arg-type]


def test_every_attribute_of_megatron_is_stock_s_own_again_after_uninstall_whichever_came_first() -> None:
    root = Path(__file__).parents[2]
    done = run_python("-m", "tests.megatron.attributes", path=root, environment={"RANK": "0"})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "is the planner of Megatron's checkpoints" in line]
    assert len(lines) == 2  # one for each install
    assert all(part in line for line in lines for part in ("saves of torch_dist", "megatron-core ", "torch "))
    assert "has no" not in done.stderr
