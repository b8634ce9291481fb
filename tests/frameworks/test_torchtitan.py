"""torchtitan's own ``Trainer`` and ``CheckpointManager``, unmodified: its debug llama, FSDP2, two ranks of gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.jobs import checkpoints_in, is_ours, require, run_job

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def torchtitan() -> None:
    require("torchtitan")


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_is_saved_is_ours_and_both_sides_go_on_from_what_either_has_written(mode: str, tmp_path: Path) -> None:
    losses = []
    for robust, directory in ((True, tmp_path / "ours"), (False, tmp_path / "stock")):
        saved = run_job("titan_trainer", "save", mode, directory, robust=robust)
        written = checkpoints_in(directory)
        assert [path.name for path in written] == ["step-1", "step-2", "step-3"]
        assert all(is_ours(path) is robust for path in written)
        assert saved.announcements == robust
        assert saved.stays_stock == []
        loaded = run_job("titan_trainer", "load", mode, directory, robust=not robust)
        assert loaded.equal == [mode]
        assert loaded.announcements == (not robust)
        assert is_ours(directory / mode / "step-4") is not robust
        losses.append((saved.losses, loaded.losses))
    assert losses[0] == losses[1]
    assert [len(told) for told in losses[0]] == [3, 1]
