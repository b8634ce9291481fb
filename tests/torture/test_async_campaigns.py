"""A small part of the campaigns for async saves that ``make torture`` runs, and that they notice what they look for."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import robust_dcp
from tests.harness.ranks import run_ranks, values
from torture.async_kills import Trial, run_trial
from torture.back_to_back import Counts, grown, run_way
from torture.back_to_back import Way as WayOfSaving
from torture.generations import files_not_named, generation_in, make_state
from torture.torn_copies import WAYS, be_rank


@pytest.mark.parametrize(
    "trial",
    [
        Trial(1, 3, 1, "thread", "trainer", 4, "lazy", 2),
        Trial(2, 2, 0, "thread", "trainer", 16, "waves", 1),
        Trial(3, 2, 1, "process", "writer", 3, "full", 1),
        Trial(4, 2, 0, "process", "trainer", 3, "lazy", 1),
    ],
    ids=lambda trial: trial.kind,
)
def test_whoever_is_killed_during_an_async_save_no_checkpoint_is_lost(trial: Trial) -> None:
    assert run_trial(trial).complaints == []


def test_a_checkpoint_of_two_generations_is_noticed_and_so_is_a_file_that_is_left(tmp_path: Path) -> None:
    state = make_state([0], 3)
    path = str(tmp_path / "checkpoint")
    robust_dcp.save(state, checkpoint_id=path)
    assert generation_in(path, [0], [2, 3]) == 3
    assert files_not_named(path) == []
    state["strided.0"] = make_state([0], 2)["strided.0"]
    robust_dcp.save(state, checkpoint_id=path)
    assert "not everything is of one of the generations" in str(generation_in(path, [0], [2, 3]))
    (tmp_path / "checkpoint" / "__0_9.distcp").touch()
    assert files_not_named(path) == ["__0_9.distcp"]


def test_no_copy_is_torn_while_a_thread_writes_all_the_time(tmp_path: Path) -> None:
    ways = [WAYS[2], WAYS[4]]  # lazy by a thread, full by a process
    for counts, torn in values(run_ranks(2, be_rank, 10, 1, str(tmp_path), ways, timeout_seconds=300)):
        assert counts == {str(way): 5 for way in ways} and torn == []


def give_tensors_back_too_early(directory: str) -> int:
    async_save = importlib.import_module("robust_dcp.asynchronous")
    copy = async_save._Staged.copy

    def free_and_copy(staged: Any) -> None:
        staged._free()
        copy(staged)

    async_save._Staged.copy = free_and_copy
    torch.set_num_threads(1)
    return len(be_rank(5, 1, directory, [WAYS[2]])[1])


def test_tensors_that_are_given_back_too_early_are_noticed(tmp_path: Path) -> None:
    assert max(values(run_ranks(2, give_tensors_back_too_early, str(tmp_path), timeout_seconds=300))) > 0


@pytest.mark.parametrize("way", [WayOfSaving("thread", 2, "skip"), WayOfSaving("process", 2, "wait")], ids=str)
def test_saves_back_to_back_leave_nothing_behind(way: WayOfSaving) -> None:
    counts = run_way(way, 12, 1)
    assert grown(counts) == []
    assert counts[-1].committed + counts[-1].skipped == 12
    assert counts[-1].processes == (way.executor == "process")


def test_what_has_grown_is_noticed() -> None:
    before = Counts(1, 0, 300, 200, 0, 20, 9, 1, 0)
    for name, more in (
        ("rss", 100),
        ("writer_rss", 100),
        ("shared", 30),
        ("files", 1),
        ("threads", 1),
        ("processes", 1),
    ):
        after = dataclasses.replace(before, **{name: getattr(before, name) + more})
        assert [words.partition(":")[0] for words in grown([before, after])] == [name]
    assert grown([before, dataclasses.replace(before, left_behind=2)]) == ["2 files are no part of a checkpoint"]
