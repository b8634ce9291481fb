"""A program that trains with Accelerate, its weights sharded by FSDP2.

Accelerate takes up FSDP only where it finds several devices. On a CPU it is told that it has: ``believe_in_devices``.
"""

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from comparing import Run, small_model


def believe_in_devices():
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


class Accelerated(Run):
    def __init__(self, name):
        believe_in_devices()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        accelerator = Accelerator(fsdp_plugin=plugin)
        model = small_model()
        self.model, self.optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        self.scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(self.optimizer.optimizer, 2))
        self.backward, self.save, self.load = accelerator.backward, accelerator.save_state, accelerator.load_state

    def train(self, steps):
        losses = super().train(steps)
        self.scheduler.step()
        return losses

    def state(self):
        return [self.model.state_dict(), self.optimizer.optimizer.state_dict(), self.scheduler.state_dict()]


if __name__ == "__main__":
    Accelerated.main()
