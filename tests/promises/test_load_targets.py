"""What a load puts into: int keys, and tensors that overlap, that were freed, or that may not be written to.

Each case runs in a process of its own, because a load that does not look first ends the process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import robust_dcp
from robust_dcp import PlanConflict, RobustLoadPlanner, RobustReader
from tests.harness.ranks import run_ranks, values


def load_by_stock(state: dict[Any, Any], path: Path | str) -> None:
    dcp.load(state, storage_reader=RobustReader(path), planner=RobustLoadPlanner())


LOADERS: dict[str, Callable[[dict[Any, Any], Path | str], object]] = {
    "ours": lambda state, path: robust_dcp.load(state, checkpoint_id=path),
    "stock with our plugins": load_by_stock,
}


@pytest.mark.parametrize("is_stocks", [False, True])
@pytest.mark.parametrize("loader", LOADERS)
def test_what_lies_under_int_keys_is_loaded_whatever_it_is(loader: str, is_stocks: bool, tmp_path: Path) -> None:
    def state(number: int) -> dict[str, Any]:
        return {
            "state": {0: {"step": number, "w": torch.full((2,), number)}, 7: f"text {number}", (1, "a"): (number,)},
            "list": [{3: number}, torch.full((1,), number)],
        }

    (dcp.save if is_stocks else robust_dcp.save)(state(5), checkpoint_id=tmp_path)
    found = state(1)
    LOADERS[loader](found, tmp_path)
    assert str(found) == str(state(5))


def test_int_keys_beside_text_at_the_top_are_loaded(tmp_path: Path) -> None:
    robust_dcp.save({0: 5, "a": 6, 1: torch.ones(2)}, checkpoint_id=tmp_path)  # type: ignore[dict-item]
    found: dict[Any, Any] = {0: 0, "a": 0, 1: torch.zeros(2)}
    robust_dcp.load(found, checkpoint_id=tmp_path)
    assert found[0] == 5 and found["a"] == 6 and found[1].tolist() == [1, 1] and len(found) == 3


def freed(nbytes: int) -> torch.Tensor:
    tensor = torch.zeros(64)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def read_only(path: str) -> torch.Tensor:
    np.zeros(64, dtype=np.float32).tofile(f"{path}/array")
    return torch.from_numpy(np.memmap(f"{path}/array", dtype=np.float32, mode="r"))


def rows(parts: list[tuple[int, int]]) -> list[torch.Tensor]:
    whole = torch.zeros(100)
    return [whole[begin:end] for begin, end in parts]


def columns(parts: list[tuple[int, int]]) -> list[torch.Tensor]:
    whole = torch.zeros(8, 100)
    return [whole[:, begin:end] for begin, end in parts]


def one_tensor(path: str, how: str) -> list[torch.Tensor]:
    if how.startswith("freed"):
        return [freed(0 if how == "freed" else 100)]
    if how == "read only":
        return [read_only(path)]
    if how == "expanded":
        return [torch.zeros(1).expand(64)]
    if how == "part of another":
        whole = torch.zeros(64)
        return [whole, whole[10:20]]
    if how == "rows":
        return rows([(0, 60), (40, 100)])
    return columns([(0, 60), (40, 100)])


def load_into(path: str, how: str, loader: str) -> str:
    targets = one_tensor(path, how)
    robust_dcp.save({f"t{i}": torch.ones(each.shape) * i for i, each in enumerate(targets)}, checkpoint_id=f"{path}/c")
    try:
        LOADERS[loader]({f"t{i}": each for i, each in enumerate(targets)}, f"{path}/c")
    except (PlanConflict, CheckpointException) as error:  # stock wraps the errors of ranks into its own
        return str(error)
    return "loaded"


CASES = {
    "freed": ("'t0'", "freed"),
    "freed in part": ("'t0'", "freed"),
    "read only": ("'t0'", "written to"),
    "expanded": ("'t0'", "share memory"),
}

OVERLAPPING = ("part of another", "rows", "columns")


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("how", CASES)
def test_a_target_that_cannot_be_filled_is_named_before_anything_is_read(how: str, loader: str, tmp_path: Path) -> None:
    (told,) = values(run_ranks(1, load_into, str(tmp_path), how, loader))
    for word in CASES[how]:
        assert word in told


def warnings_of_load(path: str, how: str, loader: str) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("robust_dcp").addHandler(handler)
    assert load_into(path, how, loader) == "loaded"
    return lines


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("how", OVERLAPPING)
def test_targets_that_overlap_are_loaded_with_a_warning(how: str, loader: str, tmp_path: Path) -> None:
    (lines,) = values(run_ranks(1, warnings_of_load, str(tmp_path), how, loader))
    assert len([line for line in lines if "'t0' and 't1'" in line and "overlap" in line]) == 1


def load_with_other_planner(path: str) -> str:
    robust_dcp.save({"w": torch.ones(64)}, checkpoint_id=f"{path}/c")
    try:
        robust_dcp.load({"w": freed(0)}, checkpoint_id=f"{path}/c", planner=dcp.DefaultLoadPlanner())
    except PlanConflict as error:
        return str(error)
    return "loaded"


def test_a_freed_target_does_not_end_a_load_with_another_planner(tmp_path: Path) -> None:
    (told,) = values(run_ranks(1, load_with_other_planner, str(tmp_path)))
    assert "'w" in told and "freed" in told


def test_tensors_that_are_tied_or_lie_side_by_side_are_loaded(tmp_path: Path) -> None:
    tied = torch.zeros(4, 4)
    targets = [tied, tied, tied[:], *rows([(0, 50), (50, 100)]), *columns([(0, 50), (50, 100)]), torch.zeros(0)]
    targets += [torch.zeros(3, 1).expand(3, 1), torch.zeros(4, 4).t()]
    expected = {f"t{number}": torch.full(each.shape, 3.0) for number, each in enumerate(targets)}
    robust_dcp.save(expected, checkpoint_id=tmp_path)
    robust_dcp.load({f"t{number}": each for number, each in enumerate(targets)}, checkpoint_id=tmp_path)
    assert all(each.eq(3).all() for each in targets)
