"""TorchTNT's ``DistributedCheckpointSaver``, unmodified: FSDP2, on two ranks of gloo. It writes by ``FsspecWriter``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.jobs import checkpoints_in, is_ours, require, run_job

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def torchtnt() -> None:
    require("torchtnt")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_saved_is_ours_and_both_sides_read_what_either_has_written(mode: str, tmp_path: Path) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    for robust, directory in ((True, ours), (False, stock)):
        saved = run_job("tnt", "save", mode, directory, robust=robust)
        written = checkpoints_in(directory)
        assert [path.name for path in written] == [
            "epoch_0_train_step_2",
            "epoch_0_train_step_4",
            "epoch_1_train_step_4",
        ]
        assert all(is_ours(path) is robust for path in written)
        assert saved.announcements == robust
        assert saved.stays_stock == []
    loaded = run_job("tnt", "load", mode, ours, stock, robust=True)
    assert (loaded.equal, loaded.announcements, loaded.stays_stock) == ([mode] * 2, 1, [])
    assert run_job("tnt", "load", mode, ours, robust=False).equal == [mode]
