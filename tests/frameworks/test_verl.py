"""verl's own ``MegatronCheckpointManager``, unmodified, in two workers of its own ``RayWorkerGroup``.

The variable reaches the workers as verl hands it on: in ``ray_init.runtime_env.env_vars``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.frameworks.jobs import PROGRAMS, checkpoints_in, is_ours, require, run_command

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def verl() -> None:
    require("verl", "ray")


def _run(directory: Path, *words: str) -> list[str]:
    """What the workers have found equal."""
    job = run_command(PROGRAMS / "verl_workers.py", directory, *words, robust=False)
    assert job.announcements == ("ROBUST_DCP=1" in words)
    assert job.stays_stock == []
    return job.equal


def test_checkpoints_are_ours_and_both_sides_load_what_either_has_written(tmp_path: Path) -> None:
    _run(tmp_path, "save:stock")
    assert _run(tmp_path, "ROBUST_DCP=1", "save:sync", "save:async", "load:stock") == ["stock"]
    for name in ("stock", "sync", "async"):
        written = checkpoints_in(tmp_path / name)
        steps = [tmp_path / name / f"global_step_{step}" / "actor" for step in (2, 3)]
        assert written == [step / part / "dist_ckpt" for step in steps for part in ("extra", "model", "optimizer")]
        assert {is_ours(path) for path in written} == {name != "stock"}
    assert _run(tmp_path, "load:sync", "load:async") == ["async", "sync"]
    digests = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("stock", "sync", "async")]
    assert digests[0] == digests[1] == digests[2]
