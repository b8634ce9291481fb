"""Of a value that differs between ranks under one name the lowest rank's copy is saved, and somebody says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp import PlanConflict, RobustPlanner
from tests.harness.ranks import run_ranks, values

_SMALL = 64 << 10


def _differing_state() -> dict[str, Any]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    return {
        "iteration": 7,
        "rng": {"torch": torch.get_rng_state(), "python": (rank, "state")},
        "holds a tensor": ("alike", torch.ones(5)),
        "small": torch.full((_SMALL,), rank, dtype=torch.uint8),
        "large": torch.zeros(_SMALL + 1, dtype=torch.uint8),
        **{f"filler{n}": torch.zeros(1 << 20) for n in range(6)},
    }


def _save_what_differs(path: Path, mode: Any) -> tuple[Any, list[str], dict[str, Any]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("robust_dcp").addHandler(handler)
    planner = RobustPlanner(on_replica_mismatch=mode)
    try:
        found: Any = robust_dcp.save(_differing_state(), checkpoint_id=path, planner=planner).differing_replicas
    except PlanConflict as error:
        return (error.key, error.ranks), lines, {}
    again = robust_dcp.save(_differing_state(), checkpoint_id=path, planner=planner)
    assert (again.plan, again.differing_replicas) == ("reused", {})
    loaded = _differing_state()
    robust_dcp.load(loaded, checkpoint_id=path)
    return found, lines, {"python": loaded["rng"]["python"], "small": loaded["small"][0].item()}


_DIFFERING = dict.fromkeys(("rng.python", "rng.torch", "small"), (0, 1, 2))


def test_what_differs_is_named_once_and_the_lowest_ranks_copy_is_saved(tmp_path: Path) -> None:
    outcomes = values(run_ranks(3, _save_what_differs, tmp_path / "saved", "warn"))
    for found, _, loaded in outcomes:
        assert found == _DIFFERING
        assert loaded == {"python": (0, "state"), "small": 0}
    lines = [lines for _, lines, _ in outcomes]
    assert [len(each) for each in lines] == [1, 0, 0]
    assert all(repr(key) in lines[0][0] for key in _DIFFERING)
    assert "holds a tensor" not in lines[0][0]


def test_what_differs_is_an_error_on_request_before_anything_is_written(tmp_path: Path) -> None:
    for found, _, _ in values(run_ranks(3, _save_what_differs, tmp_path / "refused", "error")):
        assert found == ("rng.python", [0, 1, 2])
    assert not (tmp_path / "refused").exists()


def test_what_differs_is_nobodys_business_on_request(tmp_path: Path) -> None:
    for found, lines, loaded in values(run_ranks(3, _save_what_differs, tmp_path / "saved", "ignore")):
        assert (found, lines) == ({}, [])
        assert loaded == {"python": (0, "state"), "small": 0}


class _CountsPickles:
    """An object that counts how often its process pickles it."""

    n_pickled = 0

    def __reduce__(self) -> tuple[Any, ...]:
        type(self).n_pickled += 1
        return dict, ()


def _pickles_in_repeated_saves(directory: Path) -> list[int]:
    found = []
    for step in range(3):
        robust_dcp.save({"o": _CountsPickles()}, checkpoint_id=directory / str(step))
        found.append(_CountsPickles.n_pickled)
    return found


def test_a_repeated_save_pickles_only_what_it_writes(tmp_path: Path) -> None:
    writing, other = values(run_ranks(2, _pickles_in_repeated_saves, tmp_path))
    assert other == [other[0]] * 3
    assert writing[2] - writing[1] == writing[1] - writing[0] > 0
