"""Compares zstandard and zlib as compression for structure messages, on the structure of a Megatron-like rank.

Run it for a table: ``python -m benchmarks.bench_wire --json wire.json``. CPU times are the best of several rounds.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable

import msgspec
import numpy as np
import zstandard

from benchmarks.ranks import show
from benchmarks.virtual_ranks import NamedItem, table_of_items
from robust_dcp.plan.structure import Form, ItemKind, ItemStructure, PlanContext, StructureMessage

__all__ = ["message_of"]

_CODECS: dict[str, Callable[[bytes], bytes]] = {
    "zstd 1": zstandard.ZstdCompressor(level=1).compress,
    "zstd 3": zstandard.ZstdCompressor(level=3).compress,
    "zstd 9": zstandard.ZstdCompressor(level=9).compress,
    "zlib 1": lambda data: zlib.compress(data, 1),
    "zlib 6": lambda data: zlib.compress(data, 6),
}
_COLUMNS = {"items": "items", "codec": "codec", "nbytes": "bytes", "per_item": "bytes/item", "ms": "CPU ms"}


def message_of(n_items: int) -> bytes:
    """The encoded structure of ``n_items`` shards of weights and of their optimizer states, not compressed."""
    items: list[NamedItem] = []
    for n in range(n_items):
        prefix = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")[n % 3]
        name = f"{prefix}decoder.layers.{n // 24}.mlp.experts.local_experts.{n % 8}.linear_fc1.weight.{n}"
        structure = ItemStructure(
            kind=ItemKind.SHARD,
            form=Form.FIXED,
            dtype="bfloat16",
            layout="strided",
            shape=(8192, 4096),
            offsets=(1024 * (n % 4), 0),
            sizes=(1024 + n % 5, 4096),
        )
        items.append((name, structure))
    context = PlanContext(ranks=(0,), planner_options={}, writer_options={}, versions={})
    table = table_of_items(sorted(items))
    return msgspec.msgpack.encode(StructureMessage.of(table, np.zeros(0, dtype=np.uint64), context.encode()))


def _measure(n_items: int, rounds: int) -> list[dict[str, object]]:
    data = message_of(n_items)
    rows: list[dict[str, object]] = [
        {"items": n_items, "codec": "none", "nbytes": len(data), "per_item": len(data) / n_items, "ms": 0.0}
    ]
    for codec, compress in _CODECS.items():
        compressed, best = compress(data), float("inf")
        for _ in range(rounds):
            started = time.process_time()
            compress(data)
            best = min(best, time.process_time() - started)
        rows.append(
            {
                "items": n_items,
                "codec": codec,
                "nbytes": len(compressed),
                "per_item": len(compressed) / n_items,
                "ms": 1000 * best,
            }
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--items", type=int, nargs="+", default=[1000, 5000, 20000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write all rows there as well")
    arguments = parser.parse_args()
    rows = [row for n_items in arguments.items for row in _measure(n_items, arguments.rounds)]
    show(_COLUMNS, rows, arguments.json)


if __name__ == "__main__":
    main()
