"""Kills one of several real processes at a random step: ``python -m torture.kills --trials 300 --seed 1``.

In each trial 4 to 9 processes run some exchanges. One of them is killed by SIGKILL: before it connects, between the
meeting in the store and the first message, in its own work, between two exchanges, or in the middle of a payload. In
half of the trials rank 0 hosts the store, as it does without ``torchrun``. All other ranks must raise the same error,
and it must name the killed rank. The program prints each trial that broke this, and how long the survivors took. It
exits with 1 if any did.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import signal
import socket
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch.distributed as dist

from robust_dcp.comm import Channel, Offer, meeting, pipe
from robust_dcp.errors import ExchangeTimeout
from robust_dcp.testing.ranks import Outcome, RanksOverran, run_ranks

__all__ = ["WHEN", "Trial", "make_trial", "run_trial"]

WHEN = ("before connecting", "after the meeting", "in own work", "between exchanges", "within a payload")
_TIMEOUT_SECONDS = 5.0
_N_STEPS = 6
_LIMIT_SECONDS = 10.0
_STORE_PORT = "TORTURE_STORE_PORT"


class Data(msgspec.Struct, frozen=True):
    """The message that ranks send."""

    rank: int
    data: bytes


@dataclass(frozen=True)
class Trial:
    """One trial: ``victim`` is killed at the moment ``when``, in exchange number ``step`` if that matters."""

    seed: int
    size: int
    victim: int
    when: str
    step: int
    rank_0_hosts_store: bool


@dataclass
class Result:
    """The result of a trial: the seconds from the kill to each survivor's error, and all complaints."""

    trial: Trial
    seconds: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def make_trial(seed: int) -> Trial:
    """The trial number ``seed``."""
    rng = random.Random(f"kill {seed}")
    size = rng.randint(4, 9)
    victim = rng.choice([0, rng.randrange(size), rng.randrange(size)])
    return Trial(seed, size, victim, rng.choice(WHEN), rng.randrange(_N_STEPS), rng.random() < 0.5)


def run_trial(trial: Trial) -> Result:
    """Run the trial, and judge its result."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    result = Result(trial)
    try:
        outcomes = run_ranks(
            trial.size,
            _be_rank,
            trial,
            init=not trial.rank_0_hosts_store,
            env={_STORE_PORT: str(port), "TORCHELASTIC_USE_AGENT_STORE": str(not trial.rank_0_hosts_store)},
            timeout_seconds=60,
        )
    except RanksOverran as error:
        result.complaints.append(str(error)[:3000])
        return result
    _judge(result, outcomes)
    return result


def _judge(result: Result, outcomes: list[Outcome]) -> None:
    trial = result.trial
    if outcomes[trial.victim].exitcode != -signal.SIGKILL:
        result.complaints.append(f"rank {trial.victim} was not killed: {outcomes[trial.victim]}")
        return
    killed_at = float(outcomes[trial.victim].output.partition("killed at ")[2].split()[0])
    messages = {}
    for outcome in outcomes:
        if outcome.rank == trial.victim:
            continue
        if outcome.error is not None or outcome.value is None:
            result.complaints.append(f"rank {outcome.rank}: {outcome}")
            continue
        raised_at, missing, message = outcome.value
        result.seconds.append(raised_at - killed_at)
        messages[outcome.rank] = message
        if missing != [trial.victim]:
            result.complaints.append(f"rank {outcome.rank} names {missing}: {message}")
        if raised_at - killed_at > _LIMIT_SECONDS:
            result.complaints.append(f"rank {outcome.rank} took {raised_at - killed_at:.1f} s")
    # A rank that has connected finds the dead rank by itself. One that has not finds that the store is gone.
    store_survives = not (trial.rank_0_hosts_store and trial.victim == 0)
    if store_survives and len(set(messages.values())) > 1:
        result.complaints.append(f"more than one error: {messages}")


def _be_rank(trial: Trial) -> tuple[float, list[int] | None, str] | None:
    """Run one rank. Returns when it raised, and what."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if trial.rank_0_hosts_store:
        store = dist.TCPStore(
            "127.0.0.1",
            int(os.environ[_STORE_PORT]),
            size,
            is_master=rank == 0,
            timeout=datetime.timedelta(seconds=30),
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.barrier()
    if rank == trial.victim:
        _prepare(trial)
    channel = Channel.for_group(operation="save 3", timeout_seconds=_TIMEOUT_SECONDS)
    try:
        for step in range(_N_STEPS + 1):
            if rank == trial.victim and trial.when == "between exchanges" and step == trial.step:
                _end()
            _exchange(channel, trial, step)
        return None  # the victim is alive
    except ExchangeTimeout as error:
        message = str(error)
        return time.monotonic(), error.missing_ranks, message


def _exchange(channel: Channel, trial: Trial, step: int) -> None:
    def data(nbytes: int) -> Data:
        if channel.rank == trial.victim and trial.when == "in own work" and step == trial.step:
            _end()
        return Data(channel.rank, random.Random(step).randbytes(nbytes))

    def work() -> None:
        data(0)

    def offer() -> Offer:
        data(0)
        return Offer()

    phase = f"step {step}"
    verb: Any = [
        partial(channel.agree, phase, offer),
        partial(channel.gather, phase, partial(data, 3_000_000), Data),
        partial(channel.barrier, phase, work),
        partial(channel.all_gather, phase, partial(data, 300_000), Data),
    ][(trial.seed + step) % 4]
    verb()


def _prepare(trial: Trial) -> None:
    """Patch this process so that it is killed inside of robust_dcp's code."""
    if trial.when == "before connecting":
        _end()
    if trial.when == "after the meeting":
        tell = meeting._PairStore.set

        def tell_and_end(self: Any, key: str, value: bytes | str) -> None:
            tell(self, key, value)
            _end()

        meeting._PairStore.set = tell_and_end  # type: ignore[method-assign]
    if trial.when == "within a payload":
        send = pipe.GlooPipe.send
        n_payloads = 0

        def send_and_end(self: pipe.GlooPipe, data: pipe.Payload, tag: int) -> object:
            nonlocal n_payloads
            sent = send(self, data, tag)
            n_payloads += tag != 0
            if n_payloads > trial.step % 2:  # in all steps together every rank sends at least two
                _end()
            return sent

        pipe.GlooPipe.send = send_and_end  # type: ignore[method-assign]


def _end() -> None:
    print(f"killed at {time.monotonic()} ", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Run the campaign. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    results = []
    for seed in range(arguments.seed, arguments.seed + arguments.trials):
        results.append(run_trial(make_trial(seed)))
        if results[-1].complaints:
            print(results[-1].trial, *results[-1].complaints, sep="\n  ", flush=True)
    for when in (*WHEN, None):
        chosen = [each for each in results if when in (None, each.trial.when)]
        seconds = [each for result in chosen for each in result.seconds]
        n_right = sum(not result.complaints for result in chosen)
        line = f"{when or 'all':20} {n_right} of {len(chosen)} right"
        if seconds:
            line += (
                f", survivors raised after {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s at most"
            )
        print(line)
    return int(any(result.complaints for result in results))


if __name__ == "__main__":
    sys.exit(main())
