"""Names in a checkpoint are those of the bare model, so what is saved under one way to wrap it is loaded under another:
all of it, or nothing is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import robust_dcp
from robust_dcp import PlanConflict, RobustLoadPlanner
from tests.harness.ranks import on_ranks
from tests.promises.test_modules import held, whole

Trained = tuple[nn.Module, Optimizer]


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda block: block,
    "ac": checkpoint_wrapper,
    "compile": compiled,
    "compile(ac)": lambda block: compiled(checkpoint_wrapper(block)),
    "ac(compile)": lambda block: checkpoint_wrapper(compiled(block)),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)  # a name that DDP uses too
        self.register_buffer("scale", torch.rand(4))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.module(value) * self.scale + value


def built(wrapper: str, around: str, seed: int, steps: int) -> Trained:
    torch.manual_seed(seed)
    wrap = WRAPPERS[wrapper]
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), wrap(Block()), wrap(Block()))
    if around == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in [*model[1:], model]:
            fully_shard(block, mesh=mesh)
    if around == "DDP":
        model = DistributedDataParallel(model)
    optimizer = AdamW(model.parameters(), lr=0.1 + seed)
    for _ in range(steps):
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def content(model: nn.Module, optimizer: Optimizer) -> Any:
    """What a model and its optimizer hold, without names: wrappers change neither the number nor the order."""
    states = [optimizer.state.get(parameter, {}) for group in optimizer.param_groups for parameter in group["params"]]
    buffers = [whole(each) for each in model.buffers()]
    return whole([list(model.parameters()), buffers, [dict(each) for each in states], optimizer.param_groups[0]["lr"]])


def save_and_load(path: str, around: str) -> tuple[list[str], set[str]]:
    """Save under each way to wrap, by ours and by PyTorch's recipe, whose names old checkpoints have, and load under
    each. What differs, and the names."""
    wrong, names = [], set[str]()
    for saved_by in WRAPPERS:
        saved = built(saved_by, around, 1, 2)
        expected = content(*saved)
        ours, recipe = f"{path}/{saved_by}-ours", f"{path}/{saved_by}-recipe"
        report = robust_dcp.save(dict(zip(("model", "optim"), saved, strict=True)), checkpoint_id=ours)
        names |= set(report.metadata.state_dict_metadata)
        dcp.save(dict(zip(("model", "optim"), get_state_dict(*saved), strict=True)), checkpoint_id=recipe)
        for loaded_by in WRAPPERS:
            for steps, checkpoint in ((0, ours), (1, ours), (0, recipe)):
                loaded = built(loaded_by, around, 2, steps)
                robust_dcp.load(dict(zip(("model", "optim"), loaded, strict=True)), checkpoint_id=checkpoint)
                if content(*loaded) != expected:
                    wrong.append(f"{checkpoint} to {loaded_by} after {steps} steps")
    return wrong, names


@pytest.mark.parametrize("around", ["plain", "DDP", "FSDP2"])
def test_what_is_saved_under_any_nesting_of_wrappers_is_loaded_under_any_other(around: str, tmp_path: Path) -> None:
    for wrong, names in on_ranks(2, save_and_load, str(tmp_path), around):
        assert wrong == []
        assert not [name for name in names if "_orig_mod" in name or "_wrapped_module" in name or ".module.0" in name]
        assert {"model.1.module.weight", "model.2.scale", "optim.state.1.module.bias.exp_avg"} <= names


class Tied(nn.Module):
    """Two weights, which are one in most cases, in the order of ``names``."""

    def __init__(self, names: Sequence[str], *, is_tied: bool) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4, bias=False))
        if is_tied:
            self.b.weight = self.a.weight

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(value))


def trained(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> Trained:
    for _ in range(steps):
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def tied(names: str, *, is_tied: bool, steps: int) -> Trained:
    model = Tied(names, is_tied=is_tied)
    return trained(model, AdamW(model.parameters(), 0.1), steps)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("saved_as", [("ab", True), ("ba", True), ("ab", False)])
@pytest.mark.parametrize("loaded_as", [("ab", True), ("ba", True), ("ba", False)])
def test_tied_weights_are_loaded_in_any_order_and_untied_ones_are_refused(
    saved_as: tuple[str, bool], loaded_as: tuple[str, bool], steps: int, tmp_path: Path
) -> None:
    saved = tied(saved_as[0], is_tied=saved_as[1], steps=2)
    loaded = tied(loaded_as[0], is_tied=loaded_as[1], steps=steps)
    robust_dcp.save({"model": saved[0], "optim": saved[1]}, checkpoint_id=tmp_path)
    before = copy.deepcopy((loaded[0].state_dict(), loaded[1].state_dict()))
    if saved_as[1] == loaded_as[1]:
        robust_dcp.load({"model": loaded[0], "optim": loaded[1]}, checkpoint_id=tmp_path)
        trained(*saved), trained(*loaded)
        assert torch.equal(saved[0].b.weight, loaded[0].b.weight)
        return
    with pytest.raises(PlanConflict, match=r"optim.state.[ab].weight|'[ab].weight' are tied here"):
        robust_dcp.load({"model": loaded[0], "optim": loaded[1]}, checkpoint_id=tmp_path)
    assert whole(before[0]) == whole(loaded[0].state_dict())
    assert whole(before[1]) == whole(loaded[1].state_dict())


def states_of_one(path: Path, optimizer: str, **options: Any) -> Trained:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    its_optimizer = getattr(torch.optim, optimizer)(model.parameters(), 0.1, **options)
    robust_dcp.save({"model": trained(model, its_optimizer)[0], "optim": its_optimizer}, checkpoint_id=path)
    return model, its_optimizer


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize(("kind", "leaf"), [("AdamW", "exp_avg"), ("SGD", "momentum_buffer")])
def test_a_parameter_that_the_saved_optimizer_did_not_have_is_not_taken_for_one_without_a_gradient(
    kind: str, leaf: str, is_partial: bool, tmp_path: Path
) -> None:
    """Also where the new optimizer would make no state by itself: SGD has one with momentum only."""
    states_of_one(tmp_path, kind, **({"momentum": 0.9} if kind == "SGD" else {}))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.new = nn.Linear(4, 4)
    optimizer = getattr(torch.optim, kind)(model.parameters(), 0.1)
    before = whole(model.state_dict())
    planner = RobustLoadPlanner(allow_partial_load=is_partial)
    if not is_partial:
        with pytest.raises(PlanConflict, match=rf"'optim\.state\.new\.weight\.{leaf}'"):
            robust_dcp.load({"optim": optimizer, "model": model}, checkpoint_id=tmp_path, planner=planner)
        assert (whole(model.state_dict()), optimizer.state) == (before, {})
        return
    robust_dcp.load({"optim": optimizer, "model": model}, checkpoint_id=tmp_path, planner=planner)
    assert set(optimizer.state) == {*model[0].parameters(), *model[1].parameters()}


@pytest.mark.parametrize(
    ("optimizer", "others"), [("SGD", {"momentum": 0.9}), ("AdamW", {"amsgrad": True}), ("LBFGS", {})]
)
def test_a_state_that_the_new_optimizer_would_not_make_is_loaded_with_the_option_that_asks_for_it(
    optimizer: str, others: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    runs = []
    for options in (others, {}):
        model = nn.Linear(4, 4)
        runs.append((model, getattr(torch.optim, optimizer)(model.parameters(), 0.1, **options)))

    def step(model: nn.Module, optimizer: Optimizer) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).square().mean()
            loss.backward()
            return loss.detach()

        return float(optimizer.step(closure))

    saved, loaded = runs
    step(*saved)
    robust_dcp.save({"model": saved[0], "optim": saved[1]}, checkpoint_id=tmp_path)
    robust_dcp.load({"model": loaded[0], "optim": loaded[1]}, checkpoint_id=tmp_path)
    assert held(*loaded) == held(*saved) if optimizer != "LBFGS" else True
    assert [step(*saved) for _ in range(3)] == [step(*loaded) for _ in range(3)]


def test_the_state_of_an_optimizer_of_another_class_is_refused(tmp_path: Path) -> None:
    for saved, loaded in (("AdamW", "SGD"), ("SGD", "AdamW"), ("Adagrad", "AdamW")):
        states_of_one(tmp_path / saved, saved, **({"momentum": 0.9} if saved == "SGD" else {}))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = getattr(torch.optim, loaded)(model.parameters(), 0.1)
        with pytest.raises(PlanConflict, match="Missing key"):
            robust_dcp.load({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / saved)
        assert optimizer.state == {}


@pytest.mark.parametrize("saved_has", [True, False])
@pytest.mark.parametrize("is_list", [True, False])
def test_groups_are_as_the_checkpoint_has_them_and_what_only_the_target_has_stays(
    saved_has: bool, is_list: bool, tmp_path: Path
) -> None:
    def made(has_scheduler: bool, lr: float) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = AdamW(model.parameters(), lr)
        if has_scheduler:
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": [model] if is_list else model, "optim": [optimizer] if is_list else optimizer}

    def groups(state: dict[str, Any]) -> dict[str, Any]:
        optimizer = state["optim"][0] if is_list else state["optim"]
        return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}

    saved, loaded = made(saved_has, 0.1), made(not saved_has, 0.2)
    before = groups(loaded)
    robust_dcp.save(saved, checkpoint_id=tmp_path)
    robust_dcp.load(loaded, checkpoint_id=tmp_path)
    assert groups(loaded) == {**before, **groups(saved)}


def test_groups_of_other_sizes_are_refused_before_anything_is_changed(tmp_path: Path) -> None:
    """Where the parameters have no names, as with stock's {"optimizer": optimizer}."""
    model, optimizer = states_of_one(tmp_path / "names", "AdamW")
    robust_dcp.save({"weights": dict(model.state_dict()), "optim": optimizer}, checkpoint_id=tmp_path / "numbers")
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (robust_dcp, dcp):
        for steps in (0, 1):
            weights = [[*other[0].parameters()], [*other[1].parameters()]]
            _, groups = trained(other, AdamW([{"params": each} for each in weights], 0.1), steps)
            before = whole(other.state_dict())
            target = {"weights": other.state_dict(), "optim": groups}
            robust_dcp.install()
            try:
                with pytest.raises(PlanConflict, match=r"\[2, 2\] parameters here and \[4\] in|Missing key"):
                    module.load(target, checkpoint_id=tmp_path / "numbers")
            finally:
                robust_dcp.uninstall()
            assert whole(other.state_dict()) == before


