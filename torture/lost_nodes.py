"""Nodes that are lost, kills and flipped bits: ``python -m torture.lost_nodes --trials 1000 --seed 1 --only flip``.

Three nodes save to drives of their own, and keep parity for each other. In a trial of kind ``protect`` a rank is killed
at some call to the disk or the network while parity is made; in one of kind ``anew``, while the files of a lost node
are made anew. Then a job loads what is there. In a trial of kind ``flip`` one bit of one file is flipped, in most of
them a node is lost as well, and the same ranks load again and again. A load gives what was saved, or raises an error
that names a file or a node, and never anything else; and where the ranks have said that a checkpoint is protected, it
outlives a node.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

import robust_dcp
from robust_dcp.comm.connections import Connections
from tests.faults.disk import FaultDisk, kill
from tests.harness.damage import flip_bit
from tests.harness.ranks import Outcome, end_shared_ranks, on_ranks, run_ranks
from tests.promises import test_parity
from tests.promises.test_parity import files_of, keep, restore
from torture.trials import Result, Trial, main

__all__ = ["KINDS", "make_trials"]

KINDS = {"flip": 20, "protect": 1, "anew": 1}
"""How many trials of a kind there are for each one of the others."""

_NODES = "abc"
_DISK_CALLS, _NETWORK_CALLS = 90, 60
"""How many calls a rank makes at most, nearly."""


def make_trials(n_trials: int, seed: int) -> Iterator[Trial]:
    """All kinds, in turn."""
    kinds = [kind for kind, number in KINDS.items() for _ in range(number)]
    for number in range(seed * 10_000, seed * 10_000 + n_trials):
        kind = kinds[number % len(kinds)]
        judge = judge_flip if kind == "flip" else partial(judge_kill, kind)
        yield Trial(kind, f"seed {number}", partial(judge, number))


# --- flips


_KEPT: list[str] = []


def judge_flip(seed: int) -> Result:
    """Flip a bit, perhaps lose a node, and load, by ranks that all trials share."""
    rng = random.Random(f"lost nodes {seed}")
    if not _KEPT:
        _KEPT.append(tempfile.mkdtemp(prefix="lost-nodes-"))
        assert set(on_ranks(len(_NODES), test_parity.save, _KEPT[0], _NODES, "dtensors", 3)) == {"any 1 of 3 nodes"}
        keep(_KEPT[0])
    (tmp,) = _KEPT
    restore(tmp)
    lost = rng.choice(["", *_NODES])
    file = rng.choice(sorted(each for each in Path(tmp, "nodes").glob("*/ckpt/*") if each.parts[-3] != lost))
    place = rng.randrange(file.stat().st_size)
    flip_bit(file, place, rng.randrange(8))
    what = f"byte {place} of {file.relative_to(tmp)}, {lost or 'no node'} is lost"
    errors = on_ranks(len(_NODES), test_parity.lose_and_load, tmp, _NODES, "dtensors", lost, _NODES)
    complaints = []
    for error in {each.partition("\n")[0] for each in errors}:
        is_damage = error.startswith(("CorruptCheckpoint: ", "StorageError: ", "UnsafeCheckpoint: "))
        if error and not is_damage and ".robust_dcp.index is damaged: " not in error:
            complaints.append(f"{what}: {error}")
    made = Path(tmp, "nodes", lost, "ckpt")
    if not any(errors) and lost:
        complaints += [
            f"{what}: {name} was made anew otherwise"
            for name, digest in files_of(tmp, lost).items()
            if name.endswith(".distcp") and files_of(tmp, lost, "kept")[name] != digest
        ]
    if list(made.glob("*.tmp")):
        complaints.append(f"{what}: {list(made.glob('*.tmp'))} are left")
    kind = "data" if file.suffix == ".distcp" else file.name.split(".")[-2 if "parity" in file.name else -1]
    return Result(complaints, verdict=f"{kind}{' and a node' if lost else ''}: {'named' if any(errors) else 'loads'}")


# --- kills


def judge_kill(kind: str, seed: int) -> Result:
    """Save; kill a rank while parity is made, or while a node is made anew; and load what is there."""
    rng = random.Random(f"lost nodes {seed}")
    by_disk = rng.random() < 0.6
    victim = rng.randrange(len(_NODES)), by_disk, rng.randrange(1, _DISK_CALLS if by_disk else _NETWORK_CALLS)
    lost, complaints = rng.choice(_NODES), list[str]()
    with tempfile.TemporaryDirectory(prefix="lost-nodes-") as tmp:
        saved = _run(_save, tmp, victim if kind == "protect" else None)
        was_killed = any(each.exitcode < 0 for each in saved)
        protections = {each.value for each in saved if each.exitcode == 0}
        keep(tmp)
        complaints += [str(each) for each in saved if each.exitcode > 0]
        if kind == "anew":
            was_killed = any(each.exitcode < 0 for each in _run(_load, tmp, lost, victim))
        for loses in ("", lost):
            ends = {_end(each) for each in _run(_load, tmp, loses, None)}
            is_protected = kind == "anew" or "any 1 of 3 nodes" in protections
            may_fail = loses and not is_protected and all(each.startswith("CorruptCheckpoint: ") for each in ends)
            if ends != {""} and not may_fail:
                complaints.append(f"loss of {loses or 'nothing'}, {victim}, {protections}: {ends}")
            if ends == {""} and (loses or kind == "anew"):
                made, kept = files_of(tmp, lost), files_of(tmp, lost, "kept")
                complaints += [
                    f"{name} was made otherwise" for name in kept if name[:2] == "__" and made.get(name) != kept[name]
                ]
                complaints += [f"{name} is left" for name in made if name.endswith(".tmp") or "saving" in name]
    return Result(
        complaints,
        verdict=f"{'killed' if was_killed else 'not reached'}, {'protected' if is_protected else 'not protected'}",
    )


def _run(function: Any, *args: Any) -> list[Outcome]:
    return run_ranks(len(_NODES), function, *args, timeout_seconds=300)


def _end(outcome: Outcome) -> str:
    return outcome.value if outcome.exitcode == 0 else str(outcome)


def _strike(tmp: str, by_disk: bool, number: int) -> None:
    """From now on, kill this process at a call to the disk or to the network."""
    if by_disk:
        FaultDisk(f"{tmp}/seen", on={f"*#{number}": kill}).install()
        return
    left, start = [number], Connections.start

    def count(*args: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(*args)

    Connections.start = count  # type: ignore[method-assign]


def _save(tmp: str, victim: tuple[int, bool, int] | None) -> str:
    def listen(event: Any) -> None:
        if victim is not None and event.kind == "protect" and event.name == "started" and dist.get_rank() == victim[0]:
            _strike(tmp, *victim[1:])

    with robust_dcp.on_event(listen):
        return test_parity.save(tmp, _NODES, "dtensors", 3)


def _load(tmp: str, lost: str, victim: tuple[int, bool, int] | None) -> str:
    if victim is not None and dist.get_rank() == victim[0]:
        _strike(tmp, *victim[1:])
    return test_parity.lose_and_load(tmp, _NODES, "dtensors", lost, _NODES)


if __name__ == "__main__":
    try:
        code = main(__doc__, make_trials, n_trials=1100)
    finally:
        end_shared_ranks()
        for each in _KEPT:
            shutil.rmtree(each, ignore_errors=True)
    sys.exit(code)
