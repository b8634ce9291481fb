"""A failure on one rank is the same exception on all of them; nothing is committed, nothing stays, nobody waits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter
from robust_dcp.comm import patience
from tests.api.test_cached_plans import check_loads
from tests.api.verdicts import Verdict, verdict_of
from tests.harness.ranks import errors, in_ranks, run_ranks, values

StateDict = dict[str, Any]


def shards(step: int) -> StateDict:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        f"w{rank}": torch.full((400_000,), float(step + rank)),
        f"v{rank}": torch.full((7,), float(step)),
        "shared": torch.full((300_000,), float(step)),
        f"object {rank}": "x" * 50 * (step + 1),
    }


# Stock: what happens today.


# Ours.


class Broken:
    """A ``Stateful`` that raises on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> StateDict:
        if dist.get_rank() == self.rank:
            raise LookupError("this rank has lost its state")
        return {"w": torch.ones(2)}

    def load_state_dict(self, state_dict: StateDict) -> None:
        if dist.get_rank() == self.rank:
            raise LookupError("this rank does not take its state")


class BrokenPlanner(RobustPlanner):
    """Raises on rank 1 in one of its hooks."""

    def __init__(self, broken: str) -> None:
        super().__init__()
        self.broken = broken

    def _raise_in(self, hook: str) -> None:
        if self.broken == hook and dist.get_rank() == 1:
            raise LookupError(f"broken {hook}")

    def set_up_planner(
        self, state_dict: StateDict, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._raise_in("set_up_planner")

    def describe(self, *args: Any, **kwargs: Any) -> Any:
        self._raise_in("describe")
        return super().describe(*args, **kwargs)

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._raise_in("resolve_data")
        return super().resolve_data(write_item)


def break_a_hook_in_stock(directory: str, no_dist: bool) -> Verdict:
    writer, planner = RobustWriter(directory), BrokenPlanner("resolve_data")
    return verdict_of(dcp.save, shards(1), storage_writer=writer, planner=planner, no_dist=no_dist)


@pytest.mark.parametrize("no_dist", [False, True])
def test_an_exception_of_one_rank_in_stock_save_is_raised_on_all(no_dist: bool, tmp_path: Path) -> None:
    for verdict in values(in_ranks(3, break_a_hook_in_stock, str(tmp_path), no_dist)):
        assert verdict.type_name == "CheckpointException" and "broken resolve_data" in verdict.message
    assert os.listdir(tmp_path) == []


def raise_to_each_kind_of_caller(directory: str) -> list[str]:
    kinds = (Exception, CheckpointException, RuntimeError)
    return [caught_as(kind, lambda: robust_dcp.save({"broken": Broken(0)}, checkpoint_id=directory)) for kind in kinds]


def caught_as(kind: type[BaseException], call: Callable[[], Any]) -> str:
    try:
        call()
    except kind:
        return kind.__name__
    return ""


def test_what_we_raise_is_caught_as_exception_and_as_checkpoint_exception(tmp_path: Path) -> None:
    for caught in values(in_ranks(2, raise_to_each_kind_of_caller, str(tmp_path))):
        assert caught == ["Exception", "CheckpointException", "RuntimeError"]


def save_to_two_places(directory: str, how: str) -> tuple[Verdict, list[str]]:
    patience.ELSEWHERE_SECONDS = 2.0
    path = f"{directory}/{dist.get_rank()}"
    if how == "ours":
        verdict = verdict_of(robust_dcp.save, shards(0), checkpoint_id=path, timeout_seconds=20)
    else:
        writer, planner = RobustWriter(path), RobustPlanner(timeout_seconds=20)
        verdict = verdict_of(dcp.save, shards(0), storage_writer=writer, planner=planner, no_dist=True)
    return verdict, os.listdir(path) if os.path.isdir(path) else []


@pytest.mark.parametrize("how", ["ours", "stock no_dist"])
def test_ranks_that_save_to_different_places_are_told(how: str, tmp_path: Path) -> None:
    for verdict, files in values(in_ranks(2, save_to_two_places, str(tmp_path), how)):
        assert verdict.type_name == ("ExchangeError" if how == "ours" else "CheckpointException")
        assert f"{tmp_path}/0" in verdict.message and f"{tmp_path}/1" in verdict.message
        assert files == []


def come_late(directory: str) -> Verdict:
    if dist.get_rank() == 1:
        time.sleep(4)
    verdict = verdict_of(robust_dcp.save, shards(0), checkpoint_id=directory, timeout_seconds=2)
    dist.barrier()
    # All are here again: the next save works.
    assert robust_dcp.save(shards(1), checkpoint_id=directory, timeout_seconds=30).plan == "built"
    check_loads(shards(1), directory)
    return verdict


def test_a_rank_that_comes_too_late_is_named_on_both_sides_and_the_next_save_works(tmp_path: Path) -> None:
    early, late = values(in_ranks(2, come_late, str(tmp_path / "checkpoint")))
    assert early.type_name == late.type_name == "ExchangeTimeout"
    assert early.fields["missing_ranks"] == [1]
    assert "2" in early.message


def pass_what_is_no_dict(directory: str) -> list[list[str]]:
    module = torch.nn.Linear(2, 2)
    found = []
    for value in (module, torch.optim.SGD(module.parameters()), [torch.ones(2)], None, torch.ones(2)):
        # On one rank only, too: the others are not left waiting.
        for state_dict in (value, value if dist.get_rank() == 1 else {"model": module}):
            for call in (robust_dcp.save, robust_dcp.load):
                verdict = verdict_of(call, state_dict, checkpoint_id=directory, timeout_seconds=20)
                found.append([call.__name__, type(value).__name__, verdict.type_name, verdict.message])
    robust_dcp.save({"model": module}, checkpoint_id=directory)  # what the message says works
    robust_dcp.load({"model": module}, checkpoint_id=directory)
    return found


def test_what_is_no_dict_is_refused_on_all_ranks_with_what_to_pass(tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    values(run_ranks(1, save_a_module, directory, init=False))
    first, second = values(in_ranks(2, pass_what_is_no_dict, directory))
    assert first == second
    for _, kind, type_name, message in first:
        assert type_name == "RobustCheckpointError" and f"a {kind} was passed" in message
        assert ('{"model": model}' if kind in ("Linear", "SGD") else '{"name": value}') in message


def save_a_module(directory: str) -> None:
    robust_dcp.save({"model": torch.nn.Linear(2, 2)}, checkpoint_id=directory)


def interrupt_one_rank(directory: str) -> tuple[str, str]:
    class Interrupted(RobustPlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            if dist.get_rank() == 1:
                raise KeyboardInterrupt
            return super().resolve_data(write_item)

    try:
        robust_dcp.save(shards(0), checkpoint_id=directory, planner=Interrupted(), timeout_seconds=20)
    except KeyboardInterrupt:
        return "KeyboardInterrupt", ""
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_ctrl_c_on_one_rank_ends_the_save_on_all(tmp_path: Path) -> None:
    other, interrupted = values(in_ranks(2, interrupt_one_rank, str(tmp_path)))
    assert interrupted[0] == "KeyboardInterrupt"
    assert other[0] == "RobustCheckpointError" and "KeyboardInterrupt" in other[1]
    assert os.listdir(tmp_path) == []


def fail_to_be_set_up(directory: str, how: str) -> None:
    if how == "writer":
        robust_dcp.save({}, checkpoint_id=directory, storage_writer=dcp.FileSystemWriter(directory))
    elif how == "planner":
        robust_dcp.save({}, checkpoint_id=directory, planner=type("Other", (dcp.DefaultSavePlanner,), {})())
    elif how == "place":
        robust_dcp.save({})
    elif how == "overwrite":
        robust_dcp.save(shards(0), checkpoint_id=directory)
        robust_dcp.save(shards(1), storage_writer=RobustWriter(directory, overwrite=False))
    else:
        Path(directory).write_text("a file is here")
        robust_dcp.save(shards(0), checkpoint_id=f"{directory}/1")


@pytest.mark.parametrize(
    ("how", "expected", "words"),
    [
        ("writer", TypeError, "FileSystemWriter"),
        ("planner", TypeError, "RobustPlanner"),
        ("place", ValueError, "checkpoint_id"),
        ("overwrite", OSError, "overwrite=False"),
        ("file", OSError, "directory"),
    ],
)
def test_a_save_that_cannot_work_says_what_to_pass(
    how: str, expected: type[Exception], words: str, tmp_path: Path
) -> None:
    (error,) = errors(run_ranks(1, fail_to_be_set_up, str(tmp_path / "checkpoint"), how, init=False))
    assert error.is_a(expected) and words in error.message
