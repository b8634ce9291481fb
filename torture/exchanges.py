"""Random exchanges among ranks in virtual time: ``python -m torture.exchanges --trials 200000 --seed 1``.

A schedule says what the ranks do, and what happens to them, to their network and to their store, and when. It depends
on its seed only, and so does all that follows from it. The state machines are the real ones; the network, the store and
the clock are those of :mod:`tests.harness.simulation`.
"""

from __future__ import annotations

import os
import random
import re
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from robust_dcp.comm import Bucket, Offer, Relay, Stopped, patience
from robust_dcp.comm.frames import FRAME_NBYTES, Frame, Kind
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Operation, Work
from robust_dcp.comm.relay import ALL_ROUNDS, Passing
from robust_dcp.comm.tree import Tree
from robust_dcp.comm.waits import Steps
from robust_dcp.errors import ExchangeError, ExchangeTimeout, RobustCheckpointError
from tests.harness.simulation import Simulation
from torture.trials import Result, Trial, main

__all__ = ["KINDS", "judge", "make_schedule", "make_trials"]

TIMEOUT_SECONDS = 8.0
OPERATIONS = ("save 1", "save 2")
CROSSED = "the operations before that are not the same on all ranks"
VERBS = ("agree", "agree", "gather", "broadcast", "scatter", "relay")

_NAMED_SECONDS = 3.0
"""How long survivors need at most to name a rank that was killed while they were connected to it."""

_SILENT_SECONDS = TIMEOUT_SECONDS + 5.0
"""How long survivors need at most to name a rank that is silent, or was killed before they were connected to it."""

_CONNECTING_SECONDS = 10.0
"""How much longer that may take where ranks pass on tensors: gloo tries for so long to connect them."""

_LIMIT_SECONDS = 300.0


@dataclass(frozen=True)
class Step:
    """One exchange.

    Attributes:
        verb: what it does.
        root: the coordinator.
        nbytes: the size of each message.
        failing: the rank whose own work raises, or ``None``.
        seconds: how long the work of each rank takes.
        is_stuck: it does not get on meanwhile.
    """

    verb: str
    root: int
    nbytes: int
    failing: int | None
    seconds: tuple[float, ...]
    is_stuck: bool = False


@dataclass
class Schedule:
    """The plan of a run.

    Attributes:
        faults: what happens when: seconds, the name of a method of the simulation, and its arguments.
        starts: when each rank begins.
        store_host: the rank that hosts the store, or ``None``. If it is killed, the store is gone.
        leaving: a rank, and after how many steps of the first operation it raises between two exchanges.
        elsewhere: a rank that does something else, and from which step of the first operation on.
        damaged: which of the messages that have passed between two ranks is damaged, and how often.
        absent: a rank that never comes.
        outage_at_result: which of the results that are on their way down finds the network gone, and for how long.
        at_once: both operations run at the same time.
        stuck: a rank whose own work does not get on, in which step of the first operation, and whether it gets on.
        deadline_seconds: how long the first operation may take.
        late: a rank, and how much later than the others it begins the first operation.
        beside_seconds: how long the work of the second operation takes.
        crossed: before both operations these ranks begin the second one, while the others begin the first.
    """

    seed: int
    kind: str
    size: int
    steps: tuple[Step, ...]
    starts: tuple[float, ...]
    faults: list[tuple[float, str, tuple[Any, ...]]] = field(default_factory=list)
    store_host: int | None = None
    leaving: tuple[int, int] | None = None
    elsewhere: tuple[int, int] | None = None
    damaged: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    absent: int | None = None
    outage_at_result: tuple[int, float] | None = None
    at_once: bool = False
    stuck: tuple[int, int, bool] | None = None
    deadline_seconds: float | None = None
    late: tuple[int, float] | None = None
    beside_seconds: float = 0.0
    crossed: frozenset[int] = frozenset()

    def names(self, rank: int) -> list[tuple[str, ...]]:
        """The names of the operations of ``rank``, one after the other, for each of its threads."""
        if self.crossed:
            return [(OPERATIONS[rank in self.crossed], *OPERATIONS)]
        return [(name,) for name in OPERATIONS] if self.at_once else [OPERATIONS]


@dataclass
class Outcome:
    """How one operation went on one rank: its steps that ended well, its error, when it began and ended."""

    n_steps: int = 0
    error: BaseException | None = None
    wrong: str = ""
    operation: Operation | None = None
    began: float = 0.0
    ended: float | None = None


