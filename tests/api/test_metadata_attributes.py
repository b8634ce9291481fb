"""Planners that add attributes to ``Metadata``: stock readers find them, and a repeated save keeps them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustPlanner
from robust_dcp.plan.cache import PLANS
from tests.api.verdicts import verdict_of
from tests.harness.ranks import in_ranks, run_ranks, values


class TellingPlanner(RobustPlanner):
    """Tells one fact of each of its rank's names."""

    def __init__(self, fact: Any = (4, 2)) -> None:
        super().__init__()
        self.fact = fact

    def metadata_attributes(self) -> dict[str, dict[str, Any]]:
        return {"facts": {name: {"of": self.fact} for name in self.state_dict}}


def _state_dict() -> dict[str, Any]:
    return {"w": torch.ones(3), f"own.{dist.get_rank()}": torch.ones(2)}


def _told(directory: str) -> Any:
    return dcp.FileSystemReader(directory).read_metadata().facts  # type: ignore[attr-defined]


def save_again_and_again(directory: str) -> list[tuple[str, Any]]:
    """The plan of each save, and the facts that stock's reader finds."""
    found = []

    def save(name: str, fact: Any = (4, 2)) -> None:
        path = os.path.join(directory, name)
        report = robust_dcp.save(_state_dict(), checkpoint_id=path, planner=TellingPlanner(fact))
        found.append((report.plan, _told(path)))
        dist.barrier()

    save("first")
    save("again")
    save("changed", "other")
    PLANS.clear()
    state_dict = _state_dict()
    robust_dcp.load(state_dict, checkpoint_id=os.path.join(directory, "again"))
    save("resumed")
    path = os.path.join(directory, "by stock's writer")
    dcp.save(_state_dict(), storage_writer=dcp.FileSystemWriter(path), planner=TellingPlanner())
    found.append(("", _told(path)))
    return found


def test_all_ranks_facts_are_in_the_metadata_of_every_save(tmp_path: Path) -> None:
    names = ("w", "own.0", "own.1")
    told, changed = ({name: {"of": fact} for name in names} for fact in ((4, 2), "other"))
    plans = ["built", "reused", "rebuilt", "reused", ""]
    for found in values(in_ranks(2, save_again_and_again, os.fspath(tmp_path))):
        assert [plan for plan, _ in found] == plans
        assert [facts for _, facts in found] == [told, told, changed, told, told]


class ChangingPlanner(RobustPlanner):
    """Keeps its facts, and changes them where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: dict[str, Any] = {"w": {"of": 1}}

    def metadata_attributes(self) -> dict[str, dict[str, Any]]:
        return {"facts": self.facts}


def save_with_facts_that_change(directory: str) -> list[Any]:
    planner = ChangingPlanner()
    found = []
    for number, fact in enumerate((1, 1, 2, True, False, 0)):
        planner.facts["w"]["of"] = fact
        path = os.path.join(directory, str(number))
        robust_dcp.save({"w": torch.ones(3)}, checkpoint_id=path, planner=planner)
        found.append(_told(path)["w"]["of"])
    return found


def test_a_fact_that_a_planner_changed_in_place_is_the_one_that_is_saved(tmp_path: Path) -> None:
    (found,) = values(run_ranks(1, save_with_facts_that_change, os.fspath(tmp_path), init=False))
    assert [repr(fact) for fact in found] == ["1", "1", "2", "True", "False", "0"]


def contradict(directory: str) -> Any:
    return verdict_of(
        robust_dcp.save, _state_dict(), checkpoint_id=directory, planner=TellingPlanner((dist.get_rank(), 2))
    )


def test_a_contradiction_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    for verdict in values(in_ranks(2, contradict, os.fspath(tmp_path / "checkpoint"))):
        assert verdict.type_name == "PlanConflict"
        assert "facts['w'] of the metadata is {'of': (0, 2)} on rank 0 and {'of': (1, 2)} on rank 1" in verdict.message


def tell_what_cannot_be_told(directory: str) -> Any:
    fact = object() if dist.get_rank() == 1 else 1
    return verdict_of(robust_dcp.save, _state_dict(), checkpoint_id=directory, planner=TellingPlanner(fact))


def test_a_fact_that_is_no_plain_value_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    for verdict in values(in_ranks(2, tell_what_cannot_be_told, os.fspath(tmp_path / "checkpoint"))):
        assert verdict.type_name == "RobustCheckpointError"
        assert "failed on rank 1: TypeError: " in verdict.message
