"""A few of the schedules of faults, and of the kills of processes, that the modules of ``torture`` run by thousands."""

from __future__ import annotations

import itertools

import pytest

from torture.exchanges import run_many
from torture.kills import WHEN, make_trial, run_trial
from torture.schedules import KINDS, complaints


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_goes_wrong_all_survivors_come_to_one_verdict_in_time_and_none_to_a_wrong_result(kind: str) -> None:
    runs = run_many(first_seed=100, n_trials=40, kind=kind)
    broken = {run.schedule.seed: complaints(run) for run in runs}
    assert not {seed: found for seed, found in broken.items() if found}
    raised = {run.schedule.seed: [str(each.error) for each in run.outcomes if each.error] for run in runs}
    raised = {seed: messages for seed, messages in raised.items() if messages}
    # The faults did strike; and what one repetition or a new connection mends was mended.
    assert sum(len(run.network.happened) > 0 for run in runs) > 10
    assert not raised if kind in ("harmless", "cut") else len(raised) > 5


@pytest.mark.parametrize("when", WHEN)
def test_a_process_that_is_killed_is_named_by_all_others(when: str) -> None:
    trials = (trial for trial in map(make_trial, itertools.count(1)) if trial.when == when)
    for trial in itertools.islice(trials, 3):
        complaints_of_trial = run_trial(trial).complaints
        # How many seconds it takes is for a quiet machine.
        assert not [each for each in complaints_of_trial if " took " not in each], trial
