"""Random exchanges over a simulated network with random faults: ``python -m torture.exchanges --trials 3000 --seed 1``.

A schedule says what the ranks do, and which fault hits which message. It depends only on its seed. The messages of a
run also depend on threads, so a seed that fails may pass once and fail again. The channel is real. The network is the
simulated one of the tests.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from robust_dcp.comm import Bucket, Channel, Offer, Relay, combined_signature
from robust_dcp.comm.link import Link
from robust_dcp.comm.operation import Operation
from robust_dcp.comm.tree import Tree
from robust_dcp.errors import ExchangeError, ExchangeTimeout, RobustCheckpointError
from tests.harness.network import Fault, FaultKind, SimulatedNetwork, quick, run_threads
from torture.trials import Result, Trial, main

__all__ = ["KINDS", "make_trials"]

KINDS = ("harmless", "killed", "cut", "frozen", "anything")
VERBS = ("agree", "barrier", "gather", "broadcast", "scatter", "all_gather", "relay")

_REPAIRED = (FaultKind.DAMAGE_FRAME, FaultKind.DAMAGE_PAYLOAD)
_TIMEOUT_SECONDS = 30.0
_SHORT_TIMEOUT_SECONDS = 0.6
_KILL_TIMEOUT_SECONDS = 6.0
"""If a rank dies before it has connected, the others notice only after this time."""

_LIMIT_SECONDS = 60.0
"""No rank may take longer. Only a frozen rank makes others wait. Most of this time is for a busy machine."""


class Text(msgspec.Struct, frozen=True):
    """The message that ranks send."""

    rank: int
    step: int
    data: bytes


@dataclass(frozen=True)
class Step:
    """One exchange.

    Attributes:
        verb: the method of the channel.
        root: the coordinator.
        nbytes: the size of each message.
        failing: the rank whose own work raises, or ``None``.
    """

    verb: str
    root: int
    nbytes: int
    failing: int | None


@dataclass(frozen=True)
class Schedule:
    """The plan of a run.

    Attributes:
        killed_at_work: a rank, and the step. The rank is killed in its own work of that step.
        store_host: the rank that hosts the store, or ``None``. If it is killed, the store is gone.
    """

    seed: int
    kind: str
    size: int
    steps: tuple[Step, ...]
    faults: tuple[Fault, ...]
    timeout_seconds: float
    killed_at_work: tuple[int, int] | None = None
    store_host: int | None = None


@dataclass
class Outcome:
    """The outcome of one rank: the number of its steps, how it ended, and any wrong result that it got."""

    n_steps: int = 0
    error: BaseException | None = None
    wrong: str = ""
    seconds: float = 0.0
    next_error: BaseException | None = None


def make_trials(n_trials: int, seed: int) -> Iterator[Trial]:
    """Schedules of all kinds in turn."""
    for number in range(seed, seed + n_trials):
        schedule = make_schedule(number, KINDS[number % len(KINDS)])
        yield Trial(schedule.kind, schedule, partial(judge, schedule))


def judge(schedule: Schedule) -> Result:
    """Run each rank in its own thread, and say what broke a promise, and what happened."""
    network = SimulatedNetwork(schedule.size, schedule.faults, schedule.store_host)
    outcomes = [Outcome() for _ in range(schedule.size)]
    found = []
    try:
        run_threads(
            network,
            lambda link: _be_rank(schedule, network, link, outcomes[link.rank]),
            timeout_seconds=2 * _LIMIT_SECONDS,
        )
    except AssertionError as error:  # some have not ended
        found.append(str(error).partition(";")[0])
    found += complaints(schedule, outcomes, network)
    has_raised = any(outcome.error is not None for outcome in outcomes)
    struck = "raised" if has_raised else "mended" if network.happened else "not struck"
    return Result(found and [*found, f"happened: {network.happened}"], verdict=struck)


def make_schedule(seed: int, kind: str) -> Schedule:
    """The schedule with this seed."""
    rng = random.Random(f"schedule {seed} {kind}")
    size = rng.randint(2, 9)
    steps = tuple(_step(rng, size) for _ in range(rng.randint(2, 6)))
    fields: dict[str, Any] = {"timeout_seconds": _TIMEOUT_SECONDS}
    edges = [(rank, child) for rank in range(size) for child in Tree(rank, size).children]
    delays = [_fault(rng, FaultKind.DELAY, *rng.choice(edges), rng.uniform(0, 0.01)) for _ in range(rng.randint(0, 4))]
    if kind == "harmless":
        # Each pair of ranks can repair one fault, because a message is repeated once.
        faults = [_fault(rng, rng.choice(_REPAIRED), *edge) for edge in edges if rng.random() < 0.7]
    elif kind == "killed":
        fields["timeout_seconds"] = _KILL_TIMEOUT_SECONDS
        fields["store_host"] = rng.choice([None, None, 0, rng.randrange(size)])
        if rng.random() < 0.4:
            fields["killed_at_work"] = (rng.randrange(size), rng.randrange(len(steps)))
            faults = []
        else:
            faults = [_fault(rng, rng.choice([FaultKind.KILL_SENDER, FaultKind.KILL_RECEIVER]), *rng.choice(edges))]
    elif kind == "cut":
        faults = [_fault(rng, FaultKind.CUT, *rng.choice(edges))]
    elif kind == "frozen":
        fields["timeout_seconds"] = _SHORT_TIMEOUT_SECONDS
        which = rng.choice([FaultKind.FREEZE_SENDER, FaultKind.FREEZE_RECEIVER])
        faults = [_fault(rng, which, *rng.choice(edges), rng.choice([0.2, 3 * _SHORT_TIMEOUT_SECONDS]))]
    else:
        fields["timeout_seconds"] = 2 * _SHORT_TIMEOUT_SECONDS
        kinds = [each for each in FaultKind if each is not FaultKind.DELAY]
        faults = [
            _fault(rng, rng.choice(kinds), *rng.choice(edges), rng.uniform(0, 1.5)) for _ in range(rng.randint(1, 8))
        ]
    return Schedule(seed, kind, size, steps, (*faults, *delays), **fields)


def _step(rng: random.Random, size: int) -> Step:
    root = rng.choice([0, 0, 0, rng.randrange(size)])
    failing = rng.randrange(size) if rng.random() < 0.1 else None
    return Step(rng.choice(VERBS), root, rng.choice([0, 10, 3000, 100_000]), failing)


def _fault(rng: random.Random, kind: FaultKind, rank: int, peer: int, seconds: float = 0.0) -> Fault:
    sender, receiver = rng.choice([(rank, peer), (peer, rank)])
    return Fault(kind, sender, receiver, rng.randint(0, 8), seconds)


def _be_rank(schedule: Schedule, network: SimulatedNetwork, link: Link, outcome: Outcome) -> None:
    began = time.monotonic()
    channel = Channel(Operation(link, "save", schedule.timeout_seconds), 0)
    try:
        for number, step in enumerate(schedule.steps):
            outcome.wrong = outcome.wrong or _take_step(channel.led_by(step.root), schedule, number, network)
            outcome.n_steps += 1
    except BaseException as error:
        outcome.error = error
    outcome.seconds = time.monotonic() - began
    if not network.killed and schedule.kind in ("cut", "frozen"):
        network.heal()
        # The first of these may still be running on some ranks when others find that the connection is broken.
        for name in ("next save", "save after that"):
            outcome.next_error = None
            try:
                Channel(Operation(link, name, _TIMEOUT_SECONDS), 0).barrier("next")
            except BaseException as error:
                outcome.next_error = error


def _take_step(channel: Channel, schedule: Schedule, number: int, network: SimulatedNetwork) -> str:
    """Run one exchange. Returns what is wrong with its result, or an empty text."""
    step = schedule.steps[number]

    def own_work() -> None:
        if schedule.killed_at_work == (channel.rank, number):
            network.kill(channel.rank)
        if step.failing == channel.rank:
            raise ValueError(f"step {number}")

    try:
        found, expected = _exchange(channel, step, number, own_work)
    except ExchangeError:
        raise
    except RobustCheckpointError as error:
        if step.failing is None or [each.rank for each in error.rank_failures] != [step.failing]:
            raise
        return ""
    # In a broadcast or a scatter only the coordinator does work that may fail.
    works = step.verb not in ("broadcast", "scatter") or step.failing == step.root
    if step.failing is not None and works:
        return f"step {number} succeeded, though rank {step.failing} failed"
    return "" if found == expected else f"step {number}: {str(found)[:300]} instead of {str(expected)[:300]}"


def _exchange(channel: Channel, step: Step, number: int, own_work: Callable[[], None]) -> tuple[object, object]:
    """Run the exchange. Returns its result on this rank, and the expected result."""
    phase, rank, size = f"step {number}", channel.rank, channel.size

    def text(of: int) -> Text:
        return Text(of, number, bytes([of % 7, number]) * (step.nbytes // 2))

    def own() -> Text:
        own_work()
        return text(rank)

    def offer() -> Offer:
        own_work()
        return Offer(bytes([rank]) * 16, bytes(16), rank + 1, 1)

    if step.verb == "agree":
        _, found = channel.agree(phase, offer)
        signature = combined_signature([bytes([each]) * 16 for each in range(size)], channel.coordinator_rank)
        return (found.signature, found.lowest, found.highest, found.counts[0]), (signature, 1, size, size)
    if step.verb == "barrier":
        return channel.barrier(phase, own_work), None
    if step.verb == "gather":
        return channel.gather(phase, own, Text)[1], [*map(text, range(size))] if rank == step.root else None
    if step.verb == "broadcast":
        return channel.broadcast(phase, own, Text), text(step.root)
    if step.verb == "scatter":

        def all_texts() -> list[Text | None]:
            own_work()
            return [text(each) if each % 3 else None for each in range(size)]

        return channel.scatter(phase, all_texts, Text)[1], text(rank) if rank % 3 else None
    if step.verb == "relay":
        return _relay(channel, step, own_work)
    return channel.all_gather(phase, own, Text), [*map(text, range(size))]


def _relay(channel: Channel, step: Step, own_work: Callable[[], None]) -> tuple[object, object]:
    """Each rank passes on a bucket to all others, in a round of its own. Returns what came from whom, and should."""
    rank, size = channel.rank, channel.size
    buckets = [Bucket(of, (of, *(each for each in range(size) if each != of)), 1 + step.nbytes) for of in range(size)]
    found: dict[int, int] = {}

    def outgoing(of: int) -> torch.Tensor:
        own_work()
        return torch.full((buckets[of].nbytes,), of, dtype=torch.uint8)

    def arrived(of: int, tensor: torch.Tensor) -> None:
        found[of] = int(tensor.min()) if tensor.min() == tensor.max() else -1

    incoming = partial(torch.empty, dtype=torch.uint8)
    channel.relay(f"relay {step.nbytes}", Relay(buckets, outgoing, lambda of: incoming(buckets[of].nbytes), arrived))
    return found, {of: of for of in range(size) if of != rank}


def complaints(schedule: Schedule, outcomes: list[Outcome], network: SimulatedNetwork) -> list[str]:
    """List what should not have happened."""
    found: list[str] = []
    killed = network.killed
    survivors = {rank: outcome for rank, outcome in enumerate(outcomes) if rank not in killed}
    for rank, outcome in survivors.items():
        if outcome.wrong:
            found.append(f"rank {rank} has a wrong result: {outcome.wrong}")
        if outcome.seconds > _LIMIT_SECONDS:
            found.append(f"rank {rank} took {outcome.seconds:.1f} s")
        if outcome.error is not None and not isinstance(outcome.error, ExchangeError):
            found.append(f"rank {rank} raised {outcome.error!r}")
        if outcome.next_error is not None and any(each.error for each in survivors.values()):
            found.append(f"rank {rank} raised in the next operation: {outcome.next_error!r}")
    errors = {rank: outcome.error for rank, outcome in survivors.items() if outcome.error is not None}
    if schedule.kind == "harmless" and errors:
        found.append(f"raised, though nothing stays broken: {_shown(errors)}")
    has_store = schedule.store_host not in killed
    if len({_verdict(error) for error in errors.values()}) > 1 and has_store:
        found.append(f"more than one verdict: {_shown(errors)}")
    # The last exchange may end on one rank and then break on others. No protocol can avoid that.
    early = [rank for rank in errors if survivors[rank].n_steps < len(schedule.steps) - 1]
    if early and len(errors) < len(survivors):
        found.append(f"some have finished, but ranks {early} have not: {_shown(errors)}")
    if schedule.kind in ("killed", "frozen") and has_store:
        freezes = {FaultKind.FREEZE_SENDER: "sender", FaultKind.FREEZE_RECEIVER: "receiver"}
        frozen = {getattr(each, freezes[each.kind]) for each in network.happened if each.kind in freezes}
        missing = sorted(killed or frozen)
        for rank, error in errors.items():
            # Who breaks off a relay waits for the frozen rank longer than these short timeouts.
            if frozen and str(getattr(error, "phase", "")).startswith("relay"):
                continue
            if not isinstance(error, ExchangeTimeout) or error.missing_ranks != missing:
                found.append(f"rank {rank} names others than {missing}: {error!r}"[:600])
    return found


def _verdict(error: BaseException) -> str:
    """The part of an error that is the same on all ranks. Ranks that the others gave up on have a prefix."""
    text = str(error)
    return text.partition("came after the others had given up on it: ")[2] or text


def _shown(errors: dict[int, BaseException]) -> str:
    return "; ".join(f"rank {rank}: {str(error)[:250]}" for rank, error in errors.items())


if __name__ == "__main__":
    with quick():
        sys.exit(main(__doc__, make_trials, n_trials=3000, at_once=8))