def make_schedule(seed: int, kind: str) -> Schedule:
    """The schedule with this seed."""
    rng = random.Random(f"schedule {seed} {kind}")
    # What goes wrong among many ranks nearly always does among few, and that costs a tenth.
    size = (
        rng.choice([2, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 8])
        if rng.random() < 0.97
        else rng.choice([11, 11, 11, 16, 31, 64])
    )
    steps = tuple(_step(rng, size) for _ in range(rng.randint(1, 4)))
    starts = tuple(rng.choice([0.0, rng.uniform(0, 0.05), rng.uniform(0, 3)]) for _ in range(size))
    schedule = Schedule(seed, kind, size, steps, starts)
    victim, when = rng.randrange(size), rng.uniform(0, 4)
    FAULTS[kind](schedule, rng, victim, when)
    return schedule


def _step(rng: random.Random, size: int) -> Step:
    root = rng.choice([0, 0, 0, rng.randrange(size)])
    failing = rng.randrange(size) if rng.random() < 0.08 else None
    longest = rng.choice([0.0, 0.0, 0.1, 2.0])
    seconds = tuple(rng.uniform(0, longest) for _ in range(size))
    return Step(rng.choice(VERBS), root, rng.choice([0, 10, 3000]), failing, seconds)


def _edge(rng: random.Random, schedule: Schedule) -> tuple[int, int]:
    root = rng.choice(schedule.steps).root
    child = rng.choice([rank for rank in range(schedule.size) if rank != root])
    return child, int(Tree(child, schedule.size, root).parent or 0)


