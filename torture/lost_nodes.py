"""Nodes that are lost, kills and flipped bits: ``python -m torture.lost_nodes --trials 1000 --seed 1 --only flip``.

Three nodes save to drives of their own, and keep parity for each other. A load gives what was saved, or raises an error
that names a file or a node, and never anything else; and where the ranks have said that a checkpoint is protected, it
outlives a node.

``flip``: one bit of one file is flipped, in most trials a node is lost as well, and the same ranks load each time.
``--trials`` is their number. ``forge``: as many times a small file is replaced by a hostile one, whose checksums fit.
No code is run, and no memory taken for lengths that it claims.

``protect``: a rank is killed while parity is made. ``anew``: a rank is killed while a job loads, and makes the files of
a lost node anew: on a drive that is there in its place, or on the nodes that are left. There is a trial for each call
by which a rank changes a file, locks one, or sends; these are counted first. A kill between two of them leaves the same
to all others. Other ranks then load what is there, also where a node is lost, or that which was being made anew is lost
once more.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch.distributed as dist

import robust_dcp
from robust_dcp.comm.connections import Connections
from robust_dcp.nodes.parity_file import _TAIL
from robust_dcp.storage.records.checksum import SUM_NBYTES, crc32
from tests.faults.disk import CHANGES, FaultDisk, kill
from tests.harness.damage import flip_bit
from tests.harness.ranks import Outcome, end_shared_ranks, on_ranks, run_ranks, values
from tests.promises import test_parity
from tests.promises.test_parity import files_of, keep, restore
from tests.storage.forged import Call
from torture.forged import CANARY
from torture.trials import Result, Trial, main

__all__ = ["kills", "make_trials"]

NODES: Final = "abc"
_KEPT: list[str] = []
_GROWTH_NBYTES: Final = 300 << 20


def make_trials(n_trials: int, seed: int) -> Iterator[Trial]:
    """Flips, and a kill at each call."""
    _KEPT.append(tempfile.mkdtemp(prefix="lost-nodes-"))
    saved(_KEPT[0])
    for number in range(seed * 10_000, seed * 10_000 + n_trials):
        yield Trial("flip", f"seed {number}", partial(judge_damage, _KEPT[0], number, flip))
        yield Trial("forge", f"seed {number}", partial(judge_damage, _KEPT[0], number, forge))
    yield from kills(_KEPT[0])


def saved(tmp: str) -> None:
    """Save on all nodes, and keep what is there."""
    assert set(on_ranks(len(NODES), test_parity.save, tmp, NODES, "dtensors", 3)) == {"any 1 of 3 nodes"}
    keep(tmp)


def _load(tmp: str, lost: str, other: str = NODES) -> set[str]:
    """Lose nodes, and load by ranks that all trials share. The first lines of the errors; empty for a load that has
    given what was saved."""
    outcomes = on_ranks(len(NODES), test_parity.lose_and_load, tmp, NODES, "dtensors", lost, other)
    return {each.partition("\n")[0] for each in outcomes}


def _differences(tmp: str, node: str, on: str, kept: str = "kept") -> list[str]:
    """How the data files of a node, which are on some nodes now, differ from those that were kept; and what is left."""
    there = {name: digest for each in on for name, digest in files_of(tmp, each).items()}
    data = {name: digest for name, digest in files_of(tmp, node, kept).items() if name.endswith(".distcp")}
    wrong = [f"{name} is not as it was" for name, digest in data.items() if there.get(name) != digest]
    # A rank that was killed leaves the file by which it has claimed the directory, or parity that it was making.
    return wrong + [f"{name} is left" for name in there if name.endswith(".anew.tmp") and kept == "kept"]


# --- damage


def judge_damage(tmp: str, seed: int, damage: Callable[[Path, random.Random], str]) -> Result:
    """Damage a file, perhaps lose a node, and load."""
    rng = random.Random(f"lost nodes {seed}")
    restore(tmp)
    lost = rng.choice(["", *NODES])
    files = sorted(each for each in Path(tmp, "nodes").glob("*/ckpt/*") if each.parts[-3] != lost)
    file = rng.choice(files if damage is flip else [each for each in files if each.suffix not in (".distcp", ".json")])
    what = f"{damage(file, rng)} of {file.relative_to(tmp)}, {lost or 'no node'} is lost"
    before_nbytes = max(on_ranks(len(NODES), _peak_nbytes))
    errors, complaints = _load(tmp, lost), list[str]()
    for error in errors - {""}:
        is_damage = error.startswith(("CorruptCheckpoint: ", "StorageError: ", "UnsafeCheckpoint: "))
        if not is_damage and ".robust_dcp.index is damaged: " not in error:
            complaints.append(f"{what}: {error}")
    if errors == {""} and lost:
        complaints += [f"{what}: {each}" for each in _differences(tmp, lost, lost)]
    left = list(Path(tmp, "nodes").glob("*/ckpt/*.tmp"))
    complaints += [f"{what}: {left} are left"] if left else []
    if os.path.exists(CANARY):
        os.rmdir(CANARY)
        complaints.append(f"{what}: code was run")
    grown_nbytes = max(on_ranks(len(NODES), _peak_nbytes)) - before_nbytes
    complaints += [f"{what}: a rank took {grown_nbytes >> 20} MiB"] if grown_nbytes > _GROWTH_NBYTES else []
    kind = "data" if file.suffix == ".distcp" else file.name.split(".")[-2 if "parity" in file.name else -1]
    verdict = "loads" if errors == {""} else "named"
    return Result(complaints, verdict=f"{kind}{' and a node' if lost else ''}: {verdict}")


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def flip(file: Path, rng: random.Random) -> str:
    """Flip a bit."""
    place = rng.randrange(file.stat().st_size)
    flip_bit(file, place, rng.randrange(8))
    return f"byte {place}"


_TEXTS: Final = (
    b"",
    b"\0" * 5000,
    b"{}",
    b"null",
    b"[" * 300_000,
    b'{"a":' * 100_000,
    b"9" * 5000,
    b'{"number":0,"group":{}}',
    pickle.dumps(Call(os.mkdir, CANARY)),
)
_NAMES: Final = (
    "",
    ".",
    "../../x",
    "/etc/passwd",
    "a\0b",
    "__0_0.0123456789abcdef.distcp",
    "__0_0.distcp",
    "x" * 70_000,
)
_NUMBERS: Final = (-1, 0, 1, 4095, 1 << 31, (1 << 32) - 1, (1 << 43), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 80)


def forge(file: Path, rng: random.Random) -> str:
    """Replace a file by one that is hostile."""
    data = file.read_bytes()
    n_ways = 5 if "parity" in file.name else 3 if file.name == ".robust_dcp.nodes" else 2
    way = rng.randrange(n_ways)
    if way == 0:
        text = rng.choice(_TEXTS)
        file.write_bytes(text)
        return f"{text[:20]!r} in the place"
    if way == 1:
        length = rng.randrange(len(data))
        file.write_bytes(data[:length])
        return f"the first {length} bytes"
    if n_ways == 3:
        text = _mutated(data, rng)
        file.write_bytes(text)
        return f"{text[:200]!r} in the place"
    magic, parity_nbytes, note_nbytes, *_ = _TAIL.unpack(data[-_TAIL.size - 4 : -4])
    parity, note = data[:parity_nbytes], data[-_TAIL.size - 4 - note_nbytes : -_TAIL.size - 4]
    if way == 2:
        note = _mutated(note, rng)
    elif way == 3:
        parity = rng.randbytes(len(parity))
    sums = b"".join(
        crc32(parity[at : at + SUM_NBYTES]).to_bytes(4, "little") for at in range(0, len(parity), SUM_NBYTES)
    )
    numbers = [len(parity), len(note)]
    if way == 4:
        numbers[rng.randrange(2)] = rng.choice(_NUMBERS[1:-1])
    tail = _TAIL.pack(magic, *numbers, crc32(sums), crc32(note))
    end = sums + note + tail + crc32(tail).to_bytes(4, "little")
    file.write_bytes(parity + end)
    if way == 4 and numbers[0] == 1 << 43:  # a hole makes it as long as it says
        os.truncate(file, numbers[0] + numbers[0] // SUM_NBYTES * 4)
        with file.open("ab") as opened:
            opened.write(end[len(sums) :])
    return f"a forged {('note ' + repr(note[:300]), 'parity', f'end {numbers}')[way - 2]}"


def _mutated(text: bytes, rng: random.Random) -> bytes:
    """JSON with another value at one place."""
    document = json.loads(text)
    places: list[tuple[Any, Any]] = []
    left = [document]
    while left:
        value = left.pop()
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                left.append(value[key])
    value, key = rng.choice(places)
    if isinstance(value[key], list) and value[key] and rng.random() < 0.5:
        value[key].append(value[key][0])
    elif rng.random() < 0.3:
        value[key] = rng.choice([None, [], {}, "x", 1.5, -1])
    else:
        value[key] = rng.choice(_NUMBERS if isinstance(value[key], int) else _NAMES)
    return json.dumps(document).encode()


# --- kills


class Blow(NamedTuple):
    """Where a process is killed: its rank, by which means it acts there, and the number of that act, from 0 on."""

    rank: int
    means: str
    number: int


class _Counted:
    """Counts what others can see of this process from now on: calls that change files, locks, and what it sends. Kills
    it at one of them."""

    def __init__(self, tmp: str, blow: Blow | None) -> None:
        at = {} if blow is None or blow.rank != dist.get_rank() else {blow.means: blow.number}
        self._disk = FaultDisk(f"{tmp}/seen", counted=CHANGES | {"lock"}, at=(at.get("disk", -1), kill)).install()
        self._n_sent = 0
        start = Connections.start

        def counted(connections: Connections, verb: Any, *args: Any) -> Any:
            if verb == "send":
                if self._n_sent == at.get("network"):
                    os.kill(os.getpid(), signal.SIGKILL)
                self._n_sent += 1
            return start(connections, verb, *args)

        Connections.start = counted  # type: ignore[assignment, method-assign]

    def result(self) -> dict[str, int]:
        return {"disk": self._disk.n_counted, "network": self._n_sent}


def _protect(tmp: str, blow: Blow | None) -> tuple[str, dict[str, int]]:
    """Save, and count from the beginning of the making of parity. What the report says of it."""
    counted = list[_Counted]()

    def listen(event: Any) -> None:
        if event.kind == "protect" and event.name == "started":
            counted.append(_Counted(tmp, blow))

    with robust_dcp.on_event(listen):
        protection = test_parity.save(tmp, NODES, "dtensors", 3)
    return protection, counted[0].result()


def _make_anew(tmp: str, lost: str, other: str, blow: Blow | None) -> tuple[str, dict[str, int]]:
    """Lose a node, and load on others. The error, if there is one."""
    counted = _Counted(tmp, blow)
    return test_parity.lose_and_load(tmp, NODES, "dtensors", lost, other), counted.result()


_WAYS: Final = {"protect": ("", NODES), "anew a": ("a", NODES), "anew c": ("c", NODES), "anew b on ac": ("b", "ac")}
"""Which node is lost, and on which nodes a job then loads."""


def kills(tmp: str, ways: Sequence[str] = tuple(_WAYS), *, draw: random.Random | None = None) -> Iterator[Trial]:
    """A trial for each call of each rank.

    Args:
        tmp: where :func:`saved` has saved.
        draw: draws one of each rank and each means; ``None`` for all.
    """
    for kind in ways:
        outcomes = values(_act(tmp, kind, None))
        assert {protection for protection, _ in outcomes} <= {"", "any 1 of 3 nodes"}, outcomes
        for rank in range(len(_WAYS[kind][1])):
            for means, n_calls in outcomes[rank][1].items():
                for number in range(n_calls) if draw is None else [draw.randrange(n_calls)]:
                    what, blow = f"call {number} of {n_calls}", Blow(rank, means, number)
                    yield Trial(f"{kind}, rank {rank}, {means}", what, partial(judge_kill, tmp, kind, blow))


def _act(tmp: str, kind: str, blow: Blow | None) -> list[Outcome]:
    restore(tmp)
    if kind == "protect":
        for node in NODES:
            shutil.rmtree(Path(tmp, "nodes", node, "ckpt"))
        return run_ranks(len(NODES), _protect, tmp, blow, timeout_seconds=300)
    return run_ranks(len(NODES), _make_anew, tmp, *_WAYS[kind], blow, timeout_seconds=300)


def judge_kill(tmp: str, kind: str, blow: Blow) -> Result:
    """Kill a rank while parity is made, or while a node is made anew, and load what is there."""
    outcomes = _act(tmp, kind, blow)
    complaints = [str(each) for each in outcomes if each.exitcode > 0 and kind == "protect"]
    keep(tmp, "left")
    lost, other = _WAYS[kind]
    loads, kept, outlived = [("", other), (lost, NODES)], "kept", 0
    may_fail = False
    if kind == "protect":
        loads, kept = [("", other), *((node, other) for node in NODES)], "left"
        may_fail = "any 1 of 3 nodes" not in {each.value[0] for each in outcomes if each.value}
    for loses, on in loads:
        restore(tmp, "left")
        errors = _load(tmp, loses, on)
        if errors == {""}:
            complaints += [f"{loses or lost} is lost: {each}" for each in _differences(tmp, loses or lost, on, kept)]
            outlived += bool(loses)
        elif not (loses and may_fail and all(each.startswith("CorruptCheckpoint: ") for each in errors)):
            complaints.append(f"{loses or 'no node'} is lost once more, load on {on}: {errors}")
    is_killed = "killed" if any(each.exitcode < 0 for each in outcomes) else "not reached"
    return Result(complaints, verdict=f"{is_killed}, outlives {outlived} of {len(loads) - 1} losses")


if __name__ == "__main__":
    try:
        code = main(__doc__, make_trials, n_trials=1000)
    finally:
        end_shared_ranks()
        for each in _KEPT:
            shutil.rmtree(each, ignore_errors=True)
    sys.exit(code)
