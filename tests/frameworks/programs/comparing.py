"""What the programs beside this file share: the state of a run, kept and compared bit for bit, and the losses.

It is part of the programs, which know nothing of robust_dcp.
"""

import hashlib
import os
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree


def small_model():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))


def train(model, optimizer, steps, backward=torch.Tensor.backward, then=lambda: None):
    """Train on random numbers, and give the losses."""
    losses = []
    for _ in range(steps):
        losses.append(model(torch.randn(4, 8)).square().mean())
        backward(losses[-1])
        optimizer.step()
        then()
        optimizer.zero_grad()
    return losses


def keep(directory, name, state):
    """Write this rank's part of a state beside the checkpoints."""
    torch.save(_leaves(state), _file(directory, name))


def compare(directory, name, state):
    """Raise unless the state is the one that was kept, bit for bit; say so on rank 0."""
    kept, now = torch.load(_file(directory, name)), _leaves(state)
    assert kept.keys() == now.keys(), sorted(kept.keys() ^ now.keys())
    assert kept, "there is nothing to compare"
    for key, value in kept.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == now[key].dtype and torch.equal(value, now[key]), key
        else:
            assert value == now[key], (key, value, now[key])
    if os.environ["RANK"] == "0":
        print(f"equal: {name}", flush=True)


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
            print(f"loss: {float(loss):.9g}", flush=True)


def _file(directory, name):
    folder = Path(directory) / "kept"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.{os.environ['RANK']}.pt"


def _leaves(state):
    leaves = {}
    for path, value in _pytree.tree_flatten_with_path(state)[0]:
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().clone()
        leaves[_pytree.keystr(path)] = value
    return leaves