class Scaled(nn.Linear):
    """A layer whose extra state grows, as bytes or as a dict."""

    def __init__(self, form: str) -> None:
        super().__init__(4, 4)
        self.form, self.history = form, list[float]()

    def get_extra_state(self) -> Any:
        if self.form == "bytes":
            return torch.tensor([int(each) for each in self.history], dtype=torch.uint8)
        return {
            "history": {str(at): torch.tensor(each) for at, each in enumerate(self.history)},
            "n": len(self.history),
        }

    def set_extra_state(self, state: Any) -> None:
        values = state if self.form == "bytes" else state.get("history", {}).values()
        self.history = [float(each) for each in values]


@pytest.mark.parametrize("is_switched", [False, True])
@pytest.mark.parametrize("form", ["bytes", "dict"])
@pytest.mark.parametrize(("saved", "before"), [([1.0, 2.0, 3.0], []), ([1.0], [4.0, 5.0]), ([7.0], [8.0])])
def test_the_extra_state_of_a_module_is_loaded_as_it_was_saved_whatever_is_there(
    saved: list[float], before: list[float], form: str, is_switched: bool, tmp_path: Path
) -> None:
    model, other = nn.Sequential(Scaled(form)), nn.Sequential(Scaled(form))
    model[0].history, other[0].history = saved, before
    robust_dcp.save({"model": model}, checkpoint_id=tmp_path)
    if is_switched:
        robust_dcp.install()
    try:
        (dcp.load if is_switched else robust_dcp.load)({"model": other}, checkpoint_id=tmp_path)
    finally:
        robust_dcp.uninstall()
    assert other[0].history == saved


