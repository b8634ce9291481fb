"""TorchTNT's ``DistributedCheckpointSaver``, unmodified: FSDP2, on two ranks of gloo. It writes by ``FsspecWriter``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.both_sides import check_both_sides
from tests.frameworks.jobs import require

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def torchtnt() -> None:
    require("torchtnt")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_saved_is_ours_and_both_sides_read_what_either_has_written(mode: str, tmp_path: Path) -> None:
    written = check_both_sides("tnt", mode, directory=tmp_path, equal=[mode])
    assert written == ["epoch_0_train_step_2", "epoch_0_train_step_4", "epoch_1_train_step_4"]
