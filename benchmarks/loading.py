"""Measures what it costs a rank to plan a load, by ours and by stock's code, in one run on the same checkpoint.

Run it for a table: ``python -m benchmarks.loading --ranks 128 --items 5000 --json loading.json``. The checkpoint is
that of many virtual ranks: ``.metadata`` and index of tensors that FSDP2 has cut along their first dimension, and an
object of each rank, but no data. The rank that loads is real. It has DTensors on a mesh of all ranks, and torch's
"fake" process group stands for the others. It reads the metadata, makes its plan, and ours looks up the place of each
item; stock does that when it reads. Each contender runs in its own process. CPU seconds are user and system time.
Memory is the peak above what the process had before.

In ``same`` as many ranks load as have saved, so each item is one stored chunk. In ``reshard 1`` three quarters as many
ranks load 64 tensors of ``--chunks`` chunks, cut along the other dimension: each rank needs a part of every chunk.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measuring import Row, Stopwatch, in_new_process, show, with_ratios, write_json
from robust_dcp import RobustLoadPlanner, RobustReader
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.index.form import IndexTemplate, encode_block, fit_of
from robust_dcp.storage.metadata.pickled import MetadataHead, Names, StoredRows, encode_piece
from robust_dcp.storage.records.checksum import crc32

__all__ = ["main"]

Shape = tuple[int, ...]
"""The shape of the chunk that each rank holds of a tensor."""

_SHAPES: Sequence[Shape] = ((3, 16), (1, 16), (4, 16), (1, 64), (2,), (1,))
_PARTS = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2", "input_norm", "mlp_norm")
_RESHARDED: Sequence[Shape] = ((3, 768),)
_TENSORS_RESHARDED = 64
_CASES = ("same", "reshard 1")

_COLUMNS = {
    "case": "case",
    "ranks": "saved by",
    "items": "tensors",
    "who": "who",
    "cpu_ratio": "CPU, stock / this",
    "peak_ratio": "memory, stock / this",
    "cpu_seconds": "CPU s",
    "wall_seconds": "wall s",
    "peak_mib": "peak MiB",
}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=128, help="that saved (default: %(default)s)")
    parser.add_argument("--items", type=int, default=5000, help="tensors of each (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=1024, help="of a resharded tensor (default: %(default)s)")
    parser.add_argument("--json", help="write all figures there as well")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for case in _CASES:
        with tempfile.TemporaryDirectory(prefix="loading-") as directory:
            ranks, tensors = arguments.ranks, _tensors_of(arguments.items, _SHAPES)
            if case != "same":
                ranks, tensors = arguments.chunks, _tensors_of(_TENSORS_RESHARDED, _RESHARDED)
            print(f"{case}: {ranks} ranks x {len(tensors)} tensors ...", file=sys.stderr)
            _write_checkpoint(directory, ranks, tensors)
            contenders = ("ours", "ours, no index", "stock")
            rows += [in_new_process(measure, who, case, directory, ranks, tensors) for who in contenders]
    with_ratios(rows, ("case",), {"cpu_ratio": "cpu_seconds", "peak_ratio": "peak_mib"})
    show(_COLUMNS, rows)
    write_json(arguments.json, rows)


def measure(who: str, case: str, directory: str, ranks: int, tensors: dict[str, Shape]) -> Row:
    """Measure how one rank plans a load from ``directory``."""
    loading_ranks = ranks if case == "same" else max(1, ranks * 3 // 4)
    rank = loading_ranks // 3
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=loading_ranks)
    state_dict = _state_dict(case, rank, ranks, loading_ranks, tensors)
    with tempfile.TemporaryDirectory() as small:  # so that one-time work of Python and torch does not count
        few = _tensors_of(2, _SHAPES)
        _write_checkpoint(small, loading_ranks, few)
        _plan(who, small, _state_dict("same", rank, loading_ranks, loading_ranks, few))
    watch = Stopwatch()
    watch.start()
    _plan(who, directory, state_dict)
    watch.stop()
    return {"case": case, "ranks": ranks, "items": len(tensors), "who": who, **watch.figures()}


def _plan(who: str, directory: str, state_dict: dict[str, Any]) -> None:
    reader: Any = FileSystemReader(directory) if who == "stock" else RobustReader(directory)
    planner = DefaultLoadPlanner() if who == "stock" else RobustLoadPlanner()
    by_file = who == "ours, no index"
    metadata = reader.source.decode_metadata(reader.source.metadata_bytes()) if by_file else reader.read_metadata()
    planner.set_up_planner(state_dict, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, False)
    reader.prepare_local_plan(planner.create_local_plan())


def _state_dict(case: str, rank: int, ranks: int, loading_ranks: int, tensors: dict[str, Shape]) -> dict[str, Any]:
    """The state dict that a rank loads into: a DTensor for each name, and an object too if nothing is resharded."""
    mesh = init_device_mesh("cpu", (loading_ranks,))
    dim = 1 if case == "reshard 1" else 0

    def one(held: Shape) -> DTensor:
        whole = (held[0] * ranks, *held[1:])
        local = list(whole)
        local[dim] = whole[dim] // loading_ranks
        stride = torch.empty(whole, device="meta").stride()
        return DTensor.from_local(
            torch.empty(local), mesh, [Shard(dim)], run_check=False, shape=torch.Size(whole), stride=stride
        )

    state_dict: dict[str, Any] = {"model": {name: one(held) for name, held in tensors.items()}}
    return state_dict | ({f"rng_state.{rank}": 0} if case == "same" else {})


def _tensors_of(count: int, shapes: Sequence[Shape]) -> dict[str, Shape]:
    """The sorted names of ``count`` tensors in the model, with the shape of each rank's chunk."""
    names = (f"layers.{layer}.{part}.weight" for layer in range(count) for part in _PARTS)
    return dict(sorted(zip(islice(names, count), cycle(shapes), strict=False)))


