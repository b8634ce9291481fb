"""A program that trains with Lightning Fabric, named by its strategy: ``mp`` or ``fsdp``.

``FSDPStrategy`` is for GPUs. Two small things let it run on a CPU: a subclass, since Fabric looks for the class itself,
and a device that is named, since FSDP looks for an accelerator where none is.
"""

import torch
from comparing import Run, small_model
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


class FSDPOnCPU(FSDPStrategy):
    pass


def let_fsdp_run_on_cpu():
    made = FullyShardedDataParallel.__init__

    def make(self, *args, device_id=None, **kwargs):
        made(self, *args, device_id=torch.device("cpu"), **kwargs)

    FullyShardedDataParallel.__init__ = make


def sharded(model, device_mesh):
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=device_mesh["data_parallel"])
    return fully_shard(model, mesh=device_mesh["data_parallel"])


class WithFabric(Run):
    def __init__(self, name):
        if name == "fsdp":
            let_fsdp_run_on_cpu()
            strategy = FSDPOnCPU(state_dict_type="sharded", use_orig_params=True)
        else:
            strategy = ModelParallelStrategy(sharded, data_parallel_size=2, tensor_parallel_size=1)
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        self.fabric.launch()
        self.backward = self.fabric.backward
        model = small_model()
        if name == "fsdp":
            self.model, self.optimizer = self.fabric.setup(model, torch.optim.AdamW(model.parameters()))
        else:
            self.model = self.fabric.setup(model)
            self.optimizer = self.fabric.setup_optimizers(torch.optim.AdamW(self.model.parameters()))

    def save(self, path):
        self.fabric.save(path, {"model": self.model, "optimizer": self.optimizer, "step": 7})

    def load(self, path):
        state = {"model": self.model, "optimizer": self.optimizer, "step": 0}
        self.fabric.load(path, state)
        assert state["step"] == 7

    def state(self):
        return [[parameter.data for parameter in self.model.parameters()], self.optimizer.optimizer.state_dict()]


if __name__ == "__main__":
    WithFabric.main()
