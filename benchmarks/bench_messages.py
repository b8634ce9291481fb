"""What the ranks of a save say to each other: exchanges, messages and bytes of each phase, first and repeated.

Run it for two tables: ``python -m benchmarks.bench_messages --json messages.json``. The first is of the exchanges of a
repeated save alone, by many ranks that are threads of one process; CPU time is that of all of them, divided by their
number. The second is of whole saves by ranks that are processes of this machine; the tests of the package measure with
:func:`measure_saves` too, in ranks of their own. What ranks say now and then while they wait (beats) is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import robust_dcp
from benchmarks.rank_threads import channel_of, run_in_threads
from benchmarks.ranks import run, show
from robust_dcp.comm import Offer
from robust_dcp.comm.frames import FRAME_NBYTES
from robust_dcp.comm.link import Link
from robust_dcp.comm.tree import Tree
from robust_dcp.plan.agreement import HAS_GLOBAL_PLAN, MATCHES
from robust_dcp.plan.cache import PLANS
from robust_dcp.plan.written import WrittenMessage

__all__ = ["ExchangeCost", "PhaseCost", "measure_exchanges", "measure_saves", "state_dict_of"]

SAVES = ("first", "repeated", "repeated with new objects")


@dataclass(frozen=True)
class PhaseCost:
    """What one rank sent in one phase of one save.

    Attributes:
        save: one of ``SAVES``.
        phase: ``plan``, ``write`` or ``commit``.
        rank: of the group; 0 is the coordinator.
        exchanges, messages: how many.
        header_nbytes, payload_nbytes: bytes sent.
    """

    save: str
    phase: str
    rank: int
    exchanges: int
    messages: int
    header_nbytes: int
    payload_nbytes: int


def state_dict_of(rank: int, n_items: int, n_objects: int, text: str) -> dict[str, Any]:
    """``n_items`` tensors of this rank's own, and ``n_objects`` objects that all ranks hold."""
    block = torch.zeros(2)
    found: dict[str, Any] = {
        f"decoder.layers.{n}.mlp.experts.linear_fc1.weight.rank{rank}": block for n in range(n_items)
    }
    found |= {f"decoder.layers.{n}.self_attention._extra_state": f"{text} {n}" for n in range(n_objects)}
    return found


def measure_saves(directory: str, n_items: int, n_objects: int = 0) -> list[PhaseCost]:
    """Save the same structure again and again, on a rank of an initialised group; what this rank sent each time.

    The second save repeats the first; in the third, if there are objects, they have other contents of the same length.
    """
    rank = dist.get_rank()
    PLANS.clear()
    costs = []
    for number, (save, text) in enumerate(zip(SAVES, ("old", "old", "new"), strict=True)):
        if text == "new" and n_objects == 0:
            break
        state_dict = state_dict_of(rank, n_items, n_objects, text)
        path = os.path.join(directory, f"{n_items}-{n_objects}-{number}")
        report = robust_dcp.save(state_dict, checkpoint_id=path)
        costs += [
            PhaseCost(
                save=save,
                phase=phase.name,
                rank=rank,
                exchanges=phase.exchanges,
                messages=phase.messages,
                header_nbytes=phase.header_nbytes,
                payload_nbytes=phase.payload_nbytes,
            )
            for phase in report.phases
        ]
    return costs


def _measure_cases(directory: str, cases: list[tuple[int, int]]) -> list[list[PhaseCost]]:
    return [measure_saves(directory, *case) for case in cases]


