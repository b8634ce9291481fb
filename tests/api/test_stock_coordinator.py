"""Inside stock ``save`` another rank than 0 may be the coordinator: it plans and commits, and nothing is lost."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import save_state_dict

from robust_dcp import RobustPlanner, RobustWriter
from robust_dcp.plan.cache import PLANS
from tests.harness.ranks import in_ranks, values


def _save_from(path: str, coordinator_rank: int, value: float) -> None:
    state = {"w": torch.full((3,), value), f"own.{dist.get_rank()}": torch.tensor([float(dist.get_rank())])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that save_state_dict is deprecated: it alone lets one choose the coordinator
        save_state_dict(state, RobustWriter(path), coordinator_rank=coordinator_rank, planner=RobustPlanner())


def _save_with_changing_coordinators(path: str) -> list[bool]:
    for step, coordinator_rank in enumerate((1, 1, 2, 0)):
        _save_from(f"{path}/{step}", coordinator_rank, float(step))
    loaded = []
    for step in range(4):
        state = {"w": torch.zeros(3), **{f"own.{rank}": torch.zeros(1) for rank in range(3)}}
        dcp.load(state, checkpoint_id=f"{path}/{step}")
        own = [float(state[f"own.{rank}"]) for rank in range(3)]
        loaded.append(bool((state["w"] == step).all()) and own == [0.0, 1.0, 2.0])
    assert len(PLANS) > 0
    return loaded


def test_a_save_whose_coordinator_is_not_rank_0_is_committed_and_so_is_the_next_with_another(tmp_path: Path) -> None:
    assert values(in_ranks(3, _save_with_changing_coordinators, str(tmp_path))) == [[True] * 4] * 3
