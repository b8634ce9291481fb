"""Each mended fault of the exchanges, if it is put in again, breaks a promise in a simulated schedule."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any, NamedTuple

import pytest

from robust_dcp.comm.exchange import Exchange
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Operation
from torture.exchanges import judge_seed


class Fault(NamedTuple):
    """A place in the sources, what stands there instead, and a schedule in which that shows."""

    what: str
    owner: Any
    name: str
    mended: str
    broken: str
    kind: str
    seed: int


FAULTS = [
    Fault(
        "a machine that was suspended: its ranks take each other for silent",
        Exchange,
        "catching_up_seconds",
        "if seconds > self._timeout_seconds / 2:",
        "if seconds > 1e9:",
        "suspended",
        9000000,
    ),
    Fault(
        "the time in which a process stood still counts as work without progress",
        Exchange,
        "catching_up_seconds",
        "self.moved_seconds = min(now, self.moved_seconds + seconds)",
        "pass",
        "suspended",
        9000004,
    ),
    Fault(
        "a rank that comes late to an operation does not hear that it was given up",
        Link,
        "_apply",
        "self._ended_before[key] = end_message",
        "pass",
        "late",
        9000000,
    ),
    Fault(
        "operations in which ranks waited for each other have other numbers afterwards",
        Link,
        "_apply",
        "self._occurrences[key.operation] = key.occurrence + 1",
        "pass",
        "crossed",
        9000000,
    ),
    Fault(
        "a rank that had its result before the others skips the operation after it",
        Link,
        "_apply",
        "end_message.are_crossed and ending",
        "len(end_message.operations) > 1 and ending",
        "several killed",
        7000085,
    ),
    Fault(
        "a failure at the deadline is told as the lateness of others",
        Operation,
        "_waits_until",
        "0.0 if self._own_error is None else 2 * patience.BEAT_SECONDS",
        "0.0",
        "deadline",
        9000005,
    ),
    Fault(
        "a damaged payload is taken as it is",
        Operation,
        "_read_one",
        "if crc32 != frame.payload_crc32:",
        "if False:",
        "damaged",
        9000007,
    ),
]


def put_in(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the function by one with the fault."""
    function = getattr(fault.owner, fault.name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(fault.mended) == 1, f"{fault.name} has changed: {fault.mended}"
    module = sys.modules[function.__module__]
    namespace: dict[str, Any] = {}
    code = compile(source.replace(fault.mended, fault.broken), module.__file__ or "", "exec")
    exec(code, vars(module), namespace)
    monkeypatch.setattr(fault.owner, fault.name, namespace[fault.name])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_mended_fault_that_is_put_in_again_breaks_a_promise(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(fault, monkeypatch)
    # Once the sources have changed, another of the next schedules shows it.
    seeds = range(fault.seed, fault.seed + 40)
    seed = next((seed for seed in seeds if judge_seed(seed, fault.kind).complaints), None)
    assert seed is not None
    monkeypatch.undo()
    assert judge_seed(seed, fault.kind).complaints == []
