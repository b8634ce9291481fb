"""A program that trains with torchao's 8-bit Adam under FSDP2, behind a frozen layer of quantized weights. It is named
``sync``, or ``async`` for ``async_save``."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from comparing import Run
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree
from torchao.optim import AdamW8bit
from torchao.quantization import Int8WeightOnlyConfig, quantize_


def inner(value):
    """A tensor, or the tensors that a quantized one wraps."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if hasattr(value, "__tensor_flatten__"):
        return {name: inner(getattr(value, name)) for name in value.__tensor_flatten__()[0]}
    return value


class Quantized(Run):
    def __init__(self, name):
        dist.init_process_group("cpu:gloo")
        self.name = name
        self.frozen = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
        quantize_(self.frozen, Int8WeightOnlyConfig())
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))
        self.optimizer = AdamW8bit(self.model.parameters(), lr=1e-3)

    def loss(self):
        return self.model(self.frozen(torch.randn(4, 64))).square().mean()

    def state_dict(self):
        of_model, of_optimizer = get_state_dict(self.model, self.optimizer)
        return {"frozen": self.frozen.state_dict(), "model": of_model, "optimizer": of_optimizer}

    def save(self, path):
        if self.name == "async":
            dcp.async_save(self.state_dict(), checkpoint_id=path).result()
        else:
            dcp.save(self.state_dict(), checkpoint_id=path)

    def load(self, path):
        state = self.state_dict()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def state(self):
        parameters = [*self.frozen.parameters(), *self.model.parameters()]
        return _pytree.tree_map(inner, [parameters, self.optimizer.state_dict()])


if __name__ == "__main__":
    Quantized.main()
