"""Counts the exchanges, messages and bytes between the ranks in each phase of a first and a repeated save.

Run it for a table: ``python -m benchmarks.bench_messages --json messages.json``. The tests of the package also use
:func:`measure_saves`, in their own ranks. All ranks are processes of this machine. Nothing is timed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import robust_dcp
from benchmarks.ranks import run, show
from robust_dcp.plan.cache import PLANS

__all__ = ["PhaseCost", "measure_saves", "state_dict_of"]

SAVES = ("first", "repeated", "repeated with new objects")


@dataclass(frozen=True)
class PhaseCost:
    """What one rank sent in one phase of one save.

    Attributes:
        save: one of ``SAVES``.
        phase: ``plan``, ``write`` or ``commit``.
        rank: the rank in the group; 0 is the coordinator.
        exchanges, messages: their numbers.
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
    """A state dict with ``n_items`` tensors of this rank only, and ``n_objects`` objects that all ranks hold."""
    block = torch.zeros(2)
    found: dict[str, Any] = {
        f"decoder.layers.{n}.mlp.experts.linear_fc1.weight.rank{rank}": block for n in range(n_items)
    }
    found |= {f"decoder.layers.{n}.self_attention._extra_state": f"{text} {n}" for n in range(n_objects)}
    return found


def measure_saves(directory: str, n_items: int, n_objects: int = 0) -> list[PhaseCost]:
    """Save the same structure several times, and return what this rank sent. Call it on each rank of a group.

    The second save repeats the first. In the third save the objects, if any, have other contents of the same length.
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
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--items", type=int, nargs="+", default=[10, 1000, 10000], help="tensors of each rank")
    parser.add_argument("--objects", type=int, nargs="+", default=[0, 10], help="objects that all ranks hold")
    parser.add_argument("--json", help="write all rows there as well")
    options = parser.parse_args(arguments)
    cases = [(items, objects) for items in options.items for objects in options.objects]
    rows = [row for world_size in options.ranks for row in _measure(world_size, cases)]
    print("What the coordinator sent in each phase, and the most that another rank sent.")
    show(_COLUMNS, rows, options.json)


if __name__ == "__main__":
    main()
