"""A small part of the campaign that kills jobs while their managers save, remove and load."""

from __future__ import annotations

import pytest

from torture.managers import run_trial


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 7])
def test_a_killed_manager_leaves_a_whole_checkpoint_and_nothing_that_stays(seed: int) -> None:
    assert run_trial(seed) == []
