"""A program that trains with torchao's 8-bit Adam under FSDP2, behind a frozen layer of quantized weights.

``ao.py save sync DIRECTORY``, or ``async`` for ``async_save``; ``ao.py load NAME`` and some directories.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from comparing import compare, keep, tell
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree
from torchao.optim import AdamW8bit
from torchao.quantization import Int8WeightOnlyConfig, quantize_


def start(seed):
    torch.manual_seed(seed)
    frozen = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
    quantize_(frozen, Int8WeightOnlyConfig())
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return frozen, model, AdamW8bit(model.parameters(), lr=1e-3)


def train(frozen, model, optimizer, steps):
    losses = []
    for _ in range(steps):
        losses.append(model(frozen(torch.randn(4, 64))).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def inner(value):
    """A tensor, or the tensors that a quantized one wraps."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if hasattr(value, "__tensor_flatten__"):
        return {name: inner(getattr(value, name)) for name in value.__tensor_flatten__()[0]}
    return value


def state_of(frozen, model, optimizer):
    return _pytree.tree_map(inner, [list(frozen.parameters()), list(model.parameters()), optimizer.state_dict()])


def state_dict_of(frozen, model, optimizer):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"frozen": frozen.state_dict(), "model": of_model, "optimizer": of_optimizer}


def main():
    warnings.simplefilter("ignore")
    command, name, *directories = sys.argv[1:]
    dist.init_process_group("cpu:gloo")
    run = start(seed=1 if command == "save" else 2)
    for directory in map(Path, directories):
        if command == "save":
            tell(*train(*run, steps=2))
            if name == "async":
                dcp.async_save(state_dict_of(*run), checkpoint_id=directory / name).result()
            else:
                dcp.save(state_dict_of(*run), checkpoint_id=directory / name)
            keep(directory, name, state_of(*run))
        else:
            _, model, optimizer = run
            train(*run, steps=1)
            state = state_dict_of(*run)
            dcp.load(state, checkpoint_id=directory / name)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            compare(directory, name, state_of(*run))
            torch.manual_seed(3)
            tell(*train(*run, steps=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
