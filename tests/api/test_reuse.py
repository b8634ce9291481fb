"""A repeated save reuses its plan, a change costs only what has changed, and a failure leaves no trace."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import Channel, RobustPlanner, RobustWriter
from robust_dcp.plan.cache import LOADED, PLANS
from tests.api.test_cached_plans import FailsWhenTold, blank, check_loads
from tests.api.verdicts import Verdict, verdict_of
from tests.harness.fingerprints import differences
from tests.harness.ranks import in_ranks, run_ranks, values

StateDict = dict[str, Any]


def model(step: int, n: int = 5, prefix: str = "") -> StateDict:
    rank = dist.get_rank() if dist.is_initialized() else 0
    found: StateDict = {f"{prefix}layer{i}": torch.full((4,), float(step + i)) for i in range(n)}
    found[f"{prefix}own {rank}"] = torch.full((rank + 1,), float(step))
    found[f"{prefix}args"] = {"lr": 0.1}
    return found


def save_repeatedly(directory: str) -> list[str]:
    outcomes: list[str] = []
    for step in range(4):
        state_dict = model(step)
        if step == 2:  # another order of the same keys is the same structure
            state_dict = dict(reversed(state_dict.items()))
        planner = RobustPlanner() if step % 2 else None
        path = f"{directory}/{step}"
        outcomes.append(robust_dcp.save(state_dict, checkpoint_id=path, planner=planner).plan)
        check_loads(state_dict, path)
    return outcomes


def test_a_repeated_save_reuses_the_plan_also_with_a_new_planner(tmp_path: Path) -> None:
    for outcomes in values(in_ranks(2, save_repeatedly, str(tmp_path))):
        assert outcomes == ["built", "reused", "reused", "reused"]


def phases_of_stock_saves(directory: str, no_dist: bool) -> list[list[str]]:
    found = []
    for step in range(3):
        path = f"{directory}/{step}"
        dcp.save(model(step), storage_writer=RobustWriter(path), planner=RobustPlanner(), no_dist=no_dist)
        found.append([phase.rpartition(": ")[2] for phase in Channel.for_group().stats.phases if path in phase])
        dist.barrier()
        check_loads(model(step), f"{directory}/{step}")
    return found


@pytest.mark.parametrize("no_dist", [False, True])
def test_a_repeated_stock_save_with_our_parts_plans_nothing(no_dist: bool, tmp_path: Path) -> None:
    commit = ["commit"] if no_dist else []  # else the coordinator commits, and stock tells the others
    for first, *repeated in values(in_ranks(2, phases_of_stock_saves, str(tmp_path), no_dist)):
        assert first == ["agree", "structures", "plan", "compare", "compared", "room", "write", *commit]
        assert repeated == [["agree", "write", *commit]] * 2


def alternate(directory: str) -> list[str]:
    outcomes: list[str] = []
    for step in range(3):
        for prefix in ("", "ema."):
            path = f"{directory}/{prefix}{step}"
            outcomes.append(robust_dcp.save(model(step, prefix=prefix), checkpoint_id=path).plan)
            check_loads(model(step, prefix=prefix), path)
    return outcomes


def test_a_model_and_its_ema_that_are_saved_in_turn_are_both_reused(tmp_path: Path) -> None:
    for outcomes in values(in_ranks(2, alternate, str(tmp_path))):
        assert outcomes == ["built", "built", "reused", "reused", "reused", "reused"]


def change_one_rank(directory: str, changed_rank: int) -> tuple[str, str, int, Any]:
    state_dict = model(0)
    robust_dcp.save(state_dict, checkpoint_id=f"{directory}/0")
    if dist.get_rank() == changed_rank:
        state_dict["new"] = torch.ones(3)
    report = robust_dcp.save(state_dict, checkpoint_id=f"{directory}/1")
    check_loads(state_dict, f"{directory}/1")
    structures = Channel.for_group().stats.phases[f"save {directory}/1: structures"]
    assert robust_dcp.save(state_dict, checkpoint_id=f"{directory}/2").plan == "reused"
    return report.plan, report.reason, structures.payload_nbytes_sent, report.changes


@pytest.mark.parametrize("changed_rank", [0, 2])
def test_a_change_on_one_rank_makes_only_that_rank_send_its_structure(changed_rank: int, tmp_path: Path) -> None:
    outcomes = values(in_ranks(3, change_one_rank, str(tmp_path), changed_rank))
    for rank, (plan, reason, sent, changes) in enumerate(outcomes):
        assert plan == "rebuilt"
        assert "new" in reason and f"rank {changed_rank}" in reason
        assert changes.added == ("new",) and not changes.removed and not changes.changed
        assert (sent > 0) == (rank == changed_rank and rank != 0)  # the coordinator need not send to itself


def refuse_changes(directory: str) -> tuple[Verdict, str, list[str], int]:
    robust_dcp.save(model(0), checkpoint_id=directory)
    dist.barrier()  # the coordinator has tidied up
    files = sorted(os.listdir(directory))
    changed = model(1)
    if dist.get_rank() == 1:
        changed["added"] = torch.ones(2)
        del changed["own 1"]
        changed["layer0"] = torch.full((4,), 1.0).requires_grad_()
    dist.barrier()
    refused = verdict_of(
        robust_dcp.save, changed, checkpoint_id=directory, planner=RobustPlanner(on_structure_change="error")
    )
    assert sorted(os.listdir(directory)) == files
    check_loads(model(0), directory)
    again = robust_dcp.save(
        model(2), checkpoint_id=f"{directory}-2", planner=RobustPlanner(on_structure_change="error")
    )
    return refused, again.plan, files, len(PLANS)


def test_a_refused_change_is_the_same_error_everywhere_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    outcomes = values(in_ranks(2, refuse_changes, str(tmp_path / "checkpoint")))
    for refused, again, _, n_plans in outcomes:
        assert refused.type_name == "StructureChanged"
        assert refused.fields == {"added": ["added"], "removed": ["own 1"], "changed": ["layer0"]}
        assert refused == outcomes[0][0]
        assert again == "reused" and n_plans == 1


def first_save_with_changes_refused(directory: str) -> str:
    return robust_dcp.save(model(0), checkpoint_id=directory, planner=RobustPlanner(on_structure_change="error")).plan


def test_a_first_save_is_no_change(tmp_path: Path) -> None:
    assert values(run_ranks(1, first_save_with_changes_refused, str(tmp_path / "c"), init=False)) == ["built"]


def fail_in_every_phase(directory: str) -> list[tuple[str, int]]:
    """A first save that fails while planning, writing or committing, on each rank; then one that does not."""
    found = []
    rank = dist.get_rank()
    for failing in (0, 1):
        for phase in ("plan", "write", "commit"):
            if phase == "commit" and failing == 1:
                continue  # only the coordinator commits
            PLANS.clear()
            LOADED.clear()
            path = f"{directory}/{phase}{failing}"
            FailsWhenTold.rank_to_fail = failing if phase == "plan" else None
            writer = FailingWriter(path, phase if rank == failing else "")
            failed = verdict_of(robust_dcp.save, model(0), storage_writer=writer, planner=FailsWhenTold())
            FailsWhenTold.rank_to_fail = None
            found.append((failed.type_name, len(PLANS)))
            report = robust_dcp.save(model(1), checkpoint_id=path)
            assert report.plan == "built" and len(PLANS) == 1
            check_loads(model(1), path)
    return found


class FailingWriter(RobustWriter):
    """Raises in one of its steps."""

    def __init__(self, path: str, fail_in: str) -> None:
        super().__init__(path)
        self.fail_in = fail_in

    def write(self, *args: Any, **kwargs: Any) -> Any:
        if self.fail_in == "write":
            raise RuntimeError("transient")
        return super().write(*args, **kwargs)

    def publish(self, *args: Any, **kwargs: Any) -> None:
        if self.fail_in == "commit":
            raise RuntimeError("transient")
        super().publish(*args, **kwargs)


def test_a_failed_save_leaves_no_plan_on_any_rank(tmp_path: Path) -> None:
    for found in values(in_ranks(2, fail_in_every_phase, str(tmp_path))):
        assert found == [("RobustCheckpointError", 0)] * 5


def reuse_after_failures(directory: str) -> list[str]:
    """Objects change their lengths in saves that fail: the places that the coordinator knows must not be theirs."""
    rank = dist.get_rank()
    outcomes: list[str] = []
    for step, fail_in in enumerate(["", "write", "", "commit", "", "", "write", ""]):
        state_dict: StateDict = {f"text {rank}": "x" * (step * 1000 + rank), f"w {rank}": torch.full((3,), float(step))}
        path = f"{directory}/{step}"
        writer = FailingWriter(path, fail_in if rank == (0 if fail_in == "commit" else 1) else "")
        outcome = verdict_of(lambda w=writer, s=state_dict: robust_dcp.save(s, storage_writer=w).plan)
        outcomes.append(outcome.type_name or outcome.value)
        if not fail_in:
            check_loads(state_dict, path)
    return outcomes


def test_reuse_after_a_failure_loads_what_was_saved(tmp_path: Path) -> None:
    error = "RobustCheckpointError"
    for outcomes in values(in_ranks(2, reuse_after_failures, str(tmp_path))):
        # After a commit that failed ranks may not know the same, and forget; the plan of what they loaded last holds.
        assert outcomes == ["built", error, "reused", error, "reused", "reused", error, "reused"]


def log_of_changes(directory: str, mode: str) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("robust_dcp").addHandler(handler)
    state_dict = model(0)
    robust_dcp.save(state_dict, checkpoint_id=f"{directory}/0")
    robust_dcp.save(state_dict, checkpoint_id=f"{directory}/1")
    assert lines == []
    state_dict["a.new.key"] = state_dict.pop("layer0")
    state_dict["layer1"] = state_dict["layer1"].double()
    planner = RobustPlanner(on_structure_change=mode)  # type: ignore[arg-type]
    robust_dcp.save(state_dict, checkpoint_id=f"{directory}/2", planner=planner)
    return lines


def test_a_change_is_logged_in_one_line_that_names_the_keys(tmp_path: Path) -> None:
    coordinator, other = values(in_ranks(2, log_of_changes, str(tmp_path), "rebuild"))
    assert len(coordinator) == 1 and "\n" not in coordinator[0]
    assert all(word in coordinator[0] for word in ("a.new.key", "layer0", "layer1", "float64"))
    assert other == []


def test_a_change_is_not_logged_if_nobody_wants_to_know(tmp_path: Path) -> None:
    assert values(in_ranks(2, log_of_changes, str(tmp_path), "quiet")) == [[], []]


def save_where_a_checkpoint_lies(directory: str) -> list[str]:
    for step in range(4):
        state_dict = model(step)
        robust_dcp.save(state_dict, checkpoint_id=directory)
        target = blank(state_dict)
        robust_dcp.load(target, checkpoint_id=directory)
        assert differences(state_dict, target) == []
    dist.barrier()
    return sorted(os.listdir(directory))


def test_reused_plans_work_in_a_directory_that_is_saved_to_again(tmp_path: Path) -> None:
    for files in values(in_ranks(2, save_where_a_checkpoint_lies, str(tmp_path / "checkpoint"))):
        assert ".metadata" in files and not any(name.endswith(".tmp") for name in files)
        # Files of one save: nothing is left of the checkpoints that were replaced.
        assert len({name.split(".", 1)[1] for name in files if name.startswith("__0")}) == 1
