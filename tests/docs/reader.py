"""What a reader of a page has at hand: a model on two ranks, its optimizer, a state dict, a directory.

Owns the names that blocks use without making them. Called on each rank before the first block of a page runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

__all__ = ["names_at_hand"]


class DataLoader:
    """An object with a state dict of its own, as data loaders have."""

    def __init__(self) -> None:
        self.position = 17

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Words(torch.nn.Module):
    """A model whose output has a loss, as many libraries' models have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()


def names_at_hand() -> dict[str, Any]:
    """The namespace of a page, on each of its ranks."""
    torch.manual_seed(0)
    batch = torch.randn(4, 8)
    model = fully_shard(Words(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch).backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state_dict = {"model": model_state, "optimizer": optimizer_state}
    dcp.save(state_dict, checkpoint_id="checkpoints/stock")  # what a page loads without having saved it
    return {
        "__name__": "__main__",
        "torch": torch,
        "batch": batch,
        "model": model,
        "optimizer": optimizer,
        "data_loader": DataLoader(),
        "state_dict": state_dict,
        "path": "checkpoints/latest",
    }
