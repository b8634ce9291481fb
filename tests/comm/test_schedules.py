"""A campaign of ``torture`` in a short form: exchanges on a simulated network."""

from __future__ import annotations

from collections import Counter

from tests.harness.network import quick
from torture import exchanges
from torture.trials import run


def test_whatever_goes_wrong_all_survivors_come_to_one_verdict_in_time_and_none_to_a_wrong_result() -> None:
    with quick():
        results = list(run(exchanges.make_trials(18 * len(exchanges.KINDS), seed=100), at_once=8))
    assert [result.complaints for _, result in results if result.complaints] == []
    counts = Counter((trial.kind, result.verdict) for trial, result in results)
    # The faults did strike; and what one repetition or a new connection mends was mended.
    for kind in exchanges.KINDS:
        assert counts[kind, "not struck"] < 14
        assert counts[kind, "raised"] == 0 if kind in ("harmless", "cut") else counts[kind, "raised"] > 2
