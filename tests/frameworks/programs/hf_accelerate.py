"""A program that trains with Accelerate, its weights sharded by FSDP2: ``hf_accelerate.py save DIRECTORY``, or
``load`` and some directories.

Accelerate takes up FSDP only where it finds several devices. On a CPU it is told that it has: ``believe_in_devices``.
"""

import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from comparing import compare, keep, small_model, tell, train


def believe_in_devices():
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def start(seed):
    believe_in_devices()
    torch.manual_seed(seed)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = small_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2))
    return accelerator, model, optimizer, scheduler


def state_of(model, optimizer, scheduler):
    return [model.state_dict(), optimizer.optimizer.state_dict(), scheduler.state_dict()]


def main():
    warnings.simplefilter("ignore")
    command, *directories = sys.argv[1:]
    accelerator, model, optimizer, scheduler = start(seed=1 if command == "save" else 2)
    for directory in map(Path, directories):
        losses = train(model, optimizer, 2, accelerator.backward, scheduler.step)
        if command == "save":
            accelerator.save_state(directory / "state")
            tell(*losses, *train(model, optimizer, 1, accelerator.backward, scheduler.step))
            accelerator.save_state(directory / "state")  # again at one place
            keep(directory, "state", state_of(model, optimizer, scheduler))
        else:
            accelerator.load_state(directory / "state")
            compare(directory, "state", state_of(model, optimizer, scheduler))
            torch.manual_seed(3)
            tell(*train(model, optimizer, 2, accelerator.backward, scheduler.step))
    accelerator.end_training()


if __name__ == "__main__":
    main()
