"""Measures how long it takes to find the chunks of uneven DTensors, by ours and by stock's code.

Run it for two tables: ``python -m benchmarks.bench_uneven_dtensors --json uneven.json``. The first table is for ranks
of this machine. Ours and stock's alternate in rounds, and their results are compared each time. A ratio says how many
times less time ours takes. The second table is for the coordinator alone. It decodes the merged messages of many
virtual ranks and solves them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.collectives import counted_collectives
from benchmarks.ranks import run, show
from robust_dcp.comm import Channel, decode, encode
from robust_dcp.comm.messages import Bundler, open_bundles
from robust_dcp.megatron.uneven.uneven_dtensors import place_chunks
from robust_dcp.megatron.uneven.uneven_offsets import solve
from robust_dcp.megatron.uneven.uneven_shards import LocalPart, ShardColumns, Spread, columns_of

__all__ = ["Cut", "cuts_of", "measure", "measure_coordinator", "messages_of", "rows_of"]

_LAYER: dict[str, tuple[int, ...]] = {
    "input_layernorm.weight": (128,),
    "self_attention.linear_qkv.weight": (384, 128),
    "self_attention.linear_proj.weight": (128, 128),
    "pre_mlp_layernorm.weight": (128,),
    "mlp.linear_fc1.weight": (512, 128),
    "mlp.linear_fc2.weight": (128, 512),
}
"""The shapes of one layer. They have the ratios of a transformer, but are so small that thousands fit in memory."""

_STATES = ("", ".exp_avg", ".exp_avg_sq")

_COLUMNS = {
    "ranks": "ranks",
    "tensors": "DTensors",
    "call": "call",
    "ratio": "ratio",
    "ours_seconds": "ours s",
    "stock_seconds": "stock s",
    "ours_collectives": "ours: collectives",
    "ours_exchanges": "exchanges",
    "ours_header_nbytes": "headers B",
    "ours_payload_nbytes": "payload B",
    "stock_collectives": "stock: collectives",
}
_COORDINATOR_COLUMNS = {
    "ranks": "virtual ranks",
    "tensors": "DTensors",
    "solve_seconds": "solve s",
    "decode_seconds": "decode s",
    "message_nbytes": "message of a rank B",
    "arriving_nbytes": "all, merged B",
    "answer_nbytes": "answer B",
}


@dataclass(frozen=True)
class Cut:
    """How one DTensor is cut over ranks along dimension 0.

    Attributes:
        key: the key of the DTensor.
        shape: its global shape.
        edges: ranks + 1 row numbers. Rank ``r`` holds the rows from ``edges[r]`` to before ``edges[r + 1]``, if any.
    """

    key: str
    shape: tuple[int, ...]
    edges: tuple[int, ...]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return (self.edges[rank + 1] - self.edges[rank], *self.shape[1:])


@dataclass(frozen=True)
class Sample:
    """One call on one rank.

    Attributes:
        call: ``first``, or ``repeated`` with the same DTensors.
        who: ``ours`` or ``stock``.
        seconds: the time on this rank.
        collectives: the number of calls of ``torch.distributed``.
        exchanges, header_nbytes, payload_nbytes: the exchanges of robust_dcp's channel, and the bytes that it sent.
    """

    call: str
    who: str
    seconds: float
    collectives: int
    exchanges: int
    header_nbytes: int
    payload_nbytes: int


def cuts_of(n_tensors: int, n_ranks: int, prefix: str = "model") -> Iterator[Cut]:
    """Make weights and optimizer states of as many layers as needed, cut about where Megatron-FSDP would cut them.

    All weights of a layer lie in one flat buffer, and each rank has an equal part of the buffer. So few weights are
    cut, and most ranks hold nothing of a given weight. Edges are moved up to whole rows.
    """
    sizes = [math.prod(shape) for shape in _LAYER.values()]
    part = -(-sum(sizes) // n_ranks)
    edges = []
    for shape, end in zip(_LAYER.values(), itertools.accumulate(sizes), strict=True):
        width = math.prod(shape[1:])
        begin = end - shape[0] * width
        inner = [min(max(-(-(rank * part - begin) // width), 0), shape[0]) for rank in range(1, n_ranks)]
        edges.append((0, *inner, shape[0]))
    cuts = (
        Cut(f"{prefix}.module.decoder.layers.{layer}.{name}{state}", shape, cut)
        for layer in itertools.count()
        for state in _STATES
        for (name, shape), cut in zip(_LAYER.items(), edges, strict=True)
    )
    return itertools.islice(cuts, n_tensors)


def _dtensor(cut: Cut, mesh: DeviceMesh) -> DTensor:
    local = torch.empty(cut.local_shape(dist.get_rank()), dtype=torch.bfloat16)
    stride = (math.prod(cut.shape[1:]), 1)[-len(cut.shape) :]
    shape = torch.Size(cut.shape)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _sample(call: str, who: str, function: Callable[[], Any], channel: Channel) -> Sample:
    gc.collect()
    dist.barrier()
    with channel.recording() as stats, counted_collectives() as calls:
        started = time.perf_counter()
        function()
        seconds = time.perf_counter() - started
    return Sample(
        call=call,
        who=who,
        seconds=seconds,
        collectives=calls.total(),
        exchanges=stats.exchanges,
        header_nbytes=stats.header_nbytes_sent,
        payload_nbytes=stats.payload_nbytes_sent,
    )


def measure(n_tensors: int, rounds: int) -> list[Sample]:
    """Measure all samples of this rank, in the same order on all ranks. Every rank of the group calls it.

    Raises:
        ValueError: our code found another chunk than stock's.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor as stock

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    channel = Channel.for_group(operation="uneven DTensors")
    calls: dict[str, Callable[[dict[str, DTensor]], Any]] = {
        "ours": lambda state_dict: place_chunks(state_dict, channel),
        "stock": stock.preprocess_state_dict_for_uneven_dtensor,
    }

    def state_dict_of(n_tensors: int, prefix: str) -> dict[str, DTensor]:
        return {cut.key: _dtensor(cut, mesh) for cut in cuts_of(n_tensors, dist.get_world_size(), prefix)}

    for call in calls.values():
        call(state_dict_of(len(_LAYER), "warm-up"))  # connections are made once a job
    samples = []
    for nth in range(rounds):
        state_dict = state_dict_of(n_tensors, f"round{nth}")  # other keys, so that ours does not know the answer
        chunks: dict[str, dict[str, Any]] = {}
        for who in sorted(calls, reverse=nth % 2 == 1):
            samples += [_sample(name, who, partial(calls[who], state_dict), channel) for name in ("first", "repeated")]
            chunks[who] = {key: value.__create_chunk_list__() for key, value in state_dict.items()}
        different = [key for key, found in chunks["ours"].items() if found != chunks["stock"][key]]
        if different:
            raise ValueError(f"{len(different)} DTensors have other chunks than by stock, {different[0]!r} the first")
    return samples