def _write_checkpoint(directory: str, ranks: int, tensors: dict[str, Shape]) -> None:
    """Write the checkpoint of ``ranks`` ranks into ``directory``. Each rank holds equal parts of ``tensors``."""
    names, rows = _columns(ranks, tensors)
    files = [f"__{rank}_{number}.distcp" for rank in range(ranks) for number in range(2)]
    places = np.column_stack([np.arange(ranks) * 4096, np.full(ranks, 900)])
    meta = StorageMeta(directory, "00000000-0000-0000-0000-000000000001")
    head, rank_of, pieces, blocks = MetadataHead(names), rows.file // 2, list[tuple[int, int]](), list[bytes]()
    with open(os.path.join(directory, METADATA_NAME), "wb") as file:
        file.write(head.data)
        for rank in range(ranks):
            of_rank = rank_of == rank
            columns = {name: getattr(rows, name)[of_rank] for name in StoredRows.__struct_fields__ if name != "sizes"}
            written = StoredRows(sizes=rows.sizes, **columns | {"file": rows.file[of_rank] - 2 * rank})
            of_objects = places[of_rank[rows.start < 0]]
            piece = encode_piece(written, len(names.names), files[2 * rank : 2 * rank + 2], of_objects)
            pieces.append((len(piece), crc32(piece)))
            file.write(piece)
            jumps = np.flatnonzero(np.diff(written.name, prepend=-2) != 1)
            blocks.append(encode_block(written, np.column_stack([jumps, written.name[jumps]]), of_objects))
        tail = head.tail(pieces, meta)
        file.write(tail)
        fit = fit_of(file.tell(), tail)
    template = IndexTemplate(names, rows, rank_of, [2] * ranks, list(map(len, blocks)))
    (_, index_head), (_, sections) = template.encode(fit, files, meta, {})
    with open(os.path.join(directory, INDEX_NAME), "wb") as file:
        file.writelines([index_head, *blocks, sections])


def _columns(ranks: int, tensors: dict[str, Shape]) -> tuple[Names, StoredRows]:
    shapes = sorted(dict.fromkeys(tensors.values()), key=len)
    # Each shape has the size of the whole tensor, the size of the chunk, and then the offsets of all ranks.
    sizes: list[Shape] = []
    for first, *others in shapes:
        sizes += [(first * ranks, *others), (first, *others)]
        sizes += [(rank * first, *(0 for _ in others)) for rank in range(ranks)]
    kind = np.array([shapes.index(shape) for shape in tensors.values()]) * (2 + ranks)
    count, rows = len(tensors), len(tensors) * ranks
    rank = np.tile(np.arange(ranks), count)
    which = np.repeat(np.arange(count), ranks)
    objects = sorted(f"rng_state.{each}" for each in range(ranks))
    none = np.full(ranks, -1)

    def joined(of_tensors: np.ndarray, of_objects: np.ndarray) -> np.ndarray:
        return np.concatenate([of_tensors, of_objects]).astype(np.int32)

    names = Names(
        names=[*(f"model.{name}" for name in tensors), *objects],
        paths=[*(("model", name) for name in tensors), *((name,) for name in objects)],
        properties=[(torch.float32, torch.strided, False)],
        name_properties=joined(np.zeros(count), none),
        name_size=joined(kind, none),
        sizes=sizes,
    )
    return names, StoredRows(
        sizes=sizes,
        name=joined(which, count + np.arange(ranks)),
        offset=joined(kind[which] + 2 + rank, none),
        size=joined(kind[which] + 1, none),
        file=joined(2 * rank + which % 2, 2 * np.arange(ranks)),
        start=np.concatenate([np.arange(rows) * 65536, none]),
        nbytes=np.concatenate([np.full(rows, 65000), none]),
    )


if __name__ == "__main__":
    main()
