"""Ranks that disagree on where objects lay in the last save find out, and the save after that works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp.plan.cache import PLANS
from tests.api.verdicts import Verdict, verdict_of
from tests.harness.ranks import run_ranks, values


def _state(step: int) -> dict[str, object]:
    rank = dist.get_rank()
    return {f"w{rank}": torch.full((2,), float(step)), f"text{rank}": f"step {step}", f"more{rank}": [step, rank]}


def _disagree(directory: str) -> tuple[list[str], Verdict, int]:
    robust_dcp.save(_state(0), checkpoint_id=f"{directory}/0")
    if dist.get_rank() == 1:
        known = PLANS.latest((0, 1))
        assert known is not None and known.variable_places is not None
        shifted = known.variable_places + [[64, 0]]
        PLANS.put((0, 1), replace(known, variable_places=shifted))
    verdict = verdict_of(robust_dcp.save, _state(1), checkpoint_id=f"{directory}/1")
    plans = [robust_dcp.save(_state(step), checkpoint_id=f"{directory}/{step}").plan for step in (2, 3)]
    loaded = _state(0)
    robust_dcp.load(loaded, checkpoint_id=f"{directory}/3")
    return plans, verdict, int(str(loaded[f"text{dist.get_rank()}"]).split()[1])


def test_places_that_are_out_of_step_are_refused_once_and_planned_anew(tmp_path: Path) -> None:
    for plans, verdict, loaded in values(run_ranks(2, _disagree, str(tmp_path))):
        assert verdict.type_name == "ExchangeError"
        assert "the places of the objects that ranks wrote are not those that the coordinator has" in verdict.message
        assert (plans, loaded) == (["built", "reused"], 3)
