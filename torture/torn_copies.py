"""Training that writes into the tensors all the time: ``python -m torture.torn_copies --trials 40 --seed 1``.

In each trial two ranks save 25 times, while a thread and the training loop itself overwrite every tensor as soon as an
async save says that they are free. Each checkpoint must hold, of every tensor, the one value that it had when the save
was asked for: a tensor that has parts of two generations is torn. The state has DTensors, tensors that are not
contiguous, views of one storage, and tensors of a few bytes and of a few MiB. Full and lazy staging, with and without
``staging_nbytes``, written by a thread or by a process, one or two saves under way.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import robust_dcp
from robust_dcp import RobustReader
from tests.harness.ranks import run_ranks, values
from torture.trials import Result, Trial, main

__all__ = ["WAYS", "be_rank"]

WAYS: dict[str, dict[str, Any]] = {
    f"{executor}, {staging}{', staging_nbytes' if limit else ''}": {
        "executor": executor,
        "staging": staging,
        "staging_nbytes": limit,
    }
    for executor in ("thread", "process")
    for staging in ("full", "lazy")
    for limit in (None, 1 << 20)
}
"""How is saved."""

_N_RANKS = 2
_N_SAVES = 25
_STOCK_EVERY = 10


def make_trials(n_trials: int, seed: int) -> Iterator[Trial]:
    """All ways in turn."""
    for number in range(seed * 1000, seed * 1000 + n_trials):
        way = list(WAYS)[number % len(WAYS)]
        yield Trial(way, f"seed {number}", partial(_run, way, number))


def _run(way: str, seed: int) -> Result:
    with tempfile.TemporaryDirectory(prefix="torn-") as directory:
        torn = values(run_ranks(_N_RANKS, be_rank, way, _N_SAVES, seed, directory, timeout_seconds=350))
        return Result([words for each in torn for words in each])


def be_rank(way: str, n_saves: int, seed: int, directory: str) -> list[str]:
    """One rank: what is wrong with each checkpoint that is torn."""
    rng = random.Random(f"torn {seed}")
    sys.setswitchinterval(0.0005)  # a thread that never rests shall not hold up all others
    state, pieces = _state()
    loaded = _state(flat_parts=[torch.zeros(40_000), torch.zeros(40_000)])  # a load refuses what shares memory
    torn: list[str] = []
    pending: list[tuple[int, Any]] = []
    may_write, writes, is_over = threading.Event(), threading.Lock(), threading.Event()

    def overwrite() -> None:
        """Write into all tensors, without end, while that is allowed."""
        for number, piece in zip(itertools.count(), itertools.cycle(pieces), strict=False):
            may_write.wait()
            if is_over.is_set():
                return
            with writes:
                if may_write.is_set():
                    piece.fill_(_value(number))

    thread = threading.Thread(target=overwrite)
    thread.start()
    try:
        for number in range(n_saves):
            generation = number + 1
            may_write.clear()
            with writes:  # the thread stands
                _fill(pieces, generation)
            path = f"{directory}/{number % 4}"
            saving = robust_dcp.async_save(state, checkpoint_id=path, max_in_flight=2, **WAYS[way])
            saving.wait_staged()
            may_write.set()
            _fill(pieces, -generation)  # the loop writes as well, and at once
            pending.append((number, saving))
            while len(pending) > rng.randint(0, 1) or (pending and number + 1 == n_saves):
                saved, future = pending.pop(0)
                future.result()
                if not pending:
                    may_write.clear()  # there is nothing that it could tear
                by_stock = saved % _STOCK_EVERY == 0
                complaint = _torn(*loaded, f"{directory}/{saved % 4}", saved + 1, by_stock=by_stock)
                torn += [complaint] if complaint else []
    finally:
        is_over.set()
        may_write.set()
        thread.join()
    return torn


def _state(flat_parts: list[torch.Tensor] | None = None) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A state dict, and the tensors of this rank through which all of its memory is written."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    flat = torch.zeros(60_000)
    front, back = flat_parts or (flat[:40_000], flat[20_000:])  # they overlap with each other
    square = torch.zeros(400, 300)
    steps = torch.zeros(200_000, dtype=torch.bfloat16)
    state: dict[str, Any] = {
        "sharded": distribute_tensor(torch.zeros(1 << 20), mesh, [Shard(0)]),
        "sharded.uneven": distribute_tensor(torch.zeros(301, 77), mesh, [Shard(1)]),
        "replicated": distribute_tensor(torch.zeros(1 << 18), mesh, [Replicate()]),
        f"large.{rank}": torch.zeros(1 << 19),
        f"transposed.{rank}": square.t(),
        f"every_third.{rank}": steps[::3],
        f"view.{rank}.front": front,
        f"view.{rank}.back": back,
        f"view.{rank}.all": flat,
        f"integers.{rank}": torch.zeros(800_000, dtype=torch.int16),
        f"scalar.{rank}": torch.zeros(()),
    }
    for number in range(50):
        state[f"small.{rank}.{number}"] = torch.zeros(number + 1, dtype=torch.float64)
    pieces = [value.to_local() if isinstance(value, DTensor) else value for value in state.values()]
    return state, pieces


def _value(generation: int) -> int:
    """Of all tensors in a generation: a whole number that each of the dtypes can hold."""
    return generation % 251


def _fill(pieces: list[torch.Tensor], generation: int) -> None:
    with torch.no_grad():
        for piece in pieces:
            piece.fill_(_value(generation))


def _torn(state: dict[str, Any], pieces: list[torch.Tensor], path: str, generation: int, *, by_stock: bool) -> str:
    """What of a checkpoint is not of this generation; nothing if all is. It is loaded into ``state``."""
    _fill(pieces, -1000)
    try:
        if by_stock:
            dcp.load(state, storage_reader=FileSystemReader(path))
        else:
            robust_dcp.load(state, storage_reader=RobustReader(path, verify_checksums="all"))
    except robust_dcp.CorruptCheckpoint as error:  # it changed between checksum and write
        return f"generation {generation}: {error.message}"
    for key, piece in zip(state, pieces, strict=True):
        if not bool((piece == _value(generation)).all()):
            return f"generation {generation}: {key} holds {piece.unique().tolist()[:9]}, not {_value(generation)}"
    return ""


if __name__ == "__main__":
    sys.exit(main(__doc__, make_trials, n_trials=40))
