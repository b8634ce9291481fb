"""Async saves with kills, with training that overwrites all tensors, and in a row: a part of each campaign."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.ranks import run_ranks, values
from torture.async_kills import Kill
from torture.async_kills import judge as judge_kill
from torture.back_to_back import judge as judge_row
from torture.torn_copies import be_rank


@pytest.mark.parametrize(
    "kill",
    [
        Kill(1, 3, 1, "thread", "trainer", 4, "lazy", 2),
        Kill(2, 2, 0, "thread", "trainer", 16, "waves", 1),
        Kill(3, 2, 1, "process", "writer", 3, "full", 1),
        Kill(4, 2, 0, "process", "trainer", 3, "lazy", 1),
    ],
    ids=lambda kill: kill.kind,
)
def test_whoever_is_killed_during_an_async_save_no_checkpoint_is_lost(kill: Kill) -> None:
    assert judge_kill(kill).complaints == []


@pytest.mark.parametrize("way", ["thread, lazy", "process, full"])
def test_no_copy_is_torn_while_a_thread_writes_all_the_time(tmp_path: Path, way: str) -> None:
    assert values(run_ranks(2, be_rank, way, 5, 1, str(tmp_path), timeout_seconds=150)) == [[], []]


@pytest.mark.parametrize(("executor", "when_busy"), [("thread", "skip"), ("process", "wait")])
def test_saves_back_to_back_leave_nothing_behind(executor: str, when_busy: str) -> None:
    options = {"executor": executor, "max_in_flight": 2, "when_busy": when_busy}
    assert judge_row(options, 12, 1).complaints == []
