"""Compares saves and loads of a small Megatron model on 4 ranks, by stock's and by our code: seconds and messages.

Run it for a table: ``python -m benchmarks.megatron --json megatron.json`` (about a minute on 2 cores). The model is a
MoE model in PP2 x EP2 with its distributed optimizer. It goes through ``dist_checkpointing.save`` and ``load`` with the
fully parallel wrappers. Stock runs with all processes that it starts, on CPU by the demo's shim. "collectives" counts
the calls of ``torch.distributed`` by one rank. "exchanges" counts those of robust_dcp's own channel, and "payload" the
bytes that they sent besides headers.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from benchmarks.collectives import OBJECT_COLLECTIVES, counted_collectives
from benchmarks.measuring import run, show, write_json

__all__ = ["measure"]

_COLUMNS = {
    "what": "what",
    "who": "who",
    "seconds": "seconds",
    "object_collectives": "object collectives",
    "collectives": "all collectives",
    "exchanges": "exchanges",
    "header_nbytes": "header B",
    "payload_nbytes": "payload B",
}


def _timed(what: str, who: str, call: Callable[[], Any], links: list[Any]) -> dict[str, Any]:
    """Make a call, and return the row of this rank for the table."""
    dist.barrier()
    before = _sent(links)
    with counted_collectives() as calls:
        started = time.perf_counter()
        call()
        dist.barrier()
        seconds = time.perf_counter() - started
    return {
        "what": what,
        "who": who,
        "seconds": seconds,
        "object_collectives": sum(calls[name] for name in OBJECT_COLLECTIVES),
        "collectives": calls.total() - 1,  # the barrier at the end belongs to this benchmark
        **{name: after - before[name] for name, after in _sent(links).items()},
    }


def _sent(links: list[Any]) -> dict[str, int]:
    """What this rank has sent so far to the ranks of all these groups."""
    return {
        "exchanges": sum(link.stats.exchanges for link in links),
        "header_nbytes": sum(link.stats.header_nbytes_sent for link in links),
        "payload_nbytes": sum(link.stats.payload_nbytes_sent for link in links),
    }


def measure(directory: str, layers: int, hidden_size: int) -> list[dict[str, Any]]:
    """Measure one run, and return the rows of this rank.

    Args:
        directory: an empty directory for checkpoints.
        layers: the number of layers of the model.
        hidden_size: the hidden size of the model.
    """
    from demo import megatron_cpu

    megatron_cpu.install()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import fully_parallel
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    import robust_dcp.megatron
    from demo.megatron_model import SAVED_LAYOUT, Trainer
    from robust_dcp.comm.loop import link_for

    trainer = Trainer(SAVED_LAYOUT, seed=1, n_layers=layers, hidden_size=hidden_size)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    links = [link_for(dist.group.WORLD), link_for(group)]
    rows, path = [], ""
    for who in ("stock", "ours"):
        if who == "ours":
            robust_dcp.megatron.install()
        strategy = fully_parallel.FullyParallelSaveStrategyWrapper(
            strategies.TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True), group, True
        )
        for number, what in enumerate(("save, first", "save, second", "save, third"), start=1):
            path = f"{directory}/{who}{number}"
            if dist.get_rank() == 0:
                os.mkdir(path)
            state = trainer.sharded_state_dict()
            is_first = number == 1

            def save(path: str = path, state: Any = state, is_first: bool = is_first, strategy: Any = strategy) -> None:
                dist_checkpointing.save(state, path, strategy, validate_access_integrity=is_first)

            rows.append(_timed(what, who, save, links))
        reader = fully_parallel.FullyParallelLoadStrategyWrapper(strategies.TorchDistLoadShardedStrategy(), group)
        for what, load_strategy in (("load, first", None), ("load, second", None), ("load, fully parallel", reader)):
            template = trainer.sharded_state_dict(is_loading=True)

            def load(template: Any = template, load_strategy: Any = load_strategy, path: str = path) -> None:
                dist_checkpointing.load(template, path, load_strategy)

            rows.append(_timed(what, who, load, links))
    robust_dcp.megatron.uninstall()
    return rows


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--json", help="write the rows to this file as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        ranks = run(4, measure, directory, arguments.layers, arguments.hidden_size)
    rows = sorted(ranks[0], key=lambda row: (row["what"], row["who"] == "ours"))
    show(_COLUMNS, rows)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    _main()
