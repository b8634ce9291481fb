"""A model wrapped in Megatron-FSDP on CPU, sharded unevenly, with a SwiGLU layer and an optimizer.

Forward and backward are not run.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["HIDDEN", "build", "state_dict_of", "step"]

HIDDEN = 5


class _Mlp(nn.Module):
    def __init__(self, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(HIDDEN, 2 * 7, bias=False)
        self.linear_fc2 = nn.Linear(7, HIDDEN)
        if tp_size > 1:  # as Megatron's column-parallel layers are marked
            weight: Any = self.linear_fc1.weight
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
            weight.data += tp_rank


class _Layer(nn.Module):
    def __init__(self, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self.mlp = _Mlp(tp_rank, tp_size)
        self.norm = nn.LayerNorm(3)


class _Model(nn.Module):
    def __init__(self, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(tp_rank, tp_size) for _ in range(2))


def build(mesh: DeviceMesh, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """Model and optimizer on a mesh with the dimensions ``dp`` and ``tp``."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard import fully_shard_model

    torch.cuda.current_device = lambda: 0  # Megatron-FSDP makes the name of a device of it
    torch.manual_seed(seed)
    model = fully_shard_model(
        _Model(mesh.get_local_rank("tp"), mesh["tp"].size()),
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
