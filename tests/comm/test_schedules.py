"""Whatever happens to ranks, messages and the network, all survivors come to one verdict in time. In virtual time."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.harness.simulation import Simulation
from torture import exchanges
from torture.trials import run

N_SCHEDULES = 5_000


@pytest.mark.timeout(900)  # it is bound by the CPU
def test_whatever_goes_wrong_all_survivors_come_to_one_verdict_in_time_and_none_to_a_wrong_result() -> None:
    results = list(run(exchanges.make_trials(N_SCHEDULES, seed=1_000_000), n_processes=2))
    assert [result.complaints for _, result in results if result.complaints] == []
    counts = Counter((trial.kind, result.verdict) for trial, result in results)
    # The faults did strike; and what one repetition, a new connection or patience mends was mended.
    for kind in exchanges.KINDS:
        n_schedules = N_SCHEDULES // len(exchanges.KINDS)
        assert counts[kind, "raised"] == 0 if kind in exchanges.HARMLESS else counts[kind, "raised"] > n_schedules // 16
        assert kind == "quiet" or counts[kind, "quiet"] < 0.7 * n_schedules


@pytest.mark.parametrize("kind", exchanges.KINDS)
def test_a_schedule_is_the_same_in_every_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Simulation] = []

    def make(*args: object, **options: object) -> Simulation:
        made.append(Simulation(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(exchanges, "Simulation", make)
    results = [exchanges.judge_seed(7, kind), exchanges.judge_seed(8, kind), exchanges.judge_seed(7, kind)]
    first, _, again = made
    assert (first.n_events, first.n_messages, first.nbytes, first.now) == (
        again.n_events,
        again.n_messages,
        again.nbytes,
        again.now,
    )
    assert first.happened == again.happened and results[0] == results[2]
