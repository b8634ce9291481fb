"""Training that writes into the tensors all the time: ``python -m torture.torn_copies --saves 1000 --seed 1``.

Two ranks save, again and again, while a thread and the training loop itself overwrite every tensor as soon as an async
save says that they are free. Each checkpoint must hold, of every tensor, the one value that it had when the save was
asked for: a tensor that has parts of two generations is torn. The state has DTensors, tensors that are not contiguous,
views of one storage, and tensors of a few bytes and of a few MiB. Full and lazy staging, with and without
``staging_nbytes``, written by a thread or by a process, one or two saves under way. Ends with 1 if any is torn.
"""

from __future__ import annotations

import argparse
import functools
import logging
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import robust_dcp
from robust_dcp import RobustReader
from tests.harness.ranks import run_ranks, values

__all__ = ["WAYS", "Way", "be_rank", "run_ways"]

_N_RANKS = 2
_PART_NBYTES = 1 << 20
_STOCK_EVERY = 10
_SAVES_OF_A_JOB = 200


@dataclass(frozen=True)
class Way:
    """How a save is made."""

    executor: str
    staging: str
    staging_nbytes: int | None

    def __str__(self) -> str:
        limit = "" if self.staging_nbytes is None else ", staging_nbytes"
        return f"{self.executor}, {self.staging}{limit}"


WAYS = tuple(
    Way(executor, staging, limit)
    for executor in ("thread", "process")
    for staging in ("full", "lazy")
    for limit in (None, _PART_NBYTES)
)


def run_ways(n_saves: int, seed: int) -> dict[str, list[int | str]]:
    """Save ``n_saves`` times, by all ways in turn.

    Returns:
        For each way how many checkpoints were looked at, and what was torn.
    """
    with tempfile.TemporaryDirectory(prefix="torn-") as directory:
        timeout_seconds = 300 + 2.0 * n_saves
        outcomes = run_ranks(_N_RANKS, be_rank, n_saves, seed, directory, timeout_seconds=timeout_seconds)
        told: dict[str, list[int | str]] = {str(way): [0] for way in WAYS}
        for counts, _ in values(outcomes)[:1]:
            for way, count in counts.items():
                told[way][0] = count
        for _, torn in values(outcomes):
            for way, words in torn:
                told[way].append(words)
        return told


def be_rank(
    n_saves: int, seed: int, directory: str, ways: Sequence[Way] = WAYS
) -> tuple[Counter[str], list[tuple[str, str]]]:
    """One rank.

    Returns:
        How many checkpoints were looked at, of each way; and for each torn one the way, and what is wrong.
    """
    rng = random.Random(f"torn {seed}")
    sys.setswitchinterval(0.0005)  # a thread that never rests shall not hold up all others
    state, pieces = _state()
    loaded = _state()
    counts: Counter[str] = Counter()
    torn: list[tuple[str, str]] = []
    pending: list[tuple[int, Way, Any]] = []
    with _overwriting(pieces) as overwriter:
        for number in range(n_saves):
            # Many by the same way, as a job makes them, but not so many that one of them comes late.
            way = ways[number // 5 % len(ways)]
            generation = number + 1
            overwriter.stop()
            _fill(pieces, generation)
            saving = robust_dcp.async_save(
                state,
                checkpoint_id=f"{directory}/{number % 4}",
                executor=way.executor,  # type: ignore[arg-type]
                staging=way.staging,  # type: ignore[arg-type]
                staging_nbytes=way.staging_nbytes,
                max_in_flight=2,
            )
            if isinstance(saving, robust_dcp.AsyncSave):
                saving.wait_staged()
                saving = saving.upload_completion
            overwriter.go_on()
            _fill(pieces, -generation)  # the loop writes as well, and at once
            pending.append((number, way, saving))
            while len(pending) > rng.randint(0, 1) or (pending and number + 1 == n_saves):
                saved, how, future = pending.pop(0)
                future.result(timeout=120)
                if not pending:
                    overwriter.stop()  # there is nothing that it could tear
                by_stock = saved % _STOCK_EVERY == 0
                complaint = _torn(*loaded, f"{directory}/{saved % 4}", saved + 1, by_stock=by_stock)
                counts[str(how)] += 1
                if complaint:
                    torn.append((str(how), complaint))
    return counts, torn


def _state() -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A state dict, and the tensors of this rank through which all of its memory is written."""
    rank = dist.get_rank()
    mesh = _mesh()
    flat = torch.zeros(60_000)
    square = torch.zeros(400, 300)
    steps = torch.zeros(200_000, dtype=torch.bfloat16)
    state: dict[str, Any] = {
        "sharded": distribute_tensor(torch.zeros(1 << 20), mesh, [Shard(0)]),
        "sharded.uneven": distribute_tensor(torch.zeros(301, 77), mesh, [Shard(1)]),
        "replicated": distribute_tensor(torch.zeros(1 << 18), mesh, [Replicate()]),
        f"large.{rank}": torch.zeros(1 << 19),
        f"transposed.{rank}": square.t(),
        f"every_third.{rank}": steps[::3],
        f"view.{rank}.front": flat[:40_000],
        f"view.{rank}.back": flat[20_000:],  # overlaps the one before
        f"view.{rank}.all": flat,
        f"integers.{rank}": torch.zeros(800_000, dtype=torch.int16),
        f"scalar.{rank}": torch.zeros(()),
    }
    for number in range(50):
        state[f"small.{rank}.{number}"] = torch.zeros(number + 1, dtype=torch.float64)
    pieces = [value.to_local() if isinstance(value, DTensor) else value for value in state.values()]
    return state, pieces


@functools.cache
def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


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


class _Overwriter:
    """A thread that writes into all tensors, without end, unless it was asked to stop."""

    def __init__(self, pieces: list[torch.Tensor]) -> None:
        self._pieces = pieces
        self._may_write = threading.Event()
        self._stands = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Returns when it stands; it may stand already."""
        self._may_write.clear()
        self._stands.wait()

    def go_on(self) -> None:
        self._stands.clear()
        self._may_write.set()

    def end(self) -> None:
        self._is_over = True
        self._may_write.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._is_over:
            for piece in self._pieces:
                if not self._may_write.is_set():
                    self._stands.set()
                    self._may_write.wait()
                number += 1
                piece.fill_(_value(number))


@contextmanager
def _overwriting(pieces: list[torch.Tensor]) -> Iterator[_Overwriter]:
    overwriter = _Overwriter(pieces)
    try:
        yield overwriter
    finally:
        overwriter.end()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    told: dict[str, list[int | str]] = {str(way): [0] for way in WAYS}
    for first in range(0, arguments.saves, _SAVES_OF_A_JOB):
        n_saves = min(_SAVES_OF_A_JOB, arguments.saves - first)
        for way, (count, *torn) in run_ways(n_saves, arguments.seed * 1000 + first).items():
            told[way][0] = int(told[way][0]) + int(count)
            told[way] += torn
        print(f"{first + n_saves} saves, {sum(len(each) - 1 for each in told.values())} torn", flush=True)
    n_torn = 0
    for way, (count, *torn) in told.items():
        print(f"{way:40} {count} checkpoints, {len(torn)} torn")
        print(*(f"  {words}" for words in torn[:5]), sep="\n", end="\n" if torn else "")
        n_torn += len(torn)
    print(f"{sum(int(each[0]) for each in told.values())} checkpoints of {_N_RANKS} ranks: {n_torn} torn")
    return int(n_torn > 0)


if __name__ == "__main__":
    sys.exit(main())
