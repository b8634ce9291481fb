"""Counts the exchanges, messages and bytes between the ranks in a first and a repeated save.

Run it for a table: ``python -m benchmarks.messages --json messages.json``. All ranks are processes of this machine.
Nothing is timed. Each rank saves tensors of its own, and ten objects that all ranks hold. Stock saves the same state
dicts with ``enable_plan_caching=True``; of it the object collectives are counted, and the bytes of what each rank
pickles for them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d

import robust_dcp
from benchmarks.measuring import Row, run, show, write_json

__all__ = ["main"]

_OBJECTS = 10
_SAVES = ("first", "repeated")

_COLUMNS = {
    "ranks": "ranks",
    "items": "items",
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

Sent = tuple[int, int, int]
"""What one rank sent in one save: exchanges or collectives, messages, and bytes."""


def _measure(directory: str, n_items: int) -> list[tuple[Sent, Sent]]:
    """Of each save what this rank sent, in ours and in stock's."""
    rank = dist.get_rank()
    state_dict: dict[str, Any] = {f"decoder.layers.{n}.mlp.weight.rank{rank}": torch.zeros(2) for n in range(n_items)}
    state_dict |= {f"decoder.layers.{n}.self_attention._extra_state": f"text {n}" for n in range(_OBJECTS)}
    pickled: list[int] = []
    make_tensor: Any = distributed_c10d._object_to_tensor

    def counting(*args: Any, **kwargs: Any) -> Any:
        made = make_tensor(*args, **kwargs)
        pickled.append(made[0].numel())
        return made

    found = []
    for save in _SAVES:
        phases = robust_dcp.save(state_dict, checkpoint_id=os.path.join(directory, save)).phases
        nbytes = sum(phase.header_nbytes + phase.payload_nbytes for phase in phases)
        ours = sum(phase.exchanges for phase in phases), sum(phase.messages for phase in phases), nbytes
        pickled.clear()
        distributed_c10d._object_to_tensor = counting
        try:
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(state_dict, checkpoint_id=os.path.join(directory, f"stock-{save}"), planner=planner)
        finally:
            distributed_c10d._object_to_tensor = make_tensor
        found.append((ours, (len(pickled), len(pickled), sum(pickled))))
    return found


def _rows(world_size: int, n_items: int) -> list[Row]:
    """One row for each save: what the coordinator sent, and the most that another rank sent."""
    with tempfile.TemporaryDirectory() as directory:
        by_rank = run(world_size, _measure, directory, n_items)
    rows = []
    for number, save in enumerate(_SAVES):
        ours, stock = zip(*(saves[number] for saves in by_rank), strict=True)
        row = {
            "ranks": world_size,
            "items": n_items,
            "save": save,
            "exchanges": ours[0][0],
            "messages": ours[0][1],
            "nbytes": ours[0][2],
            "others_nbytes": max(sent[2] for sent in ours[1:]),
            "stock_collectives": stock[0][0],
            "stock_nbytes": stock[0][2],
            "stock_others_nbytes": max(sent[2] for sent in stock[1:]),
            "ratio": sum(sent[2] for sent in stock) / sum(sent[2] for sent in ours),
        }
        rows.append(row)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--items", type=int, nargs="+", default=[10, 1000, 10000], help="tensors of each rank")
    parser.add_argument("--json", help="write all rows there as well")
    options = parser.parse_args()
    rows = [row for case in itertools.product(options.ranks, options.items) for row in _rows(*case)]
    print("What the coordinator sent, and the most that another rank sent.")
    show(_COLUMNS, rows)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
