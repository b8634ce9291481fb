"""A program that saves as torchtune's distributed recipes do. It is named ``sync`` or ``async``."""

import torch
import torch.distributed as dist
from comparing import Run, small_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torchtune.training.checkpointing import DistributedCheckpointer


class Tuned(Run):
    def __init__(self, name):
        dist.init_process_group("gloo")
        self.group = dist.new_group(backend="gloo")
        self.name, self.epoch = name, 0
        self.model = fully_shard(small_model())
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def state(self):
        of_model, of_optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "epoch": self.epoch}

    def save(self, path):
        self.epoch += 1
        checkpointer = DistributedCheckpointer(str(path), str(path), process_group=self.group)
        checkpointer.save_checkpoint(self.state(), self.epoch, save_async=self.name == "async")
        if self.name == "async":
            checkpointer._checkpoint_future.result()  # a process of stock's that ends would lose it

    def load(self, path):
        """From the latest, as the recipe does without a path."""
        loaded = DistributedCheckpointer(str(path), str(path), process_group=self.group).load_checkpoint(self.state())
        set_state_dict(
            self.model, self.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        self.epoch = loaded["epoch"]


if __name__ == "__main__":
    Tuned.main()
