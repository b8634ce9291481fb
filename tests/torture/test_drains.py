"""A small part of the campaign that kills copies of checkpoints and lets them go on."""

from __future__ import annotations

import pytest

from torture.drains import run_trial


@pytest.mark.parametrize("seed", [1, 2, 4, 5])
def test_a_killed_copy_leaves_a_whole_checkpoint_and_goes_on(seed: int) -> None:
    assert run_trial(seed) == []
