"""The state dict of a rank in a real FSDP2 job: a language model under ``fully_shard`` after steps of Adam, on CPU.

Owns the model and its state dict. ``fully_shard``, autograd, Adam and the C library's allocator decide on placements,
padding and the addresses of tensors. Nothing is placed by hand. Called by ``shapes`` on each rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

__all__ = ["fsdp_nbytes", "fsdp_state"]

_WIDTHS = (1024, 512, 256, 128, 64)
_HEAD_WIDTH = 64
_WORDS_PER_WIDTH = 16
_TOKENS = 32
_STEPS = 2
_ADAM_NBYTES = 4 + 4 + 4
_COPIES_NBYTES = 1 + 2
"""The bytes of two copies of each element of a weight matrix. One is in fp8, for a job that computes in fp8. The other
is in bfloat16, as a view of a flat buffer."""


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.kv_proj = nn.Linear(width, width // 2, bias=False)
        self.o_proj = nn.Linear(width, width)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate_proj = nn.Linear(width, width * 11 // 4, bias=False)
        self.up_proj = nn.Linear(width, width * 11 // 4, bias=False)
        self.down_proj = nn.Linear(width * 11 // 4, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        query = self._heads(self.q_proj(normed))
        key, value = (self._heads(half) for half in self.kv_proj(normed).chunk(2, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + self.o_proj(attended.transpose(0, 1).flatten(1))
        normed = self.mlp_norm(hidden)
        result: torch.Tensor = hidden + self.down_proj(
            nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed)
        )
        return result

    def _heads(self, hidden: torch.Tensor) -> torch.Tensor:
        head_width = min(_HEAD_WIDTH, self.kv_proj.out_features // 2)
        return hidden.unflatten(-1, (-1, head_width)).transpose(0, 1)


class _Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        # This is one word more than a multiple of the ranks. So the first rank holds one more row, and the others a
        # row of padding.
        self.words = _WORDS_PER_WIDTH * width + 1
        self.embed_tokens = nn.Embedding(self.words, width)
        self.layers = nn.ModuleList(_Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        result: torch.Tensor = self.norm(hidden)
        return result


def fsdp_nbytes(nbytes: int) -> int:
    """The bytes of the tensors of all ranks together, if about ``nbytes`` are requested."""
    return _nbytes_of(*_size_for(nbytes))


def fsdp_state(nbytes: int) -> dict[str, Any]:
    """This rank's state dict after some steps of training. All ranks of the default group call it together."""
    torch.manual_seed(20_000)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _Model(*_size_for(nbytes))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        tokens = torch.randint(model.words, (_TOKENS,))
        model(tokens).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, **_copies(model_state)}


@torch.no_grad()
def _copies(weights: dict[str, DTensor]) -> dict[str, dict[str, DTensor]]:
    matrices = {name: weight for name, weight in weights.items() if weight.dim() == 2}
    flat = torch.cat([weight.to_local().to(torch.bfloat16).flatten() for weight in matrices.values()])
    views = flat.split([weight.to_local().numel() for weight in matrices.values()])
    return {
        "fp8": {
            name: _sharded_as(weight, weight.to_local().to(torch.float8_e4m3fn)) for name, weight in matrices.items()
        },
        "bf16": {
            name: _sharded_as(weight, view.view_as(weight.to_local()))
            for (name, weight), view in zip(matrices.items(), views, strict=True)
        },
    }


def _sharded_as(weight: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _size_for(nbytes: int) -> tuple[int, int]:
    """The width and the number of layers of the widest model that has room for at least two layers."""
    for width in _WIDTHS:
        first, layer = _nbytes_of(width, 0), _nbytes_of(width, 1) - _nbytes_of(width, 0)
        if first + 2 * layer <= nbytes:
            return width, round((nbytes - first) / layer)
    return _WIDTHS[-1], 1


def _nbytes_of(width: int, layers: int) -> int:
    with torch.device("meta"):
        weights = list(_Model(width, layers).parameters())
    return sum(weight.numel() * (_ADAM_NBYTES + (_COPIES_NBYTES if weight.dim() == 2 else 0)) for weight in weights)
