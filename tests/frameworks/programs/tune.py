"""Saves as torchtune's distributed recipes do: ``tune.py save DIRECTORY``, or ``load`` and some directories."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from comparing import compare, keep, small_model, tell, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torchtune.training.checkpointing import DistributedCheckpointer


def state_of(model, optimizer, step):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "steps_run": step}


def main():
    warnings.simplefilter("ignore")
    command, *directories = sys.argv[1:]
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    torch.manual_seed(1 if command == "save" else 2)
    model = fully_shard(small_model())
    optimizer = torch.optim.AdamW(model.parameters())
    for directory in map(Path, directories):
        checkpointer = DistributedCheckpointer(str(directory), str(directory / "epochs"), process_group=group)
        if command == "save":
            for epoch, name in enumerate(("async", "sync")):
                tell(*train(model, optimizer, 2))
                checkpointer.save_checkpoint(state_of(model, optimizer, epoch), epoch, save_async=name == "async")
                keep(directory, name, state_of(model, optimizer, epoch))
        else:
            train(model, optimizer, 1)
            for epoch, name in enumerate(("async", "sync")):
                state = state_of(model, optimizer, -1)
                # Without a path the recipe takes the latest.
                path = None if name == "sync" else str(directory / "epochs" / f"dist_epoch_{epoch}")
                loaded = checkpointer.load_checkpoint(state, path)
                set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
                compare(directory, name, state_of(model, optimizer, loaded["steps_run"]))
                torch.manual_seed(3)
                tell(*train(model, optimizer, 2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
