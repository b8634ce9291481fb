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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import robust_dcp
from robust_dcp import RobustCheckpointError
from tests.harness.ranks import in_ranks, values

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
    "DDP": DistributedDataParallel,
    "FSDP1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
    "FSDP2": fsdp2,
    "tensor parallel": tensor_parallel,
}


def built(wrap: str, seed: int, *, steps: int = 2) -> tuple[nn.Module, Optimizer]:
    """A model with a buffer and an optimizer with two groups, after some steps of training."""
    torch.manual_seed(seed)
    model = WRAPS[wrap](nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.BatchNorm1d(4, affine=False)))
    decayed = [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("weight")]
    optimizer = AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.1 + seed)
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


def held(model: nn.Module, optimizer: Optimizer) -> Any:
    """What a model and its optimizer hold, in stock's words."""
    return whole(list(get_state_dict(model, optimizer)))


def save_and_load(path: str, saved_by: str) -> list[str]:
    """Save one way, load every way, into what has trained otherwise and into what has not trained. What differs."""
    wrong = []
    model, optimizer = built(saved_by, seed=1)
    expected = held(model, optimizer)
    robust_dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    if held(model, optimizer) != expected:
        wrong.append(f"{saved_by}: the save has changed what it saved")
    for loaded_by in WRAPS:
        for steps in (0, 1):
            other, its_optimizer = built(loaded_by, seed=2, steps=steps)
            robust_dcp.load({"model": other, "optimizer": its_optimizer}, checkpoint_id=path)
            if held(other, its_optimizer) != expected:
                wrong.append(f"{saved_by} to {loaded_by} after {steps} steps")
    return wrong


@pytest.mark.parametrize("saved_by", WRAPS)
def test_what_is_saved_under_one_way_to_distribute_is_loaded_under_every_other(saved_by: str, tmp_path: Path) -> None:
    for wrong in values(in_ranks(2, save_and_load, str(tmp_path), saved_by, timeout_seconds=150)):
        assert wrong == []


def exchange_with_the_tutorial(path: str) -> bool:
    model, optimizer = built("FSDP2", seed=1)
    expected = held(model, optimizer)
    robust_dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{path}/ours")
    by_hand = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(by_hand, checkpoint_id=f"{path}/stock")

    other, its_optimizer = built("FSDP2", seed=2)
    by_hand = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer), strict=True))
    dcp.load(by_hand, checkpoint_id=f"{path}/ours")
    third, third_optimizer = built("FSDP2", seed=3)
    robust_dcp.load({"model": third, "optimizer": third_optimizer}, checkpoint_id=f"{path}/stock")
    return held(third, third_optimizer) == expected == whole([by_hand["model"], by_hand["optimizer"]])


def test_names_are_those_of_pytorchs_own_recipe(tmp_path: Path) -> None:
    assert values(in_ranks(2, exchange_with_the_tutorial, str(tmp_path))) == [True, True]


def load_what_stock_named(path: str, wrap: str) -> bool:
    """Stock names what a wrapped module and an optimizer hold as these do: "module.0.weight", and 0, 1, 2."""
    model, optimizer = built(wrap, seed=1)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    other, its_optimizer = built(wrap, seed=2, steps=0)
    robust_dcp.load({"model": other, "optimizer": its_optimizer}, checkpoint_id=path)
    return bool(held(other, its_optimizer) == held(model, optimizer))


@pytest.mark.parametrize("wrap", ["plain", "compiled", "DDP", "FSDP2"])
def test_modules_and_optimizers_that_stock_has_saved_are_loaded_under_its_names(wrap: str, tmp_path: Path) -> None:
    assert values(in_ranks(2, load_what_stock_named, str(tmp_path), wrap)) == [True, True]


def pipeline(seed: int, steps: int = 1) -> tuple[list[nn.Module], list[Optimizer]]:
    """This rank's two stages of four."""
    torch.manual_seed(seed + dist.get_rank())
    first = dist.get_rank()
    stages: list[nn.Module] = [
        nn.ModuleDict({f"layer{number}": nn.Linear(3, 3, bias=number == 0)}) for number in (first, first + 2)
    ]
    optimizers: list[Optimizer] = [
        AdamW(stage.parameters(), lr=seed + 0.1 * number) for number, stage in enumerate(stages)
    ]
    for _ in range(steps):
        for stage, optimizer in zip(stages, optimizers, strict=True):
            sum(parameter.square().sum() for parameter in stage.parameters()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return stages, optimizers


def save_and_load_stages(path: str) -> tuple[bool, set[str]]:
    stages, optimizers = pipeline(seed=1)
    report = robust_dcp.save({"model": stages, "optimizer": optimizers}, checkpoint_id=path)
    others, their_optimizers = pipeline(seed=2, steps=0)
    robust_dcp.load({"model": others, "optimizer": their_optimizers}, checkpoint_id=path)
    is_equal = all(
        held(*one) == held(*other)
        for one, other in zip(
            zip(stages, optimizers, strict=True), zip(others, their_optimizers, strict=True), strict=True
        )
    )
    return is_equal, set(report.metadata.state_dict_metadata)


def test_stages_of_a_pipeline_are_a_list_and_their_optimizers_are_named_by_parameter(tmp_path: Path) -> None:
    for is_equal, names in values(in_ranks(2, save_and_load_stages, str(tmp_path))):
        assert is_equal
        assert {f"model.layer{number}.weight" for number in range(4)} <= names
        assert {f"optimizer.param_groups.layer{number}.weight.lr" for number in range(4)} <= names


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


def test_an_optimizer_without_state_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    robust_dcp.save({"model": model, "optimizer": SGD(model.parameters(), lr=0.5)}, checkpoint_id=tmp_path)
    optimizer = SGD(model.parameters(), lr=0.1)
    robust_dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_optimizer_whose_module_is_not_there_has_stocks_names(tmp_path: Path) -> None:
    model, optimizer = built("plain", seed=1)
    names = {"model": model.state_dict(), "optimizer": optimizer}
    robust_dcp.save(names, checkpoint_id=tmp_path)
    for load in (robust_dcp.load, dcp.load):
        other, its_optimizer = built("plain", seed=2, steps=0 if load is robust_dcp.load else 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # stock says that there is one process
            load({"model": other.state_dict(), "optimizer": its_optimizer}, checkpoint_id=tmp_path)
        assert held(other, its_optimizer) == held(model, optimizer)


def test_one_of_several_optimizers_without_a_module_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = built("plain", seed=1)
    loose = AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(RobustCheckpointError, match=r"optimizers\[1\] has parameters that are in no module"):
        robust_dcp.save({"model": model, "optimizers": [optimizer, loose]}, checkpoint_id=tmp_path)


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


def test_options_of_stocks_recipe_can_be_passed_as_a_state_dict(tmp_path: Path) -> None:
    model, optimizer = built("plain", seed=1)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    by_hand = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
    report = robust_dcp.save(by_hand, checkpoint_id=tmp_path)
    assert "optimizer.param_groups.0.weight.lr" in report.metadata.state_dict_metadata


def save_behind_training(path: str) -> bool:
    model, optimizer = built("FSDP2", seed=1)
    expected = held(model, optimizer)
    saving = robust_dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    saving.result()
    robust_dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    return bool(held(model, optimizer) == expected)


def test_async_saves_take_modules_and_optimizers_too(tmp_path: Path) -> None:
    assert values(in_ranks(2, save_behind_training, str(tmp_path))) == [True, True]
