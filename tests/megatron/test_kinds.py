"""Megatron: state dicts that are saved in turn are no change of each other, and errors say each thing once."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from robust_dcp.megatron import RobustSaveStrategy
from tests.harness.ranks import run_ranks, values
from tests.megatron.torch_dist import Scenarios, chosen, cut, per_rank_object, replicated, save, warnings_of

scenarios = Scenarios()


def _all_scenarios(directory: Path) -> dict[str, Any]:
    return scenarios.run(directory)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    outcomes = values(run_ranks(2, _all_scenarios, tmp_path_factory.mktemp("kinds"), timeout_seconds=200))
    return {name: [outcome[name] for outcome in outcomes] for name in outcomes[0]}


def _model(step: int) -> dict[str, Any]:
    return {f"layer{n}": cut(f"model.layer{n}", torch.full((2, 3), float(step))) for n in range(4)}


def _loader(step: int) -> dict[str, Any]:
    parts = {f"part{n}": per_rank_object(f"loader.part{n}", {"at": step}) for n in range(3)}
    return {**parts, f"shuffle{step}": replicated(f"loader.shuffle{step}", torch.full((2,), step))}


@scenarios.add
def _in_turn(directory: Path) -> Any:
    """The model's structure must not change; the loader's may."""
    outcomes = []
    with chosen(), warnings_of("robust_dcp.plan.agreed_plan") as lines:
        for step in range(3):
            for kind, state in (("model", _model(step)), ("loader", _loader(step))):
                mode: Any = "error" if kind == "model" or step == 0 else "quiet"
                strategy = RobustSaveStrategy(on_structure_change=mode)
                save(state, directory / f"{kind}{step}", strategy)
                outcomes.append(strategy.last_report.plan)  # type: ignore[union-attr]
        save(_model(3), directory / "model3")  # by Megatron's own strategy
    return outcomes, lines


def test_two_state_dicts_in_turn_are_no_change_of_each_other(found: dict[str, list[Any]]) -> None:
    for outcomes, lines in found["_in_turn"]:
        assert outcomes[0::2] == ["built", "reused", "reused"]
        assert outcomes[1::2] == ["built", "rebuilt", "rebuilt"]
        assert lines == []


@scenarios.add
def _failing_factory(directory: Path) -> Any:
    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        if dist.get_rank() == 1:
            raise LookupError("this factory is broken")
        return cut(key, data)

    def merge(loaded: Any) -> Any:
        return loaded

    state = {**_model(0), "made": ShardedTensorFactory("made", torch.ones(2), build, merge)}
    with chosen():
        try:
            save(state, directory / "checkpoint")
        except BaseException as error:
            return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return ""


def test_an_error_through_megatron_says_each_thing_once(found: dict[str, list[Any]]) -> None:
    for text in found["_failing_factory"]:
        assert text.count("Traceback") == 1 and "above exception" not in text, text
        assert text.count("LookupError: this factory is broken") == 1, text
        assert "failed on rank 1" in text and text.count("raise LookupError") == 1, text
        # Where Megatron calls ours, and where ours returns to it.
        ours = [line for line in text.splitlines() if "/robust_dcp/" in line and "File" in line]
        assert len(ours) <= 2, text
