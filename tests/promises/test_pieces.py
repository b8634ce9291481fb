"""Each rank writes a piece of ``.metadata`` and of the index: all of them are there, or nothing is committed."""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp.storage.reader import RobustReader
from tests.faults.disk import Call, Fault, FaultDisk, kill, short
from tests.harness.ranks import on_ranks, run_ranks, values
from tests.harness.verdicts import Verdict, verdict_of

FULL = OSError(errno.ENOSPC, "")


def state(step: int, rank: int) -> dict[str, Any]:
    """Names that one rank has, that both have, and an object whose length changes."""
    own = {f"r{rank}.w{n}": torch.full((3, n + 1), float(step)) for n in range(3)}
    return {**own, "both": torch.full((5,), float(step)), f"o{rank}": "x" * step}


def check(directory: str, step: int, rank: int, *, by_stock: bool = False) -> None:
    found = {name: torch.zeros_like(each) if torch.is_tensor(each) else "" for name, each in state(0, rank).items()}
    (dcp.load if by_stock else robust_dcp.load)(found, checkpoint_id=directory)
    for name, expected in state(step, rank).items():
        assert torch.equal(found[name], expected) if torch.is_tensor(expected) else found[name] == expected, name


def remove(call: Call) -> None:
    os.unlink(call.path)


def empty(call: Call) -> None:
    os.truncate(call.path, 0)


def overwrite(call: Call) -> None:
    """With the piece of another save, say, which has the same length."""
    with open(call.path, "r+b") as file:
        data = file.read()
        file.seek(0)
        file.write(data.replace(b"r1.w", b"r2.w") if b"r1.w" in data else bytes(len(data)))


CASES: dict[str, tuple[int, dict[str, Fault], str]] = {
    "short writes": (1, {"write:.*.tmp": short}, ""),
    "no room for a piece": (1, {"write:.metadata.*": FULL}, "rank 1.*ENOSPC"),
    "no room for a block of the index": (1, {"write:.robust_dcp.index.*": FULL}, "no index"),
    "a piece is not synced": (1, {"fsync:.metadata.*": OSError(errno.EIO, "")}, "rank 1.*EIO"),
    "what ranks have written is removed": (1, {"fsync:.metadata.*": remove}, "nothing is committed"),
    "what ranks have written is cut off": (1, {"fsync:.metadata.*": empty}, "nothing is committed"),
    "another save writes over them": (1, {"fsync:.metadata.*": overwrite}, "nothing is committed"),
    "the index is removed": (0, {"rename:.robust_dcp.index": lambda call: os.unlink(call.source)}, "no index"),
}


def save_with_faults(directory: str) -> dict[str, Verdict]:
    rank, verdicts = dist.get_rank(), {}
    for number, (name, (of_rank, faults, expected)) in enumerate(CASES.items()):
        path = f"{directory}/{number}"
        robust_dcp.save(state(1, rank), checkpoint_id=path)
        with FaultDisk(path, on=faults if rank == of_rank else {}):
            verdicts[name] = verdict_of(robust_dcp.save, state(2, rank), checkpoint_id=path)
        is_saved = expected in ("", "no index")
        check(path, 2 if is_saved else 1, rank)
        check(path, 2 if is_saved else 1, rank, by_stock=True)
        if is_saved:
            metadata = RobustReader(path).source
            assert bool(metadata.find().index) == (expected == ""), name
        robust_dcp.save(state(3, rank), checkpoint_id=path)
        check(path, 3, rank)
        dist.barrier()
        assert [each for each in os.listdir(path) if each.endswith(".tmp") or ".saving." in each] == []
        dist.barrier()
    return verdicts


def test_a_piece_that_is_not_there_is_named_on_all_ranks_and_nothing_is_committed(tmp_path: Path) -> None:
    for verdicts in on_ranks(2, save_with_faults, str(tmp_path)):
        for name, (_, _, expected) in CASES.items():
            verdict = verdicts[name]
            if expected in ("", "no index"):
                assert verdict.type_name == "", (name, verdict)
            else:
                assert verdict.type_name == "StorageError" and re.search(expected, str(verdict)), (name, verdict)


def save_and_be_killed(directory: str, key: str) -> Verdict:
    rank = dist.get_rank()
    robust_dcp.save(state(1, rank), checkpoint_id=directory)
    with FaultDisk(directory, on={key: kill} if rank == 1 else {}):
        return verdict_of(robust_dcp.save, state(2, rank), checkpoint_id=directory, timeout_seconds=20)


def save_once_more(directory: str) -> None:
    rank = dist.get_rank()
    check(directory, 1, rank)
    robust_dcp.save(state(3, rank), checkpoint_id=directory)
    check(directory, 3, rank)


@pytest.mark.parametrize("key", ["write:.metadata.*", "write:.robust_dcp.index.*", "read:.metadata.*"])
def test_a_rank_that_is_killed_between_its_piece_and_the_commit_is_named_and_nothing_is_committed(
    key: str, tmp_path: Path
) -> None:
    survivor, killed = run_ranks(2, save_and_be_killed, str(tmp_path), key)
    assert killed.exitcode == -signal.SIGKILL
    assert survivor.value.fields["missing_ranks"] == [1]
    values(run_ranks(2, save_once_more, str(tmp_path)))
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []
