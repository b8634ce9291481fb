"""torchtune's ``DistributedCheckpointer``, unmodified: FSDP2, on two ranks of gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.both_sides import check_both_sides
from tests.frameworks.jobs import require

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def torchtune() -> None:
    require("torchtune")


def test_what_is_saved_is_ours_and_both_sides_read_what_either_has_written(tmp_path: Path) -> None:
    written = check_both_sides("tune", directory=tmp_path, equal=["async", "sync"])
    assert written == ["dist_epoch_0", "dist_epoch_1"]
