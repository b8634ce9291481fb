"""What the programs beside this file share: a run that is saved or loaded, its state, compared bit for bit, its losses.

It is part of the programs, which know nothing of robust_dcp.
"""

import hashlib
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree


def small_model():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))


def arguments():
    """Of ``PROGRAM.py save NAME DIRECTORY``, or ``load NAME`` and some directories: whether it saves, and the place
    ``NAME`` in each directory."""
    warnings.simplefilter("ignore")
    command, name, *directories = sys.argv[1:]
    return command == "save", [Path(directory, name) for directory in directories]


class Run:
    """A program. A subclass makes ``model`` and ``optimizer``, and has ``save`` and ``load``, which take a path."""

    @classmethod
    def main(cls):
        is_new, paths = arguments()
        torch.manual_seed(1 if is_new else 2)
        run = cls(paths[0].name)
        for path in paths:
            if is_new:
                for _ in range(2):  # twice at one place, as with a checkpoint "last"
                    tell(*run.train(2))
                    run.save(path)
                keep(path, run.state())
            else:
                run.train(1)
                run.load(path)
                compare(path, run.state())
                torch.manual_seed(3)
                tell(*run.train(2))
        if dist.is_initialized():
            dist.destroy_process_group()

    def train(self, steps):
        """Train on random numbers, and give the losses."""
        losses = []
        for _ in range(steps):
            losses.append(self.loss())
            self.backward(losses[-1])
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def loss(self):
        return self.model(torch.randn(4, 8)).square().mean()

    def backward(self, loss):
        loss.backward()

    def state(self):
        return [self.model.state_dict(), self.optimizer.state_dict()]


def keep(path, state):
    """Write this rank's part of a state beside the place of the checkpoints."""
    torch.save(_leaves(state), _file(path))


def compare(path, state):
    """Raise unless the state is the one that was kept, bit for bit; say so on rank 0."""
    kept, now = torch.load(_file(path)), _leaves(state)
    assert kept.keys() == now.keys(), sorted(kept.keys() ^ now.keys())
    assert kept, "there is nothing to compare"
    for key, value in kept.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == now[key].dtype and torch.equal(value, now[key]), key
        else:
            assert value == now[key], (key, value, now[key])
    if os.environ["RANK"] == "0":
        print(f"equal: {path.name} ", flush=True)  # a line of another rank may follow before this one ends


def digest(state):
    """A hash of this rank's part of a state, bit for bit."""
    found = hashlib.sha256()
    for key, value in sorted(_leaves(state).items()):
        found.update(key.encode())
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}".encode())
            found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()


def tell(*losses):
    """Print losses on rank 0, with all of the digits that a float32 has."""
    if os.environ["RANK"] == "0":
        for loss in losses:
            print(f"loss: {float(loss):.9g} ", flush=True)


def _file(path):
    (path.parent / "kept").mkdir(parents=True, exist_ok=True)
    return path.parent / "kept" / f"{path.name}.{os.environ['RANK']}.pt"


def _leaves(state):
    leaves = {}
    for path, value in _pytree.tree_flatten_with_path(state)[0]:
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().clone()
        leaves[_pytree.keystr(path)] = value
    return leaves