def _quiet(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    """Nothing happens; some ranks are late, or work for long."""


def _damaged(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    for _ in range(rng.randint(1, 3)):
        a, b = _edge(rng, schedule)
        schedule.damaged[rng.choice([(a, b), (b, a)])] = rng.randrange(12), 1


def _damaged_always(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    a, b = _edge(rng, schedule)
    schedule.damaged[rng.choice([(a, b), (b, a)])] = rng.randrange(1, 12), 1 << 30


def _cut(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    for _ in range(rng.choice([1, 1, 2])):
        schedule.faults.append((rng.uniform(0, 4), "cut", _edge(rng, schedule)))


def _killed(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    schedule.faults.append((when, "kill", (victim,)))


def _killed_store(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    schedule.store_host = rng.choice([victim, 0])
    schedule.faults.append((when, "kill", (victim,)))


def _several_killed(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    for each in {victim, rng.randrange(schedule.size)}:
        schedule.faults.append((rng.choice([when, rng.uniform(0, 4)]), "kill", (each,)))


def _paused(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    schedule.faults.append((when, "freeze", (victim, rng.uniform(0.1, 0.45 * TIMEOUT_SECONDS))))


def _frozen(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    schedule.faults.append((when, "freeze", (victim, rng.uniform(2.5, 4) * TIMEOUT_SECONDS)))


def _outage(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    schedule.starts = tuple(start / 3 for start in schedule.starts)
    schedule.steps = tuple(replace(step, seconds=tuple(each / 20 for each in step.seconds)) for step in schedule.steps)
    side = rng.sample(range(schedule.size), rng.randint(1, schedule.size - 1))
    with_store = [-1] if rng.random() < 0.5 else []
    # TCP tries again after up to twice that time, and to connect takes several messages.
    longest = 5.0 if when > 1.5 else 2.5
    schedule.faults.append((when, "part", ([*side, *with_store], rng.uniform(0.2, longest))))


def _outage_at_result(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    _outage(schedule, rng, victim, when)
    schedule.faults = []
    # Ranks of a relay may be connecting when its result is sent. If the network goes then, it may be lost for good.
    schedule.steps = _without_relays(schedule.steps)
    n_results = 2 * len(schedule.steps) * (schedule.size - 1)
    schedule.outage_at_result = rng.randrange(n_results), rng.uniform(3.0, 5.0)


def _long_outage(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    schedule.faults.append((when, "part", ([victim], rng.uniform(2, 4) * TIMEOUT_SECONDS)))


def _left(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    schedule.leaving = victim, rng.randint(1, len(schedule.steps))


def _elsewhere(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    schedule.elsewhere = victim, rng.randrange(len(schedule.steps))


def _absent(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    schedule.absent = victim


def _without_relays(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    return tuple(replace(step, verb="agree" if step.verb == "relay" else step.verb, failing=None) for step in steps)


def _stuck(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    # The work of a relay is to wait for others: there it is never one rank alone that does not get on.
    schedule.steps = _without_relays(schedule.steps)
    schedule.stuck = victim, rng.randrange(len(schedule.steps)), False


def _deadline(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    _stuck(schedule, rng, victim, when)
    schedule.stuck = victim, rng.randrange(len(schedule.steps)), True
    schedule.deadline_seconds = rng.uniform(6, 20)


def _together(schedule: Schedule) -> None:
    """Let all ranks begin at once, and do little."""
    schedule.starts = tuple(start / 100 for start in schedule.starts)
    schedule.steps = tuple(
        replace(step, seconds=tuple(each / 20 for each in step.seconds)) for step in _without_relays(schedule.steps)
    )


def _late(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    _together(schedule)
    schedule.late = victim, TIMEOUT_SECONDS + rng.uniform(4, 6)
    schedule.at_once = rng.random() < 0.7
    schedule.beside_seconds = 3 * TIMEOUT_SECONDS if schedule.at_once else 0.0


def _crossed(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    _together(schedule)
    schedule.crossed = frozenset(rng.sample(range(schedule.size), rng.randint(1, schedule.size - 1)))


def _suspended(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    longest = rng.uniform(0.6, 4) * TIMEOUT_SECONDS
    for rank in range(schedule.size):
        schedule.faults.append((when, "freeze", (rank, longest + rng.uniform(0, 0.5))))


def _at_once(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    schedule.at_once = True
    rng.choice([_quiet, _cut, _damaged, _left, _paused])(schedule, rng, victim, when)


def _anything(schedule: Schedule, rng: random.Random, victim: int, when: float) -> None:
    schedule.store_host = rng.choice([None, None, 0])
    for fault in rng.sample([_cut, _damaged, _killed, _paused, _frozen, _outage, _left, _elsewhere], 3):
        fault(schedule, rng, rng.randrange(schedule.size), rng.uniform(0, 6))


FAULTS: dict[str, Callable[[Schedule, random.Random, int, float], None]] = {
    "quiet": _quiet,
    "damaged": _damaged,
    "damaged always": _damaged_always,
    "cut": _cut,
    "killed": _killed,
    "killed with the store": _killed_store,
    "several killed": _several_killed,
    "paused": _paused,
    "frozen": _frozen,
    "outage": _outage,
    "outage at a result": _outage_at_result,
    "long outage": _long_outage,
    "left": _left,
    "elsewhere": _elsewhere,
    "absent": _absent,
    "stuck": _stuck,
    "deadline": _deadline,
    "late": _late,
    "crossed": _crossed,
    "suspended": _suspended,
    "at once": _at_once,
    "anything": _anything,
}
KINDS = tuple(FAULTS)

HARMLESS = ("quiet", "damaged", "cut", "paused", "suspended", "outage", "outage at a result")
"""What happens there is mended, so no operation fails because of it."""


def make_trials(n_trials: int, seed: int) -> Iterator[Trial]:
    """Schedules of all kinds in turn."""
    for number in range(seed, seed + n_trials):
        kind = KINDS[number % len(KINDS)]
        yield Trial(kind, f"seed {number}", partial(judge_seed, number, kind))


def judge_seed(seed: int, kind: str) -> Result:
    """Run the schedule with this seed, and say what broke a promise."""
    return judge(make_schedule(seed, kind))


# What the ranks do.


def _be_rank(schedule: Schedule, link: Link, outcomes: dict[str, Outcome], names: tuple[str, ...]) -> Steps[None]:
    for place, name in enumerate(names):
        is_first = name == OPERATIONS[0]
        if is_first and schedule.late is not None and schedule.late[0] == link.rank:
            yield from link.pause(schedule.late[1])
        outcome = outcomes[CROSSED if schedule.crossed and place == 0 else name]
        outcome.began = link.now
        operation = Operation(link, name, TIMEOUT_SECONDS, schedule.deadline_seconds if is_first else None)
        outcome.operation = operation  # or it would depend on the garbage collector for how long it exists
        try:
            for number, step in enumerate(schedule.steps):
                if is_first and schedule.leaving == (link.rank, number):
                    error = ValueError("between two exchanges")
                    yield from operation.leave(error)
                    raise error
                elsewhere = is_first and schedule.elsewhere == (link.rank, number)
                if not is_first and number == 0 and schedule.beside_seconds:
                    step = replace(step, seconds=(schedule.beside_seconds,) * schedule.size)
                if is_first and schedule.stuck is not None and schedule.stuck[:2] == (link.rank, number):
                    step = replace(step, seconds=(60.0,) * schedule.size, is_stuck=not schedule.stuck[2])
                outcome.wrong = outcome.wrong or (
                    yield from _take_step(operation, step, f"other {number}" if elsewhere else f"step {number}")
                )
                outcome.n_steps += 1
        except GeneratorExit:
            raise
        except BaseException as error:
            outcome.error = error
        outcome.ended = link.now


def _take_step(operation: Operation, step: Step, phase: str) -> Steps[str]:
    """Run one exchange. Returns what is wrong with its result, or an empty text."""
    failing, rank = step.failing, operation.link.rank
    try:
        result, expected = yield from _exchange(operation, step, phase)
    except ExchangeError:
        raise
    except RobustCheckpointError as error:
        if failing is None or [each.rank for each in error.rank_failures] != [failing]:
            raise
        return ""
    if failing is not None:
        return f"{phase} succeeded on rank {rank}, though rank {failing} failed"
    return "" if result == expected else f"{phase}: {str(result)[:200]} instead of {str(expected)[:200]}"


def _work(operation: Operation, step: Step, phase: str, value: Any) -> Callable[[], Steps[Any]]:
    def steps() -> Steps[Any]:
        link = operation.link
        end = link.now + step.seconds[link.rank]
        while link.now < end:
            operation.stop_if_announced()
            if not step.is_stuck:
                operation.note_progress()
            yield from link.pause(min(0.4, end - link.now))
        if step.failing == link.rank:
            raise ValueError(phase)
        return value

    return steps


def _exchange(operation: Operation, step: Step, phase: str) -> Steps[tuple[object, object]]:
    """Run the exchange. Returns its result on this rank, and the expected result."""
    link, size = operation.link, operation.link.size
    rank, tree = link.rank, Tree(link.rank, link.size, step.root)

    def text(of: int) -> bytes:
        return struct.pack("<I", of) + bytes([of % 7]) * step.nbytes

    def cut_up(payload: bytes | bytearray | memoryview) -> dict[int, bytes]:
        length = 4 + step.nbytes
        parts = [bytes(payload[at : at + length]) for at in range(0, len(payload), length)]
        return {struct.unpack_from("<I", part)[0]: part for part in parts}

    if step.verb == "agree":
        offer = Offer(bytes([rank]) * 16, bytes(16), rank + 1, 1)
        agreement, _, _ = yield from operation.run(
            "agree", phase, step.root, Work(_work(operation, step, phase, offer))
        )
        found = agreement.n_ranks, agreement.lowest, agreement.highest, agreement.counts[0]
        return found, (size, 1, size, size)
    if step.verb == "gather":
        gathered: list[dict[int, bytes]] = []

        def merge(own: bytes, below: list[Any]) -> bytes:
            return b"".join([own, *map(bytes, below)])

        def open_all(own: bytes, below: list[Any]) -> None:
            gathered.append(cut_up(merge(own, below)))

        work = Work(_work(operation, step, phase, text(rank)), merge, open_all)
        yield from operation.run("gather", phase, step.root, work)
        return gathered, [{each: text(each) for each in range(size)}] if rank == step.root else []
    if step.verb == "broadcast":
        work = Work(_work(operation, step, phase, text(step.root)), reply=lambda own, below: own)
        _, _, payload = yield from operation.run("broadcast", phase, step.root, work)
        return bytes(payload), text(step.root)
    if step.verb == "scatter":

        def share(payload: Any, child: int) -> bytes:
            below = {*tree.ranks_below(child)}
            return b"".join(part for each, part in cut_up(payload).items() if each in below)

        everything = b"".join(map(text, range(size)))
        work = Work(_work(operation, step, phase, everything), reply=lambda own, below: own, share=share)
        _, _, payload = yield from operation.run("scatter", phase, step.root, work)
        return cut_up(payload)[rank], text(rank)
    return (yield from _relay(operation, step, phase))


def _relay(operation: Operation, step: Step, phase: str) -> Steps[tuple[object, object]]:
    """Up to three ranks pass on a bucket to all others, in a round each. Returns what came from whom, and should."""
    link, size = operation.link, operation.link.size
    n_buckets = min(3, size)
    buckets = [
        Bucket(of, (of, *(each for each in range(size) if each != of)), 1 + step.nbytes) for of in range(n_buckets)
    ]
    found: dict[int, int] = {}

    def arrived(of: int, tensor: torch.Tensor) -> None:
        found[of] = int(tensor[0]) if tensor[0] == tensor[-1] else -1

    relay = Relay(
        buckets,
        lambda of: torch.full((buckets[of].nbytes,), of, dtype=torch.uint8),
        lambda of: torch.empty(buckets[of].nbytes, dtype=torch.uint8),
        arrived,
    )
    first_round = 0
    for n_left in (3, 2, 1, 0):
        passing = Passing(relay, operation, first_round, is_last=n_left == 0)
        both = partial(_pass_after_work, passing, first_round, _work(operation, step, phase, None))
        agreement, _, _ = yield from operation.run("relay", phase, step.root, Work(both, interrupt=passing.break_off))
        first_round = agreement.lowest - 1
        if first_round == ALL_ROUNDS:
            return found, {of: of for of in range(n_buckets) if of != link.rank}
    raise ExchangeTimeout(f"{phase}: ranks lost each other")


def _pass_after_work(passing: Passing, first_round: int, own_work: Callable[[], Steps[Any]]) -> Steps[Any]:
    try:
        yield from own_work()
    except Stopped:
        return Offer(value=1 + first_round)
    return (yield from passing.run())


# What has to hold.


def judge(schedule: Schedule) -> Result:
    """Run a schedule, and say what broke a promise, and what happened."""
    simulation = Simulation(schedule.size, schedule.seed, store_host=schedule.store_host)
    outcomes = [{name: Outcome() for name in (CROSSED, *OPERATIONS)} for _ in range(schedule.size)]
    for rank, link in enumerate(simulation.links):
        if rank == schedule.absent:
            continue
        for names in schedule.names(rank):
            simulation.start(rank, _be_rank(schedule, link, outcomes[rank], names), schedule.starts[rank])
    for when, method, arguments in schedule.faults:
        simulation.at(when, getattr(simulation, method), *arguments)
    if schedule.damaged:
        simulation.damage = _damager(simulation, dict(schedule.damaged))
    if schedule.outage_at_result is not None:
        simulation.damage = _outage_maker(simulation, *schedule.outage_at_result)
    simulation.run(_LIMIT_SECONDS)
    broken = list(complaints(schedule, outcomes, simulation))
    broken += nothing_left_open(simulation)
    has_raised = any(each.error is not None for outcome in outcomes for each in outcome.values())
    struck = "raised" if has_raised else "mended" if simulation.happened else "quiet"
    return Result(broken and [*broken, f"happened: {simulation.happened}"], verdict=struck)


def _damager(
    simulation: Simulation, damaged: dict[tuple[int, int], tuple[int, int]]
) -> Callable[[int, int, bytes], bytes]:
    def damage(sender: int, receiver: int, content: bytes) -> bytes:
        number, times = damaged.get((sender, receiver), (0, 0))
        if not times or len(content) < 4:
            return content
        damaged[sender, receiver] = (number - 1, times) if number > 0 else (0, times - 1)
        if number > 0:
            return content
        simulation.happened.append(f"{simulation.now:.2f}: what {sender} sends to {receiver} is damaged")
        middle = len(content) // 2
        return content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]

    return damage


def _outage_maker(simulation: Simulation, number: int, seconds: float) -> Callable[[int, int, bytes], bytes]:
    n_results = 0

    def cut_off(sender: int, receiver: int, content: bytes) -> bytes:
        nonlocal n_results
        if len(content) == FRAME_NBYTES and Frame.decode(content, simulation.links[sender].secret).kind == Kind.DOWN:
            n_results += 1
            if n_results == number + 1:
                simulation.part([receiver, -1], seconds)
        return content

    return cut_off


def complaints(schedule: Schedule, outcomes: list[dict[str, Outcome]], simulation: Simulation) -> Iterator[str]:
    """What should not have happened."""
    killed = simulation.killed
    survivors = [rank for rank in simulation.alive() if rank != schedule.absent]
    if schedule.crossed:
        yield from _of_crossed({rank: outcomes[rank][CROSSED] for rank in survivors})
    for name in OPERATIONS:
        of_rank = {rank: outcomes[rank][name] for rank in survivors}
        late = [rank for rank, outcome in of_rank.items() if outcome.ended is None]
        if late:
            yield f"ranks {late} have not ended {name!r}"
            return
        for rank, outcome in of_rank.items():
            if outcome.wrong:
                yield f"rank {rank} has a wrong result in {name!r}: {outcome.wrong}"
            has_left = schedule.leaving is not None and schedule.leaving[0] == rank
            if not isinstance(outcome.error, (ExchangeError, ValueError if has_left else ExchangeError, type(None))):
                yield f"rank {rank} raised {outcome.error!r} in {name!r}"
        errors = {rank: outcome.error for rank, outcome in of_rank.items() if outcome.error is not None}
        if schedule.kind in (*HARMLESS, "crossed") and errors:
            yield f"{name!r} raised, though nothing stays broken: {_shown(errors)}"
        has_store = schedule.store_host not in {*killed, *simulation.thaws}
        has_left = schedule.leaving is not None
        # Who does not reach the store for long cannot agree with the others.
        limit = 0.0 if schedule.kind == "anything" else TIMEOUT_SECONDS
        cut_off = {rank for each in simulation.outages for rank in each.side if each.end - each.begin > limit}
        cut_off |= {rank for rank in simulation.thaws if schedule.kind == "anything"}
        told = {
            rank: error for rank, error in errors.items() if isinstance(error, ExchangeError) and rank not in cut_off
        }
        # Where only some have got the last result, the others come to what follows when that is over.
        were_split = any(
            0 < sum(o[n].error is not None for o in outcomes) < len(outcomes) for n in OPERATIONS if n < name
        )
        if len({_verdict(error) for error in told.values()}) > 1 and has_store and not were_split:
            yield f"more than one verdict in {name!r}: {_shown(errors)}"
        # The last exchange may end on one rank and then break on others. No protocol can avoid that.
        early = [rank for rank in errors if of_rank[rank].n_steps < len(schedule.steps) - 1]
        if early and len(errors) < len(survivors):
            yield f"some have finished {name!r}, but ranks {early} have not: {_shown(errors)}"
        if schedule.late is not None:
            yield from _of_late_rank(schedule.late[0], name, of_rank, errors)
        if not were_split:
            of_killed = [outcomes[rank][name] for rank in killed]
            is_clear = has_store and not has_left
            yield from _of_named_ranks(schedule, name, of_rank, errors, simulation, of_killed, is_clear)


def _of_late_rank(late: int, name: str, of_rank: dict[int, Outcome], errors: dict[int, BaseException]) -> Iterator[str]:
    """The others have given up an operation before one rank begins it: that ends there at once, and not the next."""
    if name != OPERATIONS[0]:
        if errors:
            yield f"{name!r} raised because a rank came late to the operation before: {_shown(errors)}"
        return
    named = {rank: getattr(error, "missing_ranks", None) for rank, error in errors.items()}
    if any(named.get(rank) != [late] for rank in of_rank):
        yield f"not all name rank {late}, which has not come to {name!r}: {_shown(errors)}"
    seconds = (of_rank[late].ended or 0.0) - of_rank[late].began
    if seconds > 2.0:
        yield f"{name!r} took {seconds:.1f} s on rank {late}, though the others had given it up before it came"


def _of_crossed(outcomes: dict[int, Outcome]) -> Iterator[str]:
    """Ranks waited for each other in different operations: all hear that."""
    texts = {str(outcome.error) for outcome in outcomes.values()}
    if len(texts) > 1 or not texts.pop().startswith("the ranks are in different operations: "):
        yield f"ranks in different operations raised {sorted(str(outcome.error) for outcome in outcomes.values())}"


def _of_named_ranks(
    schedule: Schedule,
    name: str,
    of_rank: dict[int, Outcome],
    errors: dict[int, BaseException],
    simulation: Simulation,
    of_killed: list[Outcome],
    is_clear: bool,
) -> Iterator[str]:
    """Who was named, and when."""
    kind, killed = schedule.kind, simulation.killed
    has_relay = any(step.verb == "relay" for step in schedule.steps)
    silent_seconds = _SILENT_SECONDS + (_CONNECTING_SECONDS if has_relay else 0.0)
    is_dead = kind in ("killed", "several killed", "killed with the store")
    frozen = [arguments[0] for _, method, arguments in schedule.faults if method == "freeze"]
    if kind == "deadline" and any("deadline" not in str(error) for error in errors.values()):
        yield f"no deadline in {_shown(errors)}"
    is_slow = kind == "stuck" and name == OPERATIONS[0]
    if (kind in ("killed", "several killed", "frozen") and is_clear) or kind == "absent" or is_slow:
        guilty = {*killed, *frozen, *(() if schedule.absent is None else (schedule.absent,))}
        guilty |= {schedule.stuck[0]} if schedule.stuck is not None else set()
        # Who was connecting to a frozen rank meanwhile may come to the next operation when its time is over.
        first = min((outcome.began for outcome in of_rank.values()), default=0.0)
        guilty |= {rank for rank, outcome in of_rank.items() if outcome.began - first > TIMEOUT_SECONDS}
        for rank, error in errors.items():
            if rank in frozen and of_rank[rank].n_steps == len(schedule.steps) - 1 and len(errors) == 1:
                continue  # the others have the result, and nobody is left who could give it
            missing = getattr(error, "missing_ranks", None)
            if not isinstance(error, ExchangeTimeout) or not missing or not set(missing) <= guilty:
                yield f"rank {rank} names others than {guilty} in {name!r}: {error!r}"[:600]
    if kind == "stuck" and is_slow and not errors:
        yield f"{name!r} has ended well, though rank {schedule.stuck} was stuck"
    if is_dead and errors and not schedule.at_once:
        began = max(outcome.began for outcome in of_rank.values())
        since = max([began, *(at for at in killed.values())])
        last = max(of_rank[rank].ended or 0.0 for rank in errors)
        were_connected = name == OPERATIONS[0] and not has_relay and min(killed.values()) > max(schedule.starts) + 0.5
        limit = silent_seconds + patience.VERDICT_SECONDS * (len(killed) - 1)  # one may die while it makes the verdict
        if were_connected and kind != "killed with the store":
            limit = _NAMED_SECONDS * len(killed)  # they may be named one after the other
            # Who was killed before it had a result that the others have may have got it and ended: it may come back.
            if min(dead.n_steps for dead in of_killed) < min(outcome.n_steps for outcome in of_rank.values()):
                limit += patience.RECONNECT_SECONDS
        if last - since > limit:
            yield f"{name!r} took {last - since:.1f} s after the kill, more than {limit}: {_shown(errors)}"
    if kind in ("frozen", "long outage", "absent") and errors:
        names = [arguments[0] for _, method, arguments in schedule.faults if method in ("freeze", "part")]
        away = {schedule.absent, *frozen, *(each for each in names if isinstance(each, int))}
        for each in names:
            away |= set(each) if isinstance(each, list) else set()
        others = [rank for rank in errors if rank not in away]
        since = max([outcome.began for outcome in of_rank.values()] + [when for when, _, _ in schedule.faults])
        longest = max((of_rank[rank].ended or 0.0 for rank in others), default=0.0) - since
        if longest > silent_seconds:
            yield f"{name!r} took {longest:.1f} s after a rank fell silent: {_shown(errors)}"


def nothing_left_open(simulation: Simulation) -> Iterator[str]:
    """Once all links are closed nothing is under way."""
    for rank in simulation.alive():
        simulation.ranks[rank].close()
    simulation.run(simulation.now + 100.0)
    for rank in simulation.alive():
        left = [getattr(task.steps, "__qualname__", "?") for task in simulation.ranks[rank].tasks]
        if left:
            yield f"rank {rank} still takes steps of {left}"
        if simulation.links[rank].is_breaking or simulation.links[rank].connections is not None:
            yield f"the link of rank {rank} is not closed"


def _verdict(error: BaseException) -> str:
    """The part of an error that is the same on all ranks. Ranks that the others gave up on have a prefix. At a deadline
    the late rank itself, and those that waited for it, may say so at the same time: they name it, each in its words."""
    text = getattr(error, "message", str(error))
    text = text.partition("came after the others had given up on it: ")[2] or text
    late = re.match(r".* within its deadline of .* missing: rank \d+", text)
    return late[0] if late else text


def _shown(errors: dict[int, BaseException]) -> str:
    return "; ".join(f"rank {rank}: {str(error)[:300]}" for rank, error in errors.items())


if __name__ == "__main__":
    sys.exit(main(__doc__, make_trials, n_trials=200_000, n_processes=os.cpu_count() or 1))
