"""A program that trains with TorchTNT. It is named ``sync`` or ``async``."""

import torch
import torch.distributed as dist
from comparing import Run, small_model
from torch.distributed.fsdp import fully_shard
from torchtnt.framework.callbacks import DistributedCheckpointSaver
from torchtnt.framework.train import train
from torchtnt.framework.unit import TrainUnit


class Unit(TrainUnit):
    def __init__(self):
        super().__init__()
        self.model = fully_shard(small_model())
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.losses = []

    def train_step(self, state, data):
        loss = self.model(data).square().mean()
        self.losses.append(loss.detach())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class WithUnit(Run):
    def __init__(self, name):
        dist.init_process_group("gloo")
        self.name, self.unit, self.callbacks = name, Unit(), []
        self.group = dist.new_group(backend="gloo")  # stock saves behind training on a group of its own

    def train(self, steps, *callbacks):
        epochs = self.unit.train_progress.num_epochs_completed + 1
        train(self.unit, [torch.randn(4, 8) for _ in range(steps)], max_epochs=epochs, callbacks=list(callbacks))
        losses, self.unit.losses = self.unit.losses, []
        return losses

    def save(self, path):
        """TorchTNT saves while it trains."""
        is_async = self.name == "async"
        saver = DistributedCheckpointSaver(
            str(path), save_every_n_train_steps=2, async_checkpoint=is_async, process_group=self.group
        )
        self.train(4, saver)

    def load(self, path):
        latest = max(path.iterdir(), key=lambda each: int(each.name.rpartition("_")[2]))
        DistributedCheckpointSaver.restore(str(latest), self.unit)

    def state(self):
        progress = self.unit.train_progress.state_dict()
        return [self.unit.model.state_dict(), self.unit.optimizer.state_dict(), progress]


if __name__ == "__main__":
    WithUnit.main()
