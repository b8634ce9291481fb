"""A save that failed is reported as it failed, also if a rank dies while its files are removed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp.plan import session
from robust_dcp.storage.committing.save import Save
from tests.harness.faults import fail_in
from tests.harness.ranks import run_ranks, values


def state(step: float) -> dict[str, Any]:
    return {f"own{dist.get_rank()}": torch.full((100,), step)}


def die(*args: Any, **kwargs: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def loaded(path: str) -> float:
    found = state(0.0)
    robust_dcp.load(found, checkpoint_id=path, no_dist=True)
    return float(found[f"own{dist.get_rank()}"][0])


def fails_and_dies(path: str, dying: int) -> tuple[str, str, float]:
    """Rank 0 fails while it writes, and ``dying`` is killed as it begins to remove its files."""
    robust_dcp.save(state(1.0), checkpoint_id=path)
    if dist.get_rank() == dying:
        Save.remove_files = die  # type: ignore[method-assign]
    try:
        with fail_in("write", rank=0, error=LookupError("the weights are gone"), operation="save"):
            robust_dcp.save(state(2.0), checkpoint_id=path, timeout_seconds=20)
    except robust_dcp.RobustCheckpointError as error:
        return type(error).__name__, str(error), loaded(path)
    raise AssertionError("it was saved")


def test_a_rank_that_dies_while_files_are_removed_hides_neither_the_error_nor_the_checkpoint(tmp_path: Path) -> None:
    outcomes = run_ranks(3, fails_and_dies, str(tmp_path / "1"), 2)
    assert outcomes[2].exitcode == -signal.SIGKILL
    for kind, message, step in values(outcomes[:2]):
        assert kind == "RobustCheckpointError" and "the weights are gone" in message
        assert step == 1.0
    assert any("the ranks could not remove the files of this save together" in each.output for each in outcomes[:2])


def commit_fails_and_rank_1_dies(path: str) -> tuple[str, float]:
    """Rank 0 finds at the commit that its files are not as it wrote them, and rank 1 is killed in what follows."""
    robust_dcp.save(state(1.0), checkpoint_id=path)
    if dist.get_rank() == 1:
        session.nothing_is_committed = die
    try:
        with fail_in("commit", rank=0, error=LookupError("another file is there"), operation="save"):
            robust_dcp.save(state(2.0), checkpoint_id=path, timeout_seconds=20)
    except robust_dcp.RobustCheckpointError as error:
        return str(error), loaded(path)
    raise AssertionError("it was saved")


def test_if_the_ranks_cannot_ask_whether_it_is_committed_nothing_is_removed(tmp_path: Path) -> None:
    outcomes = run_ranks(2, commit_fails_and_rank_1_dies, str(tmp_path / "1"))
    assert outcomes[1].exitcode == -signal.SIGKILL
    ((message, step),) = values(outcomes[:1])
    assert "another file is there" in message and step == 1.0
    assert "the ranks could not find out whether the checkpoint is committed" in outcomes[0].output