def _measure(world_size: int, cases: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """One row for each case, save and phase: what the coordinator sent, and the most that another rank sent."""
    with tempfile.TemporaryDirectory() as directory:
        by_rank = run(world_size, _measure_cases, directory, cases)
    rows = []
    for case, (n_items, n_objects) in enumerate(cases):
        for costs in zip(*(each[case] for each in by_rank), strict=True):
            others = costs[1:]
            rows.append(
                {
                    "ranks": world_size,
                    "items": n_items,
                    "objects": n_objects,
                    **{key: value for key, value in asdict(costs[0]).items() if key != "rank"},
                    "others_messages": max(cost.messages for cost in others),
                    "others_header_nbytes": max(cost.header_nbytes for cost in others),
                    "others_payload_nbytes": max(cost.payload_nbytes for cost in others),
                }
            )
    return rows


@dataclass(frozen=True)
class ExchangeCost:
    """What the exchanges of one repeated save took on one rank.

    Attributes:
        neighbours: ranks that it talks to.
        sent_nbytes, received_nbytes: frames and payloads.
    """

    neighbours: int
    sent_nbytes: int
    received_nbytes: int

    @property
    def most_nbytes(self) -> int:
        return max(self.sent_nbytes, self.received_nbytes)


def measure_exchanges(world_size: int, rounds: int) -> tuple[list[ExchangeCost], float]:
    """What the exchanges of a repeated save take on each rank; and the CPU seconds of all ranks together.

    They are those of ``SaveSession``: agree, tell that nothing is new after writing, and commit.
    """
    seconds: list[float] = []
    together = threading.Barrier(world_size, action=lambda: seconds.append(time.process_time()))

    def be_rank(link: Link) -> ExchangeCost:
        offer = Offer(signature=bytes([1]) * 16, plan_id=bytes([2]) * 16, value=7, flags=MATCHES | HAS_GLOBAL_PLAN)

        def save(name: str) -> None:
            channel = channel_of(link, name)
            channel.agree(f"{name}: agree", lambda: offer)
            channel.gather(f"{name}: write", lambda: None, WrittenMessage, offer=lambda _: offer)
            channel.barrier(f"{name}: commit")

        save("first")  # connections are made once a job
        sent, received = _nbytes(link)
        together.wait()
        for number in range(rounds):
            save(f"repeated {number}")
        together.wait()
        return ExchangeCost(
            neighbours=len(Tree(link.rank, link.size).neighbours),
            sent_nbytes=(_nbytes(link)[0] - sent) // rounds,
            received_nbytes=(_nbytes(link)[1] - received) // rounds,
        )

    costs = run_in_threads(world_size, be_rank)
    return costs, (seconds[1] - seconds[0]) / rounds


def _nbytes(link: Link) -> tuple[int, int]:
    """Sent and received by this rank so far."""
    stats = link.stats
    received = FRAME_NBYTES * (stats.messages_received - stats.payloads_received) + stats.payload_nbytes_received
    return stats.header_nbytes_sent + stats.payload_nbytes_sent, received


def _measure_exchanges(world_size: int, rounds: int) -> dict[str, Any]:
    costs, cpu_seconds = measure_exchanges(world_size, rounds)
    return {
        "ranks": world_size,
        "root_neighbours": costs[0].neighbours,
        "root_sent_nbytes": costs[0].sent_nbytes,
        "root_received_nbytes": costs[0].received_nbytes,
        "mean_sent_nbytes": sum(cost.sent_nbytes for cost in costs) / world_size,
        "mean_received_nbytes": sum(cost.received_nbytes for cost in costs) / world_size,
        "most_nbytes_a_neighbour": max(cost.most_nbytes / cost.neighbours for cost in costs),
        "cpu_milliseconds_a_rank": 1000 * cpu_seconds / world_size,
    }


_EXCHANGE_COLUMNS = {
    "ranks": "ranks",
    "root_neighbours": "root: neighbours",
    "root_sent_nbytes": "sends B",
    "root_received_nbytes": "receives B",
    "mean_sent_nbytes": "mean rank: sends B",
    "mean_received_nbytes": "receives B",
    "most_nbytes_a_neighbour": "most B a neighbour",
    "cpu_milliseconds_a_rank": "CPU ms a rank",
}
_COLUMNS = {
    "ranks": "ranks",
    "items": "items",
    "objects": "objects",
    "save": "save",
    "phase": "phase",
    "exchanges": "exchanges",
    "messages": "messages",
    "header_nbytes": "headers B",
    "payload_nbytes": "payload B",
    "others_messages": "others: messages",
    "others_header_nbytes": "headers B",
    "others_payload_nbytes": "payload B",
}


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--items", type=int, nargs="+", default=[10, 1000, 10000], help="tensors of each rank")
    parser.add_argument("--objects", type=int, nargs="+", default=[0, 10], help="objects that all ranks hold")
    parser.add_argument("--threads", type=int, nargs="*", default=[8, 64, 256, 1024], help="ranks that are threads")
    parser.add_argument("--rounds", type=int, default=5, help="repeated saves of theirs")
    parser.add_argument("--json", help="write all rows there as well")
    options = parser.parse_args(arguments)
    cases = [(items, objects) for items in options.items for objects in options.objects]
    exchanges = [_measure_exchanges(world_size, options.rounds) for world_size in options.threads]
    print("The exchanges of a repeated save, of ranks that are threads of one process.")
    show(_EXCHANGE_COLUMNS, exchanges, None)
    rows = [row for world_size in options.ranks for row in _measure(world_size, cases)]
    if rows:
        print("\nWhat the coordinator sent in each phase, and the most that another rank sent.")
        show(_COLUMNS, rows, None)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"exchanges": exchanges, "saves": rows}, file, indent=1)


if __name__ == "__main__":
    main()
