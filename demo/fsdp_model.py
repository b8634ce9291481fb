"""A small language model under FSDP2 (``fully_shard``), trained on random tokens with AdamW, on CPU.

Owns the model, its training step and its state dict. It saves and loads nothing. Used by the demo's FSDP2 jobs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

__all__ = ["Trainer", "global_values"]

_VOCABULARY = 256


class _LanguageModel(nn.Module):
    def __init__(self, width: int, n_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(n_layers)
        )
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


class Trainer:
    """The model, sharded over ``mesh`` (two dimensions: replicated over the first), and its optimizer."""

    def __init__(self, mesh: DeviceMesh, *, seed: int, width: int = 256, n_layers: int = 4) -> None:
        torch.manual_seed(seed)
        self.model = _LanguageModel(width, n_layers)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._generator = torch.Generator().manual_seed(seed + dist.get_rank())
        self.iteration = 0

    def train(self) -> None:
        """Do one training step on eight windows of tokens that only this rank draws."""
        tokens = torch.randint(_VOCABULARY, (8, 65), generator=self._generator)
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.iteration += 1

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer by FQN, as ``get_state_dict`` gives them, and the iteration."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "iteration": self.iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.iteration = state_dict["iteration"]


def global_values(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The whole tensor, or the object, by FQN. It gathers DTensors, so all ranks call it together."""
    values, _ = flatten_state_dict(state_dict)
    for name, value in values.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        values[name] = whole.detach().clone() if isinstance(whole, torch.Tensor) else whole
    return values
