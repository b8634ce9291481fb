"""Each mended fault of the exchanges, if it is put in again, breaks a promise in a simulated schedule."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any, NamedTuple

import pytest

from robust_dcp.comm import endings
from robust_dcp.comm import link as link_module
from robust_dcp.comm.endings import Waiting
from robust_dcp.comm.exchange import Exchange
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Operation
from robust_dcp.comm.relay import Passing
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
        9000076,
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
        7005562,
    ),
    Fault(
        "a failure at the deadline is told as the lateness of others",
        Operation,
        "_waits_until",
        "0.0 if self._own_error is None else 2 * patience.BEAT_SECONDS",
        "0.0",
        "deadline",
        9000153,
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
    Fault(
        "a rank that stood still takes the blame for one that closes before it has come",
        Operation,
        "problem_of_lost",
        "gave_up = has_closed and (peer in self._heard or is_silent) and detail",
        "gave_up = has_closed and detail",
        "suspended",
        9000200,
    ),
    Fault(
        "a relay goes on over new connections, though what was sent over the old ones is lost",
        Operation,
        "resume",
        "if exchange.interrupt is not None:",
        "if False:",
        "damaged",
        9008771,
    ),
    Fault(
        "the roll is called once, though the network is gone for a moment",
        Link,
        "break_up",
        "self.now + (operation.timeout_seconds if problem.is_loss or problem.is_elsewhere else 0.0)",
        "self.now",
        "outage",
        9000986,
    ),
    Fault(
        "a rank that answers the roll is called dead",
        link_module,
        "verdict",
        "if each[0] not in alive",
        "",
        "cut",
        9000001,
    ),
    Fault(
        "ranks that cannot connect at the same moment are called unreachable by one of them",
        link_module,
        "verdict",
        "if own_rank < rank and (rank, own_rank) in tried",
        "if own_rank < rank",
        "suspended",
        9000061,
    ),
    Fault(
        "the verdict is made before the others have answered",
        Link,
        "_call_roll",
        "problem.is_elsewhere or problem.missing",
        "False",
        "cut",
        9000004,
    ),
    Fault(
        "an operation that did not end does not go on over new connections",
        Link,
        "_apply",
        "operation.resume()",
        "pass",
        "cut",
        9000001,
    ),
    Fault(
        "an operation that was given up begins",
        Link,
        "begin",
        "end_message = self._ended_before.pop(key, None)",
        "end_message = None",
        "late",
        9000000,
    ),
    Fault(
        "who waits to connect does not look whether the others have given up",
        Link,
        "_looking",
        "if self.now - looked_seconds > _LOOK_SECONDS:",
        "if False:",
        "late",
        9000011,
    ),
    Fault(
        "ranks that wait in different operations wait for the timeout",
        Waiting,
        "is_elsewhere",
        "return not (",
        "return bool(",
        "crossed",
        9000000,
    ),
    Fault(
        "a rank that has not got a result yet is called one that is elsewhere",
        Waiting,
        "is_elsewhere",
        "self._has_completed(other) or other._has_completed(self)",
        "False",
        "outage at a result",
        9000098,
    ),
    Fault(
        "what arrives damaged is not asked for again",
        Operation,
        "_read_one",
        "if neighbour.is_damaged:",
        "if True:",
        "damaged",
        9000000,
    ),
    Fault(
        "who waits for others in a relay is called the one that does not get on",
        Exchange,
        "beat_for",
        "0.0 if self.is_waiting else now - self.moved_seconds",
        "now - self.moved_seconds",
        "frozen",
        9000021,
    ),
    Fault(
        "the silence of a rank begins anew in the next exchange",
        Operation,
        "_start",
        "if neighbour.unanswered_seconds and peer in exchange.neighbours:",
        "if False:",
        "frozen",
        9000001,
    ),
    Fault(
        "who works does not notice that a neighbour is silent",
        Operation,
        "beat",
        "if exchange.is_working and exchange.problem is None and not self.link.is_breaking:",
        "if False:",
        "absent",
        9000010,
    ),
    Fault(
        "the answer of a frozen rank is waited for as long as that takes",
        Operation,
        "_go_down",
        "exchange.silence_of(peer, now) < self.timeout_seconds / 2",
        "True",
        "frozen",
        9000001,
    ),
    Fault(
        "connections stay open if the store is lost while their end is agreed on, and a relay waits for ever",
        Link,
        "_call_roll",
        "self.connections = connections",
        "pass",
        "killed with the store",
        610001419,
    ),
    Fault(
        "a rank that tells of a dead one, and dies before it answers, takes along what it knew",
        link_module,
        "verdict",
        "if problem.is_told else ()",
        "if False else ()",
        "several killed",
        7009599,
    ),
    Fault(
        "ranks that only a lost one joins to the others hear of the end half a timeout later",
        Link,
        "say_waiting",
        "raise Problem.of_lost({}, may_return=True)",
        "pass",
        "long outage",
        62000587,
    ),
    Fault(
        "a rank is called missing that waits for a silent one, which should pass a result on to it",
        endings,
        "missing_ranks_error",
        "if rank in missing and there.operation == operation.key and",
        "if False and",
        "frozen",
        620000444,
    ),
    Fault(
        "a rank that waits for a silent one does not hear that the roll is called",
        Link,
        "say_waiting",
        'store.check(["answers"]) or self',
        "self",
        "frozen",
        720119012,
    ),
    Fault(
        "a rank that only a silent one joins to the others does not follow them to new connections",
        Operation,
        "_receive",
        "any(exchange.silence_of(each, now) > look_seconds / 2 for each in exchange.tree.neighbours)",
        "any(exchange.neighbours[each].heard_seconds is None for each in exchange.tree.neighbours)",
        "frozen",
        620000444,
    ),
    Fault(
        "the time to connect again passes while a process stands still",
        Operation,
        "_go_down",
        "if exchange.catching_up_seconds(now) and until < math.inf:",
        "if exchange.catching_up_seconds(now) and False:",
        "suspended",
        9004542,
    ),
    Fault(
        "the silence of a frozen rank begins anew when gloo has tried in vain to connect to it",
        Exchange,
        "count_from",
        "neighbour.unanswered_seconds = silence",
        "neighbour.unanswered_seconds = 0.0",
        "frozen",
        720000872,
    ),
    Fault(
        "the silence of a killed rank begins anew where another one calls the roll and is killed then",
        Exchange,
        "count_from",
        "min(silence, max(",
        "min(0.0, max(",
        "several killed",
        1001336,
    ),
    Fault(
        "a rank that cannot connect in a relay has dropped its connections, and does not answer why",
        Passing,
        "_connect",
        "if str(error).startswith(CONNECTING_FAILED):",
        "if False:",
        "cut",
        9008757,
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
