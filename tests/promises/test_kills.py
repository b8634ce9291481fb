"""A process that is killed, or a power cut, at any moment leaves the checkpoint from before or the new one, whole."""

from __future__ import annotations

import multiprocessing
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.faults.disk import CHANGES, LONG_TESTS, FaultDisk, each_call
from tests.faults.power import cut_power
from tests.promises.scenarios import SCENARIOS, Scenario, content, where

EVERY = {"overwrite": 2, "save": 3, "safetensors": 3, "copy": 5, "load": 4}
"""Each so many-th call is tried, from a place that is drawn. The others make much the same calls."""


@pytest.fixture(scope="module")
def warm() -> Iterator[ProcessPoolExecutor]:
    """A process of one thread, which may fork, and has imported what the scenarios need."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as process:
        yield process


def left_by_kills(scenario: Scenario, root: str, every: int) -> list[int | None]:
    """What is there after each kill; the next one has worked. This process may have no other thread."""
    torch.set_num_threads(1)
    left = []
    for number, _, directory, _ in each_call(
        scenario.act, root, None, prepare=scenario.prepare, counted=scenario.counted, every=every
    ):
        with where(f"killed before call {number}"):
            left.append(scenario.check(directory))
            scenario.check_next(directory)
    return left


def left_by_kills_of(name: str, root: str) -> list[int | None]:
    (scenario,) = (each for each in SCENARIOS if each.name == name)
    return left_by_kills(scenario, root, EVERY.get(name, 5))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_kill_before_any_call_leaves_what_was_there_or_what_is_new(
    scenario: Scenario, memory_path: Path, warm: ProcessPoolExecutor
) -> None:
    left = warm.submit(left_by_kills_of, scenario.name, str(memory_path)).result()
    assert left == sorted(left, key=scenario.may_leave.index), "once the new one is there it stays"
    assert left[0] == scenario.may_leave[0]


# --- power cuts -------------------------------------------------------------------------------------------------------


STATES = {"overwrite": 300, "save": 100, "manager": 30}
"""So many states are drawn, and 40 of the other scenarios. Behind some of them the scenario is done once more."""

NEXT_TRIES = 10

UNSEEN = ("convert-dcp", "convert-torch")
"""The first exchanges the names of directories by a call that Python does not have, the second writes in C++."""


def left_by_power_cuts(scenario: Scenario, root: str, most: int) -> list[int | None]:
    """What is there after power cuts, of which so many are drawn; the next one has worked behind some of them."""
    recorded = f"{root}/recorded"
    scenario.prepare(recorded)
    before = content(recorded)
    with FaultDisk(recorded, record=True) as disk:
        scenario.act(recorded)
    calls = [call for call in disk.calls if call.operation in CHANGES and call.is_done]
    states = list(cut_power(recorded, before, calls))
    assert len(states) > len(calls)
    seed = random.randrange(1 << 30)
    print(f"{len(calls)} calls, {len(states)} states, seed {seed}")
    dice = random.Random(seed)
    n_drawn = len(states) if LONG_TESTS else min(most, len(states))
    drawn = sorted(dice.sample(range(len(states)), n_drawn))
    tried_next = set(dice.sample(drawn, NEXT_TRIES))
    left = []
    for number in drawn:
        state = states[number]
        directory = f"{root}/{number}"
        state.put(directory)
        last = calls[state.after - 1] if state.after else None
        with where(f"state {number}, after call {state.after}, {last}"):
            value = scenario.check(directory)
            left.append(value)
            if state.after == len(calls):
                assert value == scenario.may_leave[-1], f"it has returned, and generation {value} is there"
            if number in tried_next:
                scenario.check_next(directory, is_tidy=False)  # the names of what is left may be lost
        shutil.rmtree(directory)
    return left


@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if each.name not in (*UNSEEN, "load")], ids=str)
def test_a_power_cut_after_any_call_leaves_what_was_there_or_what_is_new(scenario: Scenario, memory_path: Path) -> None:
    left = left_by_power_cuts(scenario, str(memory_path), STATES.get(scenario.name, 40))
    assert scenario.may_leave[0] in left
