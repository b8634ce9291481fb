"""Modules and optimizers stand in a state dict themselves, under names that fit any way to distribute them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import robust_dcp
from robust_dcp import RobustCheckpointError, RobustLoadPlanner
from tests.faults.disk import LONG_TESTS
from tests.harness.ranks import on_ranks, run_ranks, values
from tests.harness.verdicts import lines_of_the_log
from torture.state_dicts import run as run_state_dicts

Wrap = Callable[[nn.Module], nn.Module]


def fsdp2(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


WRAPS: dict[str, Wrap] = {
    "plain": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled in part": lambda model: nn.Sequential(torch.compile(model[0], backend="eager"), *list(model)[1:]),
    "DDP": DistributedDataParallel,
    "FSDP1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
    "FSDP2": fsdp2,
    "tensor parallel": tensor_parallel,
}


def built(wrap: str, seed: int, *, steps: int = 2) -> tuple[nn.Module, Optimizer]:
    """A model, a part of which has two names, and an optimizer with three groups, one empty, after some steps."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(4)
    model = WRAPS[wrap](nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), norm, norm))
    decayed = [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("weight")]
    optimizer = AdamW([{"params": []}, {"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.1 + seed)
    for _ in range(steps):
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(value: Any) -> Any:
    """Nested values with tensors as lists of numbers, whoever holds which part of them."""
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    if hasattr(value, "local_shards"):
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, [shard.tensor for shard in value.local_shards()])
        return torch.cat([each for part in parts for each in part]).tolist()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.tolist() if isinstance(value, torch.Tensor) else value


def recipe(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state dict of PyTorch's own recipe."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def held(model: nn.Module, optimizer: Optimizer) -> Any:
    """What a model and its optimizer hold, in stock's words."""
    return whole(recipe(model, optimizer))


def save_and_load(path: str, saved_by: str) -> list[str]:
    """Save one way, beside training and by PyTorch's recipe, and load every way, into what has trained otherwise and
    into what has not trained. What differs."""
    wrong = []
    model, optimizer = built(saved_by, seed=1)
    expected = held(model, optimizer)
    saving = robust_dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{path}/ours")
    if held(model, optimizer) != expected:
        wrong.append("the save has changed what it saved")
    dcp.save(recipe(model, optimizer), checkpoint_id=f"{path}/recipe")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    saving.result()
    for loaded_by in WRAPS:
        for steps, name in ((0, "ours"), (1, "ours"), (1, "recipe")):
            other, its_optimizer = built(loaded_by, seed=2, steps=steps)
            robust_dcp.load({"model": other, "optimizer": its_optimizer}, checkpoint_id=f"{path}/{name}")
            if held(other, its_optimizer) != expected:
                wrong.append(f"{name} to {loaded_by} after {steps} steps")
            proof = robust_dcp.prove({"model": other, "optimizer": its_optimizer}, checkpoint_id=f"{path}/{name}")
            if not proof.equal:
                wrong.append(f"{name} in {loaded_by} after {steps} steps: {proof}")
    by_recipe = recipe(*built(saved_by, seed=3))
    dcp.load(by_recipe, checkpoint_id=f"{path}/ours")
    return wrong if whole(by_recipe) == expected else [*wrong, "ours to the recipe"]


@pytest.mark.parametrize("saved_by", WRAPS)
def test_what_is_saved_under_one_way_to_distribute_is_loaded_under_every_other(saved_by: str, tmp_path: Path) -> None:
    """Under the names of PyTorch's own recipe."""
    for wrong in on_ranks(2, save_and_load, str(tmp_path), saved_by):
        assert wrong == []


def load_what_stock_named(path: str, wrap: str, steps: int) -> bool:
    """Stock names what a wrapped module and an optimizer hold as these do: "module.0.weight", and 0, 1, 2."""
    model, optimizer = built(wrap, seed=1, steps=steps)
    dcp.save({"model": model, "optimizer": optimizer, "loss": nn.MSELoss()}, checkpoint_id=path)
    other, its_optimizer = built(wrap, seed=2, steps=0)
    robust_dcp.load({"model": other, "optimizer": its_optimizer, "loss": nn.MSELoss()}, checkpoint_id=path)
    robust_dcp.prove(
        {"model": other, "optimizer": its_optimizer, "loss": nn.MSELoss()}, checkpoint_id=path
    ).raise_if_differs()
    return bool(held(other, its_optimizer) == held(model, optimizer))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("wrap", ["plain", "compiled", "compiled in part", "DDP", "FSDP2"])
def test_what_stock_has_saved_is_loaded_under_its_names(wrap: str, steps: int, tmp_path: Path) -> None:
    assert on_ranks(2, load_what_stock_named, str(tmp_path), wrap, steps) == [True, True]


def trained_on(model: nn.Module, optimizer: Optimizer) -> list[float]:
    model(torch.ones(6, 4)).square().sum().backward()
    optimizer.step()
    return [parameter.sum().item() for parameter in model.parameters()]


def test_a_save_before_the_first_step_does_not_change_training(tmp_path: Path) -> None:
    expected = trained_on(*built("plain", seed=1, steps=0))
    model, optimizer = built("plain", seed=1, steps=0)
    robust_dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    assert len(optimizer.state) == 0

    other, its_optimizer = built("plain", seed=2, steps=3)
    robust_dcp.load({"model": other, "optimizer": its_optimizer}, checkpoint_id=tmp_path)
    assert trained_on(model, optimizer) == trained_on(other, its_optimizer) == expected


def test_state_is_loaded_between_backward_and_step_and_gradients_stay(tmp_path: Path) -> None:
    model, optimizer = built("plain", seed=1)
    robust_dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    other, its_optimizer = built("plain", seed=2, steps=0)
    other(torch.ones(6, 4)).sum().backward()
    gradients = [whole(parameter.grad) for parameter in other.parameters()]
    robust_dcp.load({"model": other, "optimizer": its_optimizer}, checkpoint_id=tmp_path)
    assert held(other, its_optimizer) == held(model, optimizer)
    assert [whole(parameter.grad) for parameter in other.parameters()] == gradients


def test_an_optimizer_whose_module_is_not_there_has_stocks_names(tmp_path: Path) -> None:
    model, optimizer = built("plain", seed=1)
    robust_dcp.save({"model": model.state_dict(), "optimizer": optimizer}, checkpoint_id=tmp_path)
    for load in (robust_dcp.load, dcp.load):
        other, its_optimizer = built("plain", seed=2, steps=0 if load is robust_dcp.load else 1)
        its_optimizer.param_groups[0]["lr"] = torch.tensor(9.0)  # it was saved as a number
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # stock says that there is one process
            load({"model": other.state_dict(), "optimizer": its_optimizer}, checkpoint_id=tmp_path)
        assert held(other, its_optimizer) == held(model, optimizer)


def test_what_has_no_name_or_no_memory_or_one_name_with_another_is_refused_by_name(tmp_path: Path) -> None:
    (model, optimizer), (other, its_optimizer) = built("plain", seed=1), built("plain", seed=2)
    loose, of_all = AdamW([nn.Parameter(torch.ones(2))]), AdamW(model.parameters())
    of_all.state["all"] = {"step": torch.ones(())}  # type: ignore[index]
    for state, words in (
        ({"model": model, "optimizers": [optimizer, loose]}, r"optimizers\[1\] has parameters that are in no module"),
        ({"model": model, "optimizers": of_all}, "'optimizers' have no names: AdamW has a state of 'all'"),
        ({"models": [model, other]}, r"two values that flatten to the name 'models\.0\.weight'"),
        ({"m": model, "n": other, "optimizers": [optimizer, its_optimizer]}, r"name 'optimizers\.state\.0\.weight'"),
    ):
        with pytest.raises(RobustCheckpointError, match=words):
            robust_dcp.save(state, checkpoint_id=tmp_path)
    robust_dcp.save({"model": model}, checkpoint_id=tmp_path)
    with pytest.raises(robust_dcp.PlanConflict, match=r"'model\.0\.weight' cannot be loaded into"):
        robust_dcp.load({"model": torch.compile(model.to("meta"), backend="eager")}, checkpoint_id=tmp_path)


class WithNamesOfItsOwn(AdamW):
    def state_dict(self) -> dict[str, Any]:
        return {"own": torch.tensor(7.0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def test_a_class_with_a_state_dict_of_its_own_is_asked_for_that(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = WithNamesOfItsOwn(model.parameters())
    report = robust_dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    assert set(report.metadata.state_dict_metadata) == {"model.weight", "model.bias", "optimizer.own"}
    robust_dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    assert optimizer.loaded == {"own": torch.tensor(7.0)}


class Experts(nn.Module):
    """Two experts. A step trains those that got tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, value: torch.Tensor, experts: tuple[int, ...]) -> torch.Tensor:
        value = self.router(value)
        return sum((self.experts[number](value).sum() for number in experts), torch.zeros(()))


def experts(seed: int, optimizer: str = "AdamW") -> tuple[Experts, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Experts()
    name, _, momentum = optimizer.partition(" ")
    options = {"momentum": float(momentum)} if momentum else {}  # SGD without it has no state at all
    return model, getattr(torch.optim, name)(model.parameters(), lr=0.1 * seed, **options)


def step(model: Experts, optimizer: torch.optim.Optimizer, *experts: int) -> None:
    model(torch.ones(2, 4), experts).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of each parameter that has some, by name."""
    return {
        name: {key: whole(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def load(model: nn.Module, optimizer: Any, path: Path, *, partial: bool) -> robust_dcp.LoadReport:
    planner = RobustLoadPlanner(allow_partial_load=partial)
    return robust_dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path, planner=planner)


@pytest.mark.parametrize(
    ("optimizer", "trained", "before", "frozen", "partial"),
    [
        ("AdamW", (0,), (), True, False),
        ("AdamW", (0,), (0,), False, True),
        ("AdamW", (0,), (1,), False, True),
        ("AdamW", (0,), (0, 1), False, False),
        ("AdamW", (0, 1), (1,), True, False),
        ("SGD 0.9", (0,), (), True, True),
        ("SGD", (0,), (), False, False),
        ("Adagrad", (0,), (0, 1), False, False),
    ],
)
def test_parameters_without_a_gradient_are_loaded_as_they_were(
    optimizer: str, trained: tuple[int, ...], before: tuple[int, ...], frozen: bool, partial: bool, tmp_path: Path
) -> None:
    """The optimizer that is loaded has stepped for other parameters than the one that was saved."""
    saved, loaded = experts(1, optimizer), experts(2, optimizer)
    step(*saved, *trained)
    step(*saved, *trained)
    if before:
        step(*loaded, *before)
    for run in (saved, loaded):  # "frozen": what was trained is frozen when it is saved and loaded
        run[0].experts[0].requires_grad_(not frozen)
    robust_dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=tmp_path)
    load(*loaded, tmp_path, partial=partial)
    assert state_of(*loaded) == state_of(*saved)
    for run in (saved, loaded):  # both experts get tokens now
        assert run[0].experts[0].weight.requires_grad != frozen
        step(run[0].requires_grad_(), run[1], 0, 1)
    assert state_of(*loaded) == state_of(*saved)
    for one, other in zip(saved[0].parameters(), loaded[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_alone_is_loaded_in_part(tmp_path: Path) -> None:
    saved = experts(1)
    step(*saved, 0)
    robust_dcp.save({"optimizer": saved[1]}, checkpoint_id=tmp_path)
    loaded = experts(2)
    robust_dcp.load({"optimizer": loaded[1]}, checkpoint_id=tmp_path)
    assert state_of(*loaded) == state_of(*saved)


def test_a_load_that_fails_leaves_an_optimizer_without_state(tmp_path: Path) -> None:
    robust_dcp.save({"other": torch.ones(2)}, checkpoint_id=tmp_path)
    model, optimizer = experts(1)
    with pytest.raises(robust_dcp.PlanConflict, match="Missing key"):
        load(model, optimizer, tmp_path, partial=False)
    assert not optimizer.state


Trained = tuple[Experts, torch.optim.Optimizer]


def stages(trained: list[Trained]) -> dict[str, Any]:
    """This rank's two stages of four, and their optimizers."""
    numbers = (dist.get_rank(), dist.get_rank() + 2)
    models = [nn.ModuleDict({f"stage{at}": model}) for at, (model, _) in zip(numbers, trained, strict=True)]
    for each in models:
        each.register_buffer("positions", torch.arange(3.0))
    return {"model": models, "optimizer": [optimizer for _, optimizer in trained]}


def save_and_load_stages(path: str) -> tuple[list[bool], set[str]]:
    """In each stage one expert has had no tokens."""
    rank, equal = dist.get_rank(), []
    for number, before in enumerate([(), (1,), (0, 1)]):
        saved, loaded = [experts(1 + rank), experts(5 + rank)], [experts(3 + rank), experts(7 + rank)]
        for each in saved:
            step(*each, rank)
        report = robust_dcp.save(stages(saved), checkpoint_id=f"{path}/{number}")
        for each in loaded[: len(before)]:
            step(*each, *before)
        robust_dcp.load(stages(loaded), checkpoint_id=f"{path}/{number}")
        equal += [state_of(*one) == state_of(*other) for one, other in zip(saved, loaded, strict=True)]
    return equal, set(report.metadata.state_dict_metadata)


def test_stages_of_a_pipeline_are_a_list_whose_optimizers_are_named_by_parameter_and_loaded_in_part(
    tmp_path: Path,
) -> None:
    for equal, names in on_ranks(2, save_and_load_stages, str(tmp_path)):
        assert equal == [True] * 6
        assert {f"model.stage{number}.router.weight" for number in range(4)} <= names
        assert {f"optimizer.param_groups.stage{number}.router.weight.lr" for number in range(4)} <= names


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
    assert on_ranks(2, save_and_load_sharded, str(tmp_path)) == [[True, True]] * 2


def load_telling(path: str, asked: list[list[str]]) -> list[str]:
    """What the log says of a load in which each rank asks for other keys."""
    lines = lines_of_the_log()
    robust_dcp.load({key: torch.zeros(2) for key in asked[dist.get_rank()]}, checkpoint_id=path)
    return [line for line in lines if "asked for" in line]


def test_one_line_says_what_no_rank_has_asked_for(tmp_path: Path) -> None:
    keys = [*(f"model.{number}" for number in range(5)), *(f"optimizer.{number}" for number in range(3))]
    robust_dcp.save({**{key: torch.ones(2) for key in keys}, "step": torch.ones(2)}, checkpoint_id=tmp_path)
    (line,), nothing = on_ranks(2, load_telling, str(tmp_path), [keys[:2], keys[2:4]])
    for word in ("5 of its 9 keys", "model (1 of 5: 'model.4')", "optimizer (all 3)", "step", str(tmp_path)):
        assert word in line
    assert nothing == []
    assert on_ranks(2, load_telling, str(tmp_path), [keys[:4], [*keys[4:], "step"]]) == [[], []]


# --- a part of the campaign of torture -------------------------------------------------------------------------------


def complaints_of(first: int, n_trials: int) -> list[str]:
    return [line for number in range(first, first + n_trials) for line in run_state_dicts(number).complaints]


def test_what_is_saved_by_us_under_the_switch_or_by_stock_is_loaded_by_each_of_them() -> None:
    assert values(run_ranks(1, complaints_of, 7, 300 if LONG_TESTS else 6)) == [[]]
