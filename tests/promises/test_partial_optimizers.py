"""Optimizers whose parameters have not all had a gradient, and what of a checkpoint nobody asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import robust_dcp
from robust_dcp import RobustLoadPlanner
from tests.harness.ranks import run_ranks, values


class Experts(nn.Module):
    """Two experts. A step trains those that got tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, value: torch.Tensor, experts: tuple[int, ...]) -> torch.Tensor:
        value = self.router(value)
        return sum((self.experts[number](value).sum() for number in experts), torch.zeros(()))


def built(seed: int, optimizer: str = "AdamW") -> tuple[Experts, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Experts()
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    return model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **options)


def step(model: Experts, optimizer: torch.optim.Optimizer, *experts: int) -> None:
    model(torch.ones(2, 4), experts).backward()
    optimizer.step()
    optimizer.zero_grad()


def plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.to_local()
    return value.tolist() if isinstance(value, torch.Tensor) else value


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of each parameter that has some, by name."""
    return {
        name: {key: plain(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def load(model: nn.Module, optimizer: Any, path: Path, *, partial: bool) -> robust_dcp.LoadReport:
    planner = RobustLoadPlanner(allow_partial_load=partial)
    return robust_dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path, planner=planner)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("before", [(), (0,), (1,), (0, 1)], ids=lambda before: f"before{before}")
def test_parameters_without_a_gradient_are_loaded_as_they_were(
    before: tuple[int, ...], optimizer: str, partial: bool, tmp_path: Path
) -> None:
    """The optimizer that is loaded has stepped for other parameters than the one that was saved."""
    saved = built(1, optimizer)
    step(*saved, 0)
    step(*saved, 0)
    robust_dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=tmp_path)
    loaded = built(2, optimizer)
    if before:
        step(*loaded, *before)
    load(*loaded, tmp_path, partial=partial)
    assert state_of(*loaded) == state_of(*saved)
    for run in (saved, loaded):  # both experts get tokens now
        step(*run, 0, 1)
    assert state_of(*loaded) == state_of(*saved)
    for one, other in zip(saved[0].parameters(), loaded[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_parameter_that_has_stepped_since_is_loaded_by_an_optimizer_that_has_not(tmp_path: Path) -> None:
    saved = built(1)
    step(*saved, 0, 1)
    robust_dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=tmp_path)
    loaded = built(2)
    step(*loaded, 1)
    load(*loaded, tmp_path, partial=False)
    assert state_of(*loaded) == state_of(*saved)


def test_an_optimizer_alone_is_loaded_in_part(tmp_path: Path) -> None:
    saved = built(1)
    step(*saved, 0)
    robust_dcp.save({"optimizer": saved[1]}, checkpoint_id=tmp_path)
    loaded = built(2)
    robust_dcp.load({"optimizer": loaded[1]}, checkpoint_id=tmp_path)
    assert state_of(*loaded) == state_of(*saved)


def test_a_load_that_fails_leaves_an_optimizer_without_state(tmp_path: Path) -> None:
    robust_dcp.save({"other": torch.ones(2)}, checkpoint_id=tmp_path)
    model, optimizer = built(1)
    with pytest.raises(robust_dcp.PlanConflict, match="Missing key"):
        load(model, optimizer, tmp_path, partial=False)
    assert not optimizer.state


def save_and_load_stages(path: str) -> list[bool]:
    """Each rank holds another stage, and in each one expert has had no tokens."""
    rank = dist.get_rank()
    found = []
    for number, before in enumerate([(), (1,), (0, 1)]):
        saved, loaded = built(1 + rank), built(3 + rank)
        step(*saved, rank)
        names = [f"stage{rank}." + name for name, _ in saved[0].named_parameters()]
        robust_dcp.save(stages(rank, *saved), checkpoint_id=f"{path}/{number}")
        if before:
            step(*loaded, *before)
        robust_dcp.load(stages(rank, *loaded), checkpoint_id=f"{path}/{number}")
        found.append(state_of(*loaded) == state_of(*saved) and len(names) == 6)
    return found


def stages(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    stage = nn.ModuleDict({f"stage{rank}": model})
    return {"model": [stage], "optimizer": [optimizer]}


def test_stages_of_a_pipeline_are_loaded_in_part(tmp_path: Path) -> None:
    assert values(run_ranks(2, save_and_load_stages, str(tmp_path))) == [[True] * 3] * 2


def save_and_load_sharded(path: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = Experts()
        for expert in model.experts:
            fully_shard(expert, mesh=mesh)
        runs.append((fully_shard(model, mesh=mesh), torch.optim.AdamW(model.parameters())))
    saved, loaded = runs
    step(*saved, 0)
    robust_dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=path)
    found = []
    for experts in ((), (1,)):
        if experts:
            step(*loaded, *experts)
        load(*loaded, Path(path), partial=False)
        found.append(state_of(*loaded) == state_of(*saved))
    return found


def test_under_fsdp2_they_are_loaded_in_part(tmp_path: Path) -> None:
    assert values(run_ranks(2, save_and_load_sharded, str(tmp_path))) == [[True, True]] * 2


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def load_telling(path: str, asked: list[list[str]]) -> list[str]:
    """What the log says of a load in which each rank asks for other keys."""
    lines = Lines()
    logging.getLogger("robust_dcp").addHandler(lines)
    state: dict[str, Any] = {}
    for key in asked[dist.get_rank()]:
        group, name = key.split(".", 1)
        state.setdefault(group, {})[name] = torch.zeros(2)
    robust_dcp.load(state, checkpoint_id=path)
    return [line for line in lines.lines if "asked for" in line]


def saved_groups(path: Path) -> list[str]:
    keys = [f"model.{number}" for number in range(5)] + [f"optimizer.{number}" for number in range(3)]
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    for key in keys:
        group, name = key.split(".")
        state[group][name] = torch.ones(2)
    robust_dcp.save({**state, "step": 3}, checkpoint_id=path)
    return keys


def test_one_line_says_what_no_rank_has_asked_for(tmp_path: Path) -> None:
    keys = saved_groups(tmp_path)
    model = keys[:5]
    outcomes = values(run_ranks(2, load_telling, str(tmp_path), [model[:2], model[2:4]]))
    assert outcomes[1] == []
    (line,) = outcomes[0]
    for word in ("5 of its 9 keys", "model (1 of 5: 'model.4')", "optimizer (all 3)", "step", str(tmp_path)):
        assert word in line


def test_nothing_is_said_if_the_ranks_together_ask_for_all(tmp_path: Path) -> None:
    keys = saved_groups(tmp_path)
    (tmp_path / "all").mkdir()
    robust_dcp.save(
        {"model": {key: torch.ones(2) for key in "01234"}, "optimizer": {key: torch.ones(2) for key in "012"}},
        checkpoint_id=tmp_path / "all",
    )
    outcomes = values(run_ranks(2, load_telling, str(tmp_path / "all"), [keys[:4], keys[4:]]))
    assert outcomes == [[], []]
