"""A process that is killed at any moment leaves the checkpoint from before or the new one, and nothing in the way."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.faults.disk import each_kill
from tests.promises.scenarios import SCENARIOS, Scenario, where

EVERY = {"overwrite": 1, "save": 2, "safetensors": 2, "copy": 4, "load": 3}
"""Each so many-th call is tried, from a place that is drawn. The others make much the same calls."""


@pytest.fixture(scope="module")
def warm() -> Iterator[ProcessPoolExecutor]:
    """A process of one thread, which may fork, and has imported what the scenarios need."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as process:
        yield process


def left_by_kills(scenario_name: str, root: str) -> list[int | None]:
    torch.set_num_threads(1)
    (scenario,) = (each for each in SCENARIOS if each.name == scenario_name)
    every, left = EVERY.get(scenario_name, 5), []
    for number, directory in each_kill(
        scenario.act, root, prepare=scenario.prepare, counted=scenario.counted, every=every
    ):
        with where(f"killed before call {number}"):
            left.append(scenario.check(directory))
            scenario.check_next(directory)
    return left


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_kill_before_any_call_leaves_what_was_there_or_what_is_new(
    scenario: Scenario, memory_path: Path, warm: ProcessPoolExecutor
) -> None:
    left = warm.submit(left_by_kills, scenario.name, str(memory_path)).result()
    assert left == sorted(left, key=scenario.may_leave.index), "once the new one is there it stays"
    assert left[0] == scenario.may_leave[0]
