"""A plan of an earlier save is used only where it still tells the truth, whatever has changed since."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter
from robust_dcp.plan.cache import PLANS
from robust_dcp.plan.plan import LocalStructure
from tests.api.verdicts import Verdict, verdict_of
from tests.harness.fingerprints import differences
from tests.harness.ranks import in_ranks, values
from tests.harness.ways import LOADERS, SAVERS

StateDict = dict[str, Any]


def blank(value: Any) -> Any:
    """The same structure, with other contents."""
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else f"not {value}"


def check_loads(state_dict: StateDict, path: str, *loaders: str) -> None:
    for loader in loaders or ("ours", "stock"):
        target = blank(state_dict)
        LOADERS[loader](target, path)
        assert differences(state_dict, target) == [], (loader, path)
        if dist.is_initialized():
            dist.barrier()


def load_unflattened(state_dict: StateDict, path: str) -> None:
    # With flatten_sharded_tensors stock's planner loads objects into a copy, and they are lost.
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(state_dict, checkpoint_id=path, planner=planner)


# What we do.


def save_in_turn(directory: str, saver: str) -> None:
    """Each of these differs from the one before in a way that a cached plan could hide."""
    rank = dist.get_rank()
    own = f"only on rank {rank}"
    steps: list[StateDict] = [
        {"w": torch.full((3,), 1.5)},
        {"w": torch.full((3,), 1.5, dtype=torch.bfloat16)},
        {"w": torch.arange(3, dtype=torch.int16)},
        {"w": torch.arange(6, dtype=torch.int16)},
        {"w": torch.arange(6, dtype=torch.int16).reshape(2, 3)},
        {"w": "an object now"},
        {"w": "an object now", own: torch.full((rank + 2,), 7.0)},
        {own: torch.full((rank + 3,), 7.0)},
        {own: "an object"} if rank == 1 else {own: torch.full((3,), 8.0)},
        {own: torch.full((3,), 8.0), "late": torch.ones(1)} if rank == 0 else {own: "an object"},
        {"late": torch.ones(1)},
        {"late": torch.ones(1).requires_grad_()},
        {},
        {"w": torch.full((3,), 2.5)},
    ]
    for number, state_dict in enumerate(steps):
        path = f"{directory}/{number}"
        SAVERS[saver](state_dict, path)
        if state_dict:
            check_loads(state_dict, path)


@pytest.mark.parametrize("saver", [name for name in SAVERS if name != "stock"])
def test_every_change_of_structure_is_saved_as_it_is(saver: str, tmp_path: Path) -> None:
    values(in_ranks(2, save_in_turn, str(tmp_path), saver, timeout_seconds=90))


class FailsWhenTold(RobustPlanner):
    """Raises on one rank in the middle of planning."""

    rank_to_fail: int | None = None

    def describe(self, channel: Any) -> LocalStructure:
        if FailsWhenTold.rank_to_fail == channel.rank:
            raise RuntimeError("transient")
        return super().describe(channel)


def grow_with_a_failure_between(directory: str, rank_to_fail: int, saver: str) -> tuple[Verdict, list[str]]:
    def save(state_dict: StateDict, path: str) -> Any:
        if saver == "ours":
            return robust_dcp.save(state_dict, checkpoint_id=path, planner=FailsWhenTold())
        no_dist = saver == "stock no_dist"
        writer = RobustWriter(path)
        return dcp.save(state_dict, storage_writer=writer, planner=FailsWhenTold(), no_dist=no_dist)

    state_dict: StateDict = {"a": torch.ones(2), "shared": torch.ones(4)}
    save(state_dict, f"{directory}/0")
    state_dict["b"] = torch.ones(3)
    state_dict[f"own {dist.get_rank()}"] = torch.ones(3)
    FailsWhenTold.rank_to_fail = rank_to_fail
    failed = verdict_of(save, state_dict, f"{directory}/1")
    FailsWhenTold.rank_to_fail = None
    for step in (2, 3):
        save(state_dict, f"{directory}/{step}")
        check_loads(state_dict, f"{directory}/{step}")
    return failed, sorted(os.listdir(f"{directory}/1")) if os.path.isdir(f"{directory}/1") else []


@pytest.mark.parametrize("rank_to_fail", [0, 1])
@pytest.mark.parametrize("saver", ["ours", "stock", "stock no_dist"])
def test_growth_in_a_save_that_failed_is_in_the_next_one(saver: str, rank_to_fail: int, tmp_path: Path) -> None:
    for failed, left in values(in_ranks(2, grow_with_a_failure_between, str(tmp_path), rank_to_fail, saver)):
        # Stock wraps whatever its hooks raise.
        assert failed.type_name == ("RobustCheckpointError" if saver == "ours" else "CheckpointException")
        assert "transient" in failed.message + failed.failures
        assert left == []


def lose_caches(directory: str) -> list[str]:
    """Every subset of ranks that has restarted in process; what each save did about its plan."""
    outcomes: list[str] = []
    rank = dist.get_rank()
    state_dict: StateDict = {"nested": {"w": torch.ones(2)}, f"own {rank}": torch.full((2,), float(rank)), "o": "x"}
    for number, lost in enumerate([(0, 1), (), (0,), (), (1,), (), (0, 1), ()]):
        if rank in lost:
            PLANS.clear()
        path = f"{directory}/{number}"
        planner = RobustPlanner(flatten_state_dict=False)
        outcomes.append(robust_dcp.save(state_dict, checkpoint_id=path, planner=planner).plan)
        target: StateDict = {"nested": {}, f"own {rank}": torch.zeros(2), "o": ""}
        load_unflattened(target, path)
        assert differences(state_dict, target) == []
    return outcomes


def save_in_other_groups(directory: str) -> list[str]:
    rank = dist.get_rank()
    low, high, outer = dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 3])
    world = dist.group.WORLD
    turns = [world, low if rank < 2 else high, world, outer if rank in (0, 3) else None, low if rank < 2 else high]
    outcomes: list[str] = []
    for number, group in enumerate([*turns, *turns]):
        if group is None:
            continue
        members = dist.get_process_group_ranks(group)
        path = f"{directory}/{number}-{members}"
        state_dict: StateDict = {"w": torch.arange(5.0), f"own {rank}": torch.full((rank + 1,), float(number))}
        report = robust_dcp.save(state_dict, checkpoint_id=path, process_group=group)
        outcomes.append(report.plan)
        target = blank(state_dict)
        robust_dcp.load(target, checkpoint_id=path, process_group=group)
        assert differences(state_dict, target) == []
        owners = {index.fqn for index in report.metadata.storage_data}
        assert owners == {"w", *(f"own {member}" for member in members)}
    return outcomes


def test_plans_of_one_group_are_never_used_in_another(tmp_path: Path) -> None:
    outcomes = values(in_ranks(4, save_in_other_groups, str(tmp_path)))
    # The world, a half, the world, [0, 3] (ranks 0 and 3 only), the half again; and all of it once more.
    inner = ["built", "built", "reused", "reused"] + ["reused"] * 4
    outer = ["built", "built", "reused", "built", "reused"] + ["reused"] * 5
    assert outcomes == [outer, inner, inner, outer]


class OtherPlanner(RobustPlanner):
    pass


def save_with_other_options(directory: str) -> list[str]:
    rank = dist.get_rank()
    state_dict: StateDict = {"nested": {f"w{n}": torch.full((5,), float(n)) for n in range(6)}, f"o{rank}": "x"}
    outcomes: list[str] = []
    options: list[tuple[dict[str, Any], dict[str, Any], type[RobustPlanner]]] = [
        ({}, {}, RobustPlanner),
        ({"threads": 1}, {}, RobustPlanner),
        ({"threads": 3}, {}, RobustPlanner),
        ({"threads": 3}, {"dedup_save_to_lowest_rank": True}, RobustPlanner),
        ({"threads": 3}, {"flatten_state_dict": False}, RobustPlanner),
        ({}, {}, OtherPlanner),
        ({}, {}, RobustPlanner),
    ]
    for number, (writer_options, planner_options, planner) in enumerate(options):
        path = f"{directory}/{number}"
        writer = RobustWriter(path, **writer_options)
        report = robust_dcp.save(state_dict, storage_writer=writer, planner=planner(**planner_options))
        outcomes.append(report.plan)
        target: StateDict = {"nested": {f"w{n}": torch.zeros(5) for n in range(6)}, f"o{rank}": ""}
        if planner_options.get("flatten_state_dict", True):
            dcp.load(target, checkpoint_id=path)
        else:
            load_unflattened(target, path)
        assert differences(state_dict, target) == []
    return outcomes


def test_a_plan_is_not_used_with_other_options_of_planner_or_writer(tmp_path: Path) -> None:
    for outcomes in values(in_ranks(2, save_with_other_options, str(tmp_path))):
        # Not flattened, the names are others: a kind of its own.
        assert outcomes == ["built", "rebuilt", "rebuilt", "rebuilt", "built", "rebuilt", "reused"]
