"""Real processes, one of which is killed at a random step: ``python -m torture.kills --trials 300 --seed 1``.

In each trial 4 to 9 processes run some exchanges, and one of them is killed by SIGKILL: before it connects, between the
meeting in the store and the first message, in its own work, between two exchanges, or in the middle of a payload. In
half of the trials rank 0 hosts the store, as without ``torchrun``. All others have to raise one error that names it.
Prints each trial that broke this, and how long the survivors took; ends with 1 if any did.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch.distributed as dist

from robust_dcp.comm import Channel, Offer
from robust_dcp.comm.connections import Connections, Moving
from robust_dcp.comm.frames import FRAME_NBYTES
from robust_dcp.errors import ExchangeTimeout
from tests.harness.ranks import RanksOverran, run_ranks
from torture.survivors import Raised, Result, end_process, judge_survivors, print_table

__all__ = ["WHEN", "Trial", "make_trial", "run_trial"]

WHEN = ("before connecting", "after the meeting", "in own work", "between exchanges", "within a payload")
_TIMEOUT_SECONDS = 5.0
_N_STEPS = 6
_STORE_PORT = "TORTURE_STORE_PORT"


class Data(msgspec.Struct, frozen=True):
    """What ranks send."""

    rank: int
    data: bytes


@dataclass(frozen=True)
class Trial:
    """What happens: ``victim`` is killed ``when``, at exchange number ``step`` if that says anything."""

    seed: int
    size: int
    victim: int
    when: str
    step: int
    rank_0_hosts_store: bool


def make_trial(seed: int) -> Trial:
    """The trial number ``seed``."""
    rng = random.Random(f"kill {seed}")
    size = rng.randint(4, 9)
    victim = rng.choice([0, rng.randrange(size), rng.randrange(size)])
    return Trial(seed, size, victim, rng.choice(WHEN), rng.randrange(_N_STEPS), rng.random() < 0.5)


def run_trial(trial: Trial) -> Result[Trial]:
    """Run it, and judge what came of it."""
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
    raised = {outcome.rank: outcome.value for outcome in outcomes if outcome.value is not None}
    # Whoever has connected finds the dead rank by itself, whoever has not that the store is gone.
    store_survives = not (trial.rank_0_hosts_store and trial.victim == 0)
    judge_survivors(result, outcomes, trial.victim, raised, same_error=store_survives)
    return result


def _be_rank(trial: Trial) -> Raised | None:
    """One rank; what it raised and when."""
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
                end_process()
            _exchange(channel, trial, step)
        return None  # the victim is alive
    except ExchangeTimeout as error:
        return Raised.of(error)


def _exchange(channel: Channel, trial: Trial, step: int) -> None:
    def data(nbytes: int) -> Data:
        if channel.rank == trial.victim and trial.when == "in own work" and step == trial.step:
            end_process()
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
    """Let this process be killed where no line of its own stands."""
    if trial.when == "before connecting":
        end_process()
    if trial.when == "after the meeting":
        wait = Connections._await

        def end_when_it_has_told(self: Connections, keys: list[str], look: Callable[[], None]) -> None:
            if any(" to " in key for key in keys):
                end_process()
            wait(self, keys, look)

        Connections._await = end_when_it_has_told  # type: ignore[method-assign]
    if trial.when == "within a payload":
        send = Connections.send
        n_payloads = 0

        def send_and_end(self: Connections, peer: int, tag: int, data: Any) -> Moving:
            nonlocal n_payloads
            sent = send(self, peer, tag, data)
            n_payloads += len(data) > FRAME_NBYTES
            if n_payloads > trial.step % 2:  # in all steps, every rank sends two at least
                end_process()
            return sent

        Connections.send = send_and_end  # type: ignore[method-assign]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    results = []
    for seed in range(arguments.seed, arguments.seed + arguments.trials):
        results.append(run_trial(make_trial(seed)))
        if results[-1].complaints:
            print(results[-1].trial, *results[-1].complaints, sep="\n  ", flush=True)
    return int(not print_table([(result.trial.when, result) for result in results]))


if __name__ == "__main__":
    sys.exit(main())
