"""Which compression structure messages get: zstandard and zlib on the structure of a Megatron-like rank.

Run it for a table: ``python -m benchmarks.bench_wire --json wire.json``. CPU time, the best of several rounds.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable

import msgspec
import numpy as np
import torch
import zstandard
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from benchmarks.ranks import show
from robust_dcp.plan.structure import Form, PlanContext, StructureMessage, reorder, table_of

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
    items = []
    for n in range(n_items):
        prefix = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")[n % 3]
        name = f"{prefix}decoder.layers.{n // 24}.mlp.experts.local_experts.{n % 8}.linear_fc1.weight.{n}"
        size, offset = torch.Size((1024 + n % 5, 4096)), torch.Size((1024 * (n % 4), 0))
        data = TensorWriteData(
            ChunkStorageMetadata(offset, size), TensorProperties(torch.bfloat16), torch.Size((8192, 4096))
        )
        items.append(WriteItem(index=MetadataIndex(name, offset), type=WriteItemType.SHARD, tensor_data=data))
    items = reorder(items)
    paths = {item.index.fqn: tuple(item.index.fqn.split(".")) for item in items}
    structure = table_of(items, [Form.FIXED] * len(items), paths)
    context = PlanContext(ranks=(0,), planner_options={}, writer_options={}, versions={})
    return msgspec.msgpack.encode(StructureMessage.of(structure, np.zeros(0, dtype=np.uint64), context))


def _measure(n_items: int, rounds: int) -> list[dict[str, object]]:
    data = message_of(n_items)
    rows: list[dict[str, object]] = [
        {"items": n_items, "codec": "none", "nbytes": len(data), "per_item": len(data) / n_items, "ms": 0.0}
    ]
    for codec, compress in _CODECS.items():
        best = float("inf")
        for _ in range(rounds):
            started = time.process_time()
            compressed = compress(data)
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
