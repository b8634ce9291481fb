"""Megatron-FSDP's checkpoints (``fsdp_dtensor``) from its own model and SwiGLU split, by stock and by ours."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

pytest.importorskip("megatron.core")

from megatron.core import parallel_state
from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
from megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard import fully_shard_model
from megatron.core.transformer import fsdp_dtensor_checkpoint

from benchmarks.collectives import counted_collectives
from robust_dcp import RobustCheckpointError
from tests.megatron.torch_dist import Scenarios, chosen
from tests.megatron.training_checkpointing import megatron_lm

SCENARIOS = Scenarios(4)


def _preprocessed(model: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """``preprocess_fsdp_dtensor_state_dict`` of Megatron-LM with ``--swiglu``."""
    model_state, optimizer_state = fsdp_dtensor_checkpoint.handle_swiglu_in_state_dict(
        model, state_dict["model"], state_dict["optimizer"]
    )
    state_dict = {**state_dict, "model": model_state, "optimizer": optimizer_state}
    uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state_dict)
    return state_dict


def _locals(state_dict: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], list[float]]]:
    """Of each DTensor where this rank's part begins, and what is in it; nothing of empty parts."""
    found = {}
    for path, value in _pytree.tree_flatten_with_path(state_dict)[0]:
        if isinstance(value, DTensor) and value._local_tensor.numel():
            offsets = tuple(value.__create_chunk_list__()[0].offsets)
            found[_pytree.keystr(path)] = (offsets, value._local_tensor.detach().flatten().tolist())
    return found


@SCENARIOS.add
def stock_loads_what_ours_saves_and_the_reverse_and_the_split_needs_no_collective_of_its_own(directory: Path) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    checkpointing = megatron_lm()
    by_stock, by_ours = str(directory / "stock"), str(directory / "ours")

    model, optimizer = build(mesh, seed=1)
    step(optimizer, of_empty_parts=True)
    with counted_collectives() as calls:
        state = _preprocessed(model, state_dict_of(model, optimizer))
    assert sum(calls.values()) > 100
    expected = _locals(state)
    assert len(expected) > 10
    checkpointing.save_checkpoint(state, by_stock)

    with chosen():
        model, optimizer = build(mesh, seed=1)
        step(optimizer, of_empty_parts=False)
        with counted_collectives() as calls:
            state = _preprocessed(model, state_dict_of(model, optimizer))
        assert not calls
        assert any(isinstance(each, DTensor) and not each._local_tensor.numel() for each in _pytree.tree_leaves(state))
        assert _locals(state) == expected
        checkpointing.save_checkpoint(state, by_ours)
        # Ours loads stock's into another model, whose optimizer has states of what it holds only.
        other, its_optimizer = build(mesh, seed=2)
        step(its_optimizer, of_empty_parts=False)
        state = _preprocessed(other, state_dict_of(other, its_optimizer))
        assert _locals(state) != expected
        checkpointing.load_fsdp_dtensor(state, by_stock, allow_partial_load=False)
        assert _locals(state) == expected
        broken = state_dict_of(other, its_optimizer)
        if dist.get_rank() == 1:
            broken["optimizer"]["state"]["module.module.layers.0.mlp.linear_fc1.weight"].pop("exp_avg")
        with pytest.raises(RobustCheckpointError, match="rank 1: KeyError: 'exp_avg'"):
            _preprocessed(other, broken)

    # And stock loads ours.
    other, its_optimizer = build(mesh, seed=3)
    step(its_optimizer, of_empty_parts=True)
    state = _preprocessed(other, state_dict_of(other, its_optimizer))
    checkpointing.load_fsdp_dtensor(state, by_ours, allow_partial_load=False)
    assert _locals(state) == expected
    assert [(directory / name / ".robust_dcp.index").exists() for name in ("stock", "ours")] == [False, True]


# A model wrapped in Megatron-FSDP on CPU, sharded unevenly, with a SwiGLU layer and an optimizer. Forward and backward
# are not run.

HIDDEN = 5


class _Layer(nn.Module):
    def __init__(self, tp_rank: int) -> None:
        super().__init__()
        fc1, fc2 = nn.Linear(HIDDEN, 2 * 7, bias=False), nn.Linear(7, HIDDEN)
        weight: Any = fc1.weight  # as Megatron's column-parallel layers are marked
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
        weight.data += tp_rank
        self.mlp = nn.ModuleDict({"linear_fc1": fc1, "linear_fc2": fc2})
        self.norm = nn.LayerNorm(3)


def build(mesh: DeviceMesh, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """Model and optimizer on a mesh with the dimensions ``dp`` and ``tp``."""
    torch.cuda.current_device = lambda: 0  # Megatron-FSDP makes the name of a device of it
    torch.manual_seed(seed)
    model = fully_shard_model(
        nn.ModuleDict({"layers": nn.ModuleList(_Layer(mesh.get_local_rank("tp")) for _ in range(2))}),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[_Layer],
        zero_dp_strategy=3,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        preproc_state_dict_for_dcp_ckpt=False,
    )
    model.config = SimpleNamespace(num_moe_experts=None)
    model._replace_param_with_distributed_if_needed()
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(optimizer: torch.optim.Optimizer, *, of_empty_parts: bool) -> None:
    """Make the optimizer's state; Megatron-FSDP makes none for a parameter of which this rank holds nothing."""
    for parameter in optimizer.param_groups[0]["params"]:
        if of_empty_parts or parameter._local_tensor.numel():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def state_dict_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As Megatron-LM gives it to ``preprocess_fsdp_dtensor_state_dict``."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "model": {name.removeprefix("module."): value for name, value in model.state_dict().items()},
        "optimizer": {"state": {f"module.{names[key]}": dict(value) for key, value in optimizer.state.items()}},
        "iteration": 7,
    }


test_on_four_ranks = SCENARIOS.test()
