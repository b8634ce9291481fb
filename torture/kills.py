"""Real processes, one of which is killed at a random step: ``python -m torture.kills --trials 300 --seed 1``.

In each trial 4 to 9 processes run some exchanges, and one of them is killed by SIGKILL: before it connects, between the
meeting in the store and the first message, in its own work, between two exchanges, or in the middle of a payload. In
half of the trials rank 0 hosts the store, as without ``torchrun``. All others have to raise one error that names it.
"""

from __future__ import annotations

import datetime
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from robust_dcp.comm import Channel, Offer
from robust_dcp.comm.connections import Connections, Moving
from robust_dcp.comm.frames import FRAME_NBYTES
from robust_dcp.errors import ExchangeTimeout
from tests.harness.ranks import Outcome, RanksOverran, run_ranks
from torture.trials import Result, Trial, main

__all__ = ["LIMIT_SECONDS", "WHEN", "Raised", "end_process", "judge_survivors", "killed_at_seconds", "make_trials"]

LIMIT_SECONDS = 10.0
"""From the kill until a survivor has raised its error."""

WHEN = ("before connecting", "after the meeting", "in own work", "between exchanges", "within a payload")
_TIMEOUT_SECONDS = 5.0
_N_STEPS = 6
_TRIES = 3
"""On a busy machine a process may wait for others for longer than the timeout, so that they all give up before one of
them is killed. Such a trial says nothing, and is made once more.
"""
_STORE_PORT = "TORTURE_STORE_PORT"


_KILLED_AT = "killed at "


class Raised(NamedTuple):
    """What a survivor raised, when, and whom it named."""

    at_seconds: float
    missing_ranks: Sequence[int]
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Of an error that was just caught."""
        return cls(time.monotonic(), list(getattr(error, "missing_ranks", [])), str(error))


def end_process(pid: int | None = None) -> None:
    """Kill a process of this rank, by default its own; the output of the rank says when."""
    print(f"{_KILLED_AT}{time.monotonic()} ", flush=True)
    os.kill(os.getpid() if pid is None else pid, signal.SIGKILL)


def killed_at_seconds(outcome: Outcome) -> float | None:
    """When a process of this rank was killed; ``None`` if none was."""
    told = outcome.output.partition(_KILLED_AT)[2].split()
    return float(told[0]) if told else None


def judge_survivors(
    outcomes: Sequence[Outcome], victim: int, raised: dict[int, Raised], *, same_error: bool = True
) -> Result:
    """Complain of a victim that lives, and of survivors that are late, name another rank or raise other errors."""
    killed_at = killed_at_seconds(outcomes[victim])
    if outcomes[victim].exitcode != -signal.SIGKILL or killed_at is None:
        return Result([f"rank {victim} was not killed, and raised {raised.get(victim)}: {outcomes[victim]}"])
    result = Result(seconds=[error.at_seconds - killed_at for error in raised.values()])
    result.complaints += [str(each) for each in outcomes if each.rank not in (victim, *raised)]
    for rank, error in raised.items():
        if list(error.missing_ranks) != [victim]:
            result.complaints.append(f"rank {rank} names {error.missing_ranks}: {error.message}")
    if max(result.seconds, default=0.0) > LIMIT_SECONDS:
        result.complaints.append(f"the errors took {result.seconds} s")
    messages = {rank: error.message for rank, error in raised.items()}
    if same_error and len(set(messages.values())) > 1:
        result.complaints.append(f"more than one error: {messages}")
    return result


class Data(msgspec.Struct, frozen=True):
    """What ranks send."""

    rank: int
    data: bytes


@dataclass(frozen=True)
class Kill:
    """What happens: ``victim`` is killed ``when``, at exchange number ``step`` if that says anything."""

    seed: int
    size: int
    victim: int
    when: str
    step: int
    rank_0_hosts_store: bool


def make_trials(n_trials: int, seed: int) -> Iterator[Trial]:
    """One trial for each seed."""
    for number in range(seed, seed + n_trials):
        rng = random.Random(f"kill {number}")
        size = rng.randint(4, 9)
        victim = rng.choice([0, rng.randrange(size), rng.randrange(size)])
        kill = Kill(number, size, victim, rng.choice(WHEN), rng.randrange(_N_STEPS), rng.random() < 0.5)
        yield Trial(kill.when, kill, partial(_run, kill))


def _run(kill: Kill) -> Result:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env = {_STORE_PORT: str(port), "TORCHELASTIC_USE_AGENT_STORE": str(not kill.rank_0_hosts_store)}
    try:
        for _ in range(_TRIES):
            outcomes = run_ranks(
                kill.size, _be_rank, kill, init=not kill.rank_0_hosts_store, env=env, timeout_seconds=60
            )
            if outcomes[kill.victim].value is None:
                break
    except RanksOverran as error:
        return Result([str(error)[:3000]])
    raised = {outcome.rank: outcome.value for outcome in outcomes if outcome.value is not None}
    # Whoever has connected finds the dead rank by itself, whoever has not that the store is gone.
    store_survives = not (kill.rank_0_hosts_store and kill.victim == 0)
    return judge_survivors(outcomes, kill.victim, raised, same_error=store_survives)


def _be_rank(kill: Kill) -> Raised | None:
    """One rank; what it raised and when."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if kill.rank_0_hosts_store:
        store = dist.TCPStore(
            "127.0.0.1",
            int(os.environ[_STORE_PORT]),
            size,
            is_master=rank == 0,
            timeout=datetime.timedelta(seconds=30),
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.barrier()
    if rank == kill.victim:
        _prepare(kill)
    channel = Channel.for_group(operation="save 3", timeout_seconds=_TIMEOUT_SECONDS)
    try:
        for step in range(_N_STEPS + 1):
            if rank == kill.victim and kill.when == "between exchanges" and step == kill.step:
                end_process()
            _exchange(channel, kill, step)
        return None  # the victim is alive
    except ExchangeTimeout as error:
        return Raised.of(error)


def _exchange(channel: Channel, kill: Kill, step: int) -> None:
    def data(nbytes: int) -> Data:
        if channel.rank == kill.victim and kill.when == "in own work" and step == kill.step:
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
    ][(kill.seed + step) % 4]
    verb()


def _prepare(kill: Kill) -> None:
    """Let this process be killed where no line of its own stands."""
    if kill.when == "before connecting":
        end_process()
    if kill.when == "after the meeting":
        wait = Connections._await

        def end_when_it_has_told(self: Connections, keys: list[str], look: Callable[[], None]) -> None:
            if any(" to " in key for key in keys):
                end_process()
            wait(self, keys, look)

        Connections._await = end_when_it_has_told  # type: ignore[method-assign]
    if kill.when == "within a payload":
        send = Connections.send
        n_payloads = 0

        def send_and_end(self: Connections, peer: int, tag: int, data: Any) -> Moving:
            nonlocal n_payloads
            sent = send(self, peer, tag, data)
            n_payloads += len(data) > FRAME_NBYTES
            if n_payloads > kill.step % 2:  # in all steps, every rank sends two at least
                end_process()
            return sent

        Connections.send = send_and_end  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main(__doc__, make_trials, n_trials=300))
