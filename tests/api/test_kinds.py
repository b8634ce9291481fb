"""A job may save several kinds in turn: none of them has changed because another was saved in between."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter
from tests.api.test_cached_plans import check_loads
from tests.api.verdicts import verdict_of
from tests.harness.ranks import in_ranks, values

StateDict = dict[str, Any]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def model(step: int, more: int = 0) -> StateDict:
    found: StateDict = {f"layers.{n}.weight": torch.full((4,), float(step + n)) for n in range(6 + more)}
    return {**found, f"own {rank()}": torch.full((rank() + 1,), float(step)), "step": step}


def loader(step: int) -> StateDict:
    """Another set of keys each time, and nothing on the coordinator; every rank has one key of the model's."""
    workers = {} if rank() == 0 else {f"worker {rank()}.{n}": step for n in range(step + 1)}
    return {**workers, "step": step}


def lines_of(logger: str = "robust_dcp") -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    return lines


def save(state_dict: StateDict, path: str, way: str, kind: str | None, mode: Any = "error") -> tuple[str, str]:
    planner = RobustPlanner(on_structure_change=mode, kind=None if way == "ours" else kind)
    if way == "ours":
        report = robust_dcp.save(state_dict, checkpoint_id=path, planner=planner, kind=kind)
        check_loads(state_dict, path)
        return report.plan, report.reason
    writer = RobustWriter(path)
    dcp.save(state_dict, storage_writer=writer, planner=planner, no_dist=way == "stock no_dist")
    session = planner._begun()
    if dist.is_initialized():
        dist.barrier()
    check_loads(state_dict, path)
    return session.outcome, session.reason


def save_in_turn(directory: str, way: str, named: bool) -> tuple[list[str], list[str]]:
    lines = lines_of()
    outcomes = []
    for step in range(4):
        for kind, state in (("model", model(step)), ("loader", loader(step))):
            path = f"{directory}/{kind}{step}"
            # The loader's keys change each time, which is for it to say; the model's never do.
            mode = "error" if kind == "model" or step == 0 else "quiet"
            outcomes.append(kind[0] + " " + save(state, path, way, kind if named else None, mode)[0])
    return outcomes, lines


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("way", ["ours", "stock", "stock no_dist"])
def test_a_model_and_a_loader_in_turn_never_look_like_a_change_of_each_other(
    way: str, named: bool, tmp_path: Path
) -> None:
    for outcomes, lines in values(in_ranks(3, save_in_turn, str(tmp_path), way, named)):
        assert outcomes[0::2] == ["m built", "m reused", "m reused", "m reused"]
        assert outcomes[1] == "l built" and "l reused" not in outcomes
        assert lines == []


def change_of_each_kind(directory: str, named: bool) -> list[Any]:
    """Each kind changes once; the report names only what changed in it."""
    found: list[Any] = []
    for step, state, kind in (
        (0, model(0), "model"),
        (1, loader(2), "loader"),
        (2, model(2, more=1), "model"),
        (3, loader(3), "loader"),
        (4, model(4), "model"),
        (5, model(5, more=1), "model"),
    ):
        report = robust_dcp.save(state, checkpoint_id=f"{directory}/{step}", kind=kind if named else None)
        changes = report.changes
        found.append((report.plan, None if changes is None else (changes.added, changes.removed)))
    refused = verdict_of(
        robust_dcp.save,
        model(6, more=2),
        checkpoint_id=f"{directory}/6",
        planner=RobustPlanner(on_structure_change="error", kind="model" if named else None),
    )
    return [*found, (refused.type_name, refused.fields)]


@pytest.mark.parametrize("named", [False, True])
def test_a_change_is_told_against_the_last_save_of_the_same_kind(named: bool, tmp_path: Path) -> None:
    outcomes = values(in_ranks(2, change_of_each_kind, str(tmp_path), named))
    assert outcomes[0] == outcomes[1]
    first, loader_first, grown, loader_again, back, again, refused = outcomes[0]
    assert first == loader_first == ("built", None)
    assert grown == ("rebuilt", (("layers.6.weight",), ()))
    assert loader_again[1] == (("worker 1.3",), ())
    assert back == again == ("reused", None)
    assert refused == ("StructureChanged", {"added": ["layers.7.weight"], "removed": [], "changed": []})


def same_names(directory: str) -> list[str]:
    """A model and its EMA under the same names, told apart by the caller; the EMA has a key more."""
    outcomes = []
    for step in range(3):
        for kind, state in (("model", model(step)), ("ema", model(step, more=1))):
            outcomes.append(save(state, f"{directory}/{kind}{step}", "ours", kind)[0])
    return outcomes


def test_kinds_of_the_same_names_are_told_apart_by_the_callers_word(tmp_path: Path) -> None:
    for outcomes in values(in_ranks(2, same_names, str(tmp_path))):
        assert outcomes == ["built", "built", *["reused"] * 4]


def one_rank_alike(directory: str, alike: int) -> list[str]:
    """One rank holds the same in both kinds (or nothing): by itself it cannot tell which of them is saved."""
    outcomes = []
    for step in range(3):
        for kind in ("model", "loader"):
            state = {f"{kind} {rank()} {n}": torch.full((2,), step) for n in range(0 if rank() == alike else 3)}
            outcomes.append(save(state, f"{directory}/{kind}{step}", "ours", None)[0])
    return outcomes


@pytest.mark.parametrize("alike", [0, 1, 2])
def test_a_rank_that_holds_nothing_goes_with_the_others(alike: int, tmp_path: Path) -> None:
    for outcomes in values(in_ranks(3, one_rank_alike, str(tmp_path), alike)):
        assert outcomes == ["built", "built", *["reused"] * 4]