class Named(nn.Module):
    """Has a submodule that is called as a wrapper would call it, beside parameters that have the names of its own."""

    def __init__(self, name: str, *, has_weight: bool = True) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(2, 2))
        self.inner = name
        if has_weight:
            self.weight = nn.Parameter(torch.zeros(2, 2))
            self.bias = nn.Parameter(torch.ones(2))

    def trained(self) -> AdamW:
        outer, inner = [*self.parameters(recurse=False)], [*getattr(self, self.inner).parameters()]
        groups = [{"params": outer, "lr": 1.0}, {"params": inner, "lr": 0.001}] if outer else [{"params": inner}]
        optimizer = AdamW(groups)
        sum(parameter.sum() for parameter in self.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        return optimizer


@pytest.mark.parametrize("name", ["module", "_orig_mod", "_checkpoint_wrapped_module", "head"])
def test_a_module_that_is_called_as_a_wrapper_would_call_it_is_none(name: str, tmp_path: Path) -> None:
    saved = Named(name)
    optimizer = saved.trained()
    robust_dcp.save({"model": saved, "optimizer": optimizer}, checkpoint_id=tmp_path / "both")
    loaded = Named(name)
    of_loaded = loaded.trained()
    of_loaded.param_groups[0]["lr"] = of_loaded.param_groups[1]["lr"] = 0.5
    robust_dcp.load({"model": loaded, "optimizer": of_loaded}, checkpoint_id=tmp_path / "both")
    assert [group["lr"] for group in of_loaded.param_groups] == [1.0, 0.001]
    assert all(map(torch.equal, loaded.state_dict().values(), saved.state_dict().values()))

    smaller = Named(name, has_weight=False)
    robust_dcp.save({"model": smaller, "optimizer": smaller.trained()}, checkpoint_id=tmp_path / "inner")
    for more in ({}, {"optimizer": loaded.trained()}):
        with pytest.raises(PlanConflict, match=r"Missing key in checkpoint: 'model\.(weight|bias)'"):
            robust_dcp.load({"model": loaded, **more}, checkpoint_id=tmp_path / "inner")
    before = loaded.weight.detach().clone()
    planner = RobustLoadPlanner(allow_partial_load=True)
    robust_dcp.load({"model": loaded}, checkpoint_id=tmp_path / "inner", planner=planner)
    assert torch.equal(loaded.weight, before)
    inner = [getattr(each, name).weight for each in (loaded, smaller)]
    assert torch.equal(*inner)
