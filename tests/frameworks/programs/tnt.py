"""A program that trains with TorchTNT: ``tnt.py save sync DIRECTORY`` or ``async``, or ``load`` and directories."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from comparing import compare, keep, small_model, tell
from torch.distributed.fsdp import fully_shard
from torchtnt.framework.callbacks import DistributedCheckpointSaver
from torchtnt.framework.train import train
from torchtnt.framework.unit import TrainUnit


class Unit(TrainUnit):
    def __init__(self):
        super().__init__()
        self.model = fully_shard(small_model())
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def train_step(self, state, data):
        loss = self.model(data).square().mean()
        tell(loss)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def everything(self):
        progress = self.train_progress.state_dict()
        return [self.model.state_dict(), self.optimizer.state_dict(), progress]


def main():
    warnings.simplefilter("ignore")
    command, mode, *directories = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.manual_seed(1 if command == "save" else 2)
    for directory in map(Path, directories):
        unit = Unit()
        batches = [torch.randn(4, 8) for _ in range(4)]
        if command == "save":
            saver = DistributedCheckpointSaver(
                str(directory / mode),
                save_every_n_train_steps=2,
                async_checkpoint=mode == "async",
                process_group=dist.new_group(backend="gloo"),  # stock saves behind training on a group of its own
            )
            train(unit, batches, max_epochs=1, callbacks=[saver])
            keep(directory, mode, unit.everything())
        else:
            DistributedCheckpointSaver.restore(str(directory / mode / "epoch_1_train_step_4"), unit)
            compare(directory, mode, unit.everything())
            torch.manual_seed(3)
            train(unit, [torch.randn(4, 8) for _ in range(2)], max_epochs=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
