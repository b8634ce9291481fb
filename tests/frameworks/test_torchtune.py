"""torchtune's ``DistributedCheckpointer``, unmodified: FSDP2, on two ranks of gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.jobs import checkpoints_in, is_ours, require, run_job

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def torchtune() -> None:
    require("torchtune")


def test_what_is_saved_is_ours_and_both_sides_read_what_either_has_written(tmp_path: Path) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    for robust, directory in ((True, ours), (False, stock)):
        saved = run_job("tune", "save", directory, robust=robust)
        written = checkpoints_in(directory)
        assert [path.name for path in written] == ["dist_epoch_0", "dist_epoch_1"]
        assert all(is_ours(path) is robust for path in written)
        assert saved.announcements == robust
        assert saved.stays_stock == []
    loaded = run_job("tune", "load", ours, stock, robust=True)
    assert (loaded.equal, loaded.announcements, loaded.stays_stock) == (["async", "async", "sync", "sync"], 1, [])
    assert run_job("tune", "load", ours, robust=False).equal == ["async", "sync"]
