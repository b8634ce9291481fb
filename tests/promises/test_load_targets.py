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
from tests.harness.ranks import in_ranks, values


def load_by_stock(state: dict[Any, Any], path: Path | str) -> None:
    dcp.load(state, storage_reader=RobustReader(path), planner=RobustLoadPlanner())


def load_by_other_planner(state: dict[Any, Any], path: Path | str) -> None:
    robust_dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner())


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


def freed(nbytes: int) -> list[torch.Tensor]:
    tensor = torch.zeros(64)
    tensor.untyped_storage().resize_(nbytes)
    return [tensor]


def read_only(path: str) -> list[torch.Tensor]:
    np.zeros(64, dtype=np.float32).tofile(f"{path}/array")
    return [torch.from_numpy(np.memmap(f"{path}/array", dtype=np.float32, mode="r"))]


def rows(*parts: tuple[int, int]) -> list[torch.Tensor]:
    whole = torch.zeros(100)
    return [whole[begin:end] for begin, end in parts]


def columns(*parts: tuple[int, int]) -> list[torch.Tensor]:
    whole = torch.zeros(8, 100)
    return [whole[:, begin:end] for begin, end in parts]


TARGETS: dict[str, tuple[Callable[[str], list[torch.Tensor]], str, str]] = {
    # how targets are made, and what the error says, or the warning
    "freed": (lambda path: freed(0), "'t0", "freed"),
    "freed in part": (lambda path: freed(100), "'t0'", "freed"),
    "read only": (read_only, "'t0'", "written to"),
    "expanded": (lambda path: [torch.zeros(1).expand(64)], "'t0'", "share memory"),
    "part of another": (lambda path: rows((0, 64), (10, 20)), "'t0' and 't1'", "overlap"),
    "rows": (lambda path: rows((0, 60), (40, 100)), "'t0' and 't1'", "overlap"),
    "columns": (lambda path: columns((0, 60), (40, 100)), "'t0' and 't1'", "overlap"),
}


def load_into(path: str, how: str) -> list[list[str]]:
    """What each loader says."""
    told = []
    loaders = LOADERS | ({"another planner": load_by_other_planner} if how == "freed" else {})
    for name, loader in loaders.items():
        targets, lines = TARGETS[how][0](path), []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())  # type: ignore[method-assign]
        saved = {f"t{i}": torch.ones(each.shape) * i for i, each in enumerate(targets)}
        robust_dcp.save(saved, checkpoint_id=f"{path}/{name}")
        logging.getLogger("robust_dcp").addHandler(handler)
        try:
            loader({f"t{i}": each for i, each in enumerate(targets)}, f"{path}/{name}")
        except (PlanConflict, CheckpointException) as error:  # stock wraps the errors of ranks into its own
            lines.append(f"refused: {error}")
        logging.getLogger("robust_dcp").removeHandler(handler)
        told.append(lines)
    return told


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("how", TARGETS)
def test_targets_that_cannot_be_filled_are_refused_by_name_and_those_that_overlap_are_warned_of(
    how: str, tmp_path: Path
) -> None:
    (told,) = values(in_ranks(1, load_into, str(tmp_path), how))
    for lines in told:
        assert len([line for line in lines if all(word in line for word in TARGETS[how][1:])]) == 1
        assert any(line.startswith("refused") for line in lines) == (TARGETS[how][2] != "overlap")


def test_tensors_that_are_tied_or_lie_side_by_side_are_loaded(tmp_path: Path) -> None:
    tied = torch.zeros(4, 4)
    targets = [tied, tied, tied[:], *rows((0, 50), (50, 100)), *columns((0, 50), (50, 100)), torch.zeros(0)]
    targets += [torch.zeros(3, 1).expand(3, 1), torch.zeros(4, 4).t()]
    expected = {f"t{number}": torch.full(each.shape, 3.0) for number, each in enumerate(targets)}
    robust_dcp.save(expected, checkpoint_id=tmp_path)
    robust_dcp.load({f"t{number}": each for number, each in enumerate(targets)}, checkpoint_id=tmp_path)
    assert all(each.eq(3).all() for each in targets)
