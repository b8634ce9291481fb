"""Counts the exchanges, messages and bytes between the ranks in each phase of a first and a repeated save.

Run it for a table: ``python -m benchmarks.messages --json messages.json``. All ranks are processes of this machine.
Nothing is timed. Stock saves the same state dicts with ``enable_plan_caching=True``; of it the object collectives are
counted, and the bytes of what each rank pickles for them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import robust_dcp
from benchmarks.measuring import Row, run, show, write_json
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


def measure_stock(directory: str, n_items: int, n_objects: int = 0) -> list[tuple[str, int, int]]:
    """As :func:`measure_saves`, by stock: for each save its name, this rank's object collectives, and their bytes."""
    import torch.distributed.checkpoint as dcp

    pickled: list[int] = []
    make_tensor = distributed_c10d._object_to_tensor

    def counting(*args: Any, **kwargs: Any) -> Any:
        made = make_tensor(*args, **kwargs)
        pickled.append(made[0].numel())
        return made

    costs = []
    distributed_c10d._object_to_tensor = counting
    try:
        for save, text in zip(SAVES, ("old", "old", "new"), strict=True):
            if text == "new" and n_objects == 0:
                break
            pickled.clear()
            path = os.path.join(directory, f"stock-{n_items}-{n_objects}-{save}")
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(state_dict_of(dist.get_rank(), n_items, n_objects, text), checkpoint_id=path, planner=planner)
            costs.append((save, len(pickled), sum(pickled)))
    finally:
        distributed_c10d._object_to_tensor = make_tensor
    return costs


def _measure_case(directory: str, case: tuple[int, int]) -> tuple[list[PhaseCost], list[tuple[str, int, int]]]:
    return measure_saves(directory, *case), measure_stock(directory, *case)


def _measure(world_size: int, n_items: int, n_objects: int) -> list[Row]:
    """One row for each save: what the coordinator sent, and the most that another rank sent."""
    with tempfile.TemporaryDirectory() as directory:
        by_rank = run(world_size, _measure_case, directory, (n_items, n_objects))
    rows = []
    for number, (save, collectives, _) in enumerate(by_rank[0][1]):
        ours = [[cost for cost in costs if cost.save == save] for costs, _ in by_rank]
        nbytes = [sum(cost.header_nbytes + cost.payload_nbytes for cost in costs) for costs in ours]
        stock = [stock[number][2] for _, stock in by_rank]
        row: Row = {"ranks": world_size, "items": n_items, "objects": n_objects, "save": save}
        row |= {
            "exchanges": sum(cost.exchanges for cost in ours[0]),
            "messages": sum(cost.messages for cost in ours[0]),
            "nbytes": nbytes[0],
            "others_nbytes": max(nbytes[1:]),
            "stock_collectives": collectives,
            "stock_nbytes": stock[0],
            "stock_others_nbytes": max(stock[1:]),
            "ratio": sum(stock) / sum(nbytes),
            "phases": [[asdict(cost) for cost in costs] for costs in ours],
        }
        rows.append(row)
    return rows


_COLUMNS = {
    "ranks": "ranks",
    "items": "items",
    "objects": "objects",
    "save": "save",
    "ratio": "bytes, stock / ours",
    "exchanges": "exchanges",
    "messages": "messages",
    "nbytes": "sent B",
    "others_nbytes": "others B",
    "stock_collectives": "stock: collectives",
    "stock_nbytes": "pickled B",
    "stock_others_nbytes": "others B",
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--items", type=int, nargs="+", default=[10, 1000, 10000], help="tensors of each rank")
    parser.add_argument("--objects", type=int, nargs="+", default=[0, 10], help="objects that all ranks hold")
    parser.add_argument("--json", help="write all rows there as well")
    options = parser.parse_args()
    cases = itertools.product(options.ranks, options.items, options.objects)
    rows = [row for case in cases for row in _measure(*case)]
    print("What the coordinator sent, and the most that another rank sent.")
    show(_COLUMNS, rows)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
