"""A program that trains with Lightning Fabric: ``fabric.py save NAME DIRECTORY``, or ``load`` and some directories.

``FSDPStrategy`` is for GPUs. Two small things let it run on a CPU: a subclass, since Fabric looks for the class itself,
and a device that is named, since FSDP looks for an accelerator where none is.
"""

import sys
import warnings
from pathlib import Path

import torch
from comparing import compare, keep, small_model, tell, train
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


def strategy_named(name):
    if name == "fsdp":
        let_fsdp_run_on_cpu()
        return FSDPOnCPU(state_dict_type="sharded", use_orig_params=True)
    return ModelParallelStrategy(sharded, data_parallel_size=2, tensor_parallel_size=1)


def start(name, seed):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy_named(name))
    fabric.launch()
    torch.manual_seed(seed)
    model = small_model()
    if name == "fsdp":
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    else:
        model = fabric.setup(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    return fabric, model, optimizer


def state_of(model, optimizer):
    return [[parameter.data for parameter in model.parameters()], optimizer.optimizer.state_dict()]


def main():
    warnings.simplefilter("ignore")
    command, name, *directories = sys.argv[1:]
    fabric, model, optimizer = start(name, seed=1 if command == "save" else 2)
    state = {"model": model, "optimizer": optimizer, "step": 7}
    for directory in map(Path, directories):
        if command == "save":
            # Twice at one place, as with a checkpoint "last".
            for _ in range(2):
                tell(*train(model, optimizer, 2, fabric.backward))
                fabric.save(directory / name, state)
            keep(directory, name, state_of(model, optimizer))
        else:
            train(model, optimizer, 1, fabric.backward)
            state["step"] = 0
            fabric.load(directory / name, state)
            assert state["step"] == 7
            compare(directory, name, state_of(model, optimizer))
            torch.manual_seed(3)
            tell(*train(model, optimizer, 2, fabric.backward))


if __name__ == "__main__":
    main()