def rows_of(by_rank: list[list[Sample]], n_tensors: int) -> list[dict[str, Any]]:
    """Make a row for each kind of call: the median time of the slowest rank, and the most that any rank sent."""
    rows = []
    for name in ("first", "repeated"):
        row: dict[str, Any] = {"ranks": len(by_rank), "tensors": n_tensors, "call": name}
        for who in ("ours", "stock"):
            rounds = [each for each in zip(*by_rank, strict=True) if (each[0].call, each[0].who) == (name, who)]
            row[f"{who}_seconds"] = statistics.median(max(sample.seconds for sample in each) for each in rounds)
            row[f"{who}_rounds_seconds"] = [max(sample.seconds for sample in each) for each in rounds]
            for count in ("collectives", "exchanges", "header_nbytes", "payload_nbytes"):
                row[f"{who}_{count}"] = max(asdict(sample)[count] for sample in rounds[-1])
        row["ratio"] = row["stock_seconds"] / row["ours_seconds"]
        rows.append(row)
    return rows


def messages_of(n_ranks: int, n_tensors: int) -> list[bytes]:
    """The message of each of ``n_ranks`` ranks for the coordinator, before the messages are merged."""
    cuts = list(cuts_of(n_tensors, n_ranks))
    spreads = {ndim: Spread((n_ranks,), tuple(range(n_ranks)), (0,), (0,), ndim) for ndim in (1, 2)}
    return [
        encode(
            columns_of(
                {cut.key: LocalPart(spreads[len(cut.shape)], (rank,), cut.shape, cut.local_shape(rank)) for cut in cuts}
            )
        )
        for rank in range(n_ranks)
    ]


def measure_coordinator(n_ranks: int, n_tensors: int, rounds: int) -> dict[str, Any]:
    """Measure the coordinator of ``n_ranks`` ranks with ``n_tensors`` DTensors each. Returns a row of medians."""
    messages = messages_of(n_ranks, n_tensors)
    bundler = Bundler(ShardColumns)
    for rank, message in enumerate(messages):
        bundler.add(rank, decode(message, ShardColumns))
    arriving = bundler.encode()
    answers: list[Any] = []
    decoding, solving = [], []
    for _ in range(rounds):
        gc.collect()
        started = time.perf_counter()
        columns = open_bundles([arriving], ShardColumns)
        decoded = time.perf_counter()
        answers = solve([columns[rank] for rank in range(n_ranks)], range(n_ranks))
        decoding.append(decoded - started)
        solving.append(time.perf_counter() - decoded)
    return {
        "ranks": n_ranks,
        "tensors": n_tensors,
        "solve_seconds": statistics.median(solving),
        "decode_seconds": statistics.median(decoding),
        "message_nbytes": max(map(len, messages)),
        "arriving_nbytes": len(arriving),
        "answer_nbytes": max(len(encode(answer)) for answer in answers),
        "solve_rounds_seconds": solving,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[1000], help="DTensors of each rank")
    parser.add_argument("--ranks", type=int, default=2, help="processes of this machine")
    parser.add_argument("--virtual-ranks", type=int, default=128, help="virtual ranks for the coordinator's table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write all rows there as well")
    options = parser.parse_args(arguments)
    rows = [
        row
        for n_tensors in options.tensors
        for row in rows_of(run(options.ranks, measure, n_tensors, options.rounds), n_tensors)
    ]
    coordinator = [measure_coordinator(options.virtual_ranks, each, options.rounds) for each in options.tensors]
    print(f"Medians of {options.rounds} rounds: the slowest rank's seconds. Counts and bytes: the most of any rank.")
    show(_COLUMNS, rows, None)
    print("The coordinator alone, of ranks that do not exist.")
    show(_COORDINATOR_COLUMNS, coordinator, None)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"ranks": rows, "coordinator": coordinator}, file, indent=1)


if __name__ == "__main__":
    main()
