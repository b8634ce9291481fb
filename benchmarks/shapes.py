"""The state dicts to save. Each is what one GPU of a real training job holds, reduced to a number of bytes.

There are fewer layers, but single tensors keep their real sizes if the number of bytes allows it. Most shapes have no
process group and only a rank's local tensors, because the benchmark measures the way from a rank to its drive.
``fsdp2`` is the state of real ranks after real training: ``fully_shard``, autograd, Adam and the C library's allocator
decide on placements, padding and the addresses of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

__all__ = ["SHAPES", "StateDict", "leaves", "nbytes_of", "ranks_of", "state_dict_of"]

StateDict = dict[str, Any]
"""Tensors by name. ``fsdp2`` has nested dicts and objects too."""

_POOL_NBYTES = (32 << 20) + 4099
"""This is not a multiple of a block, so no two blocks of a checkpoint are equal. A device or file system could
deduplicate equal ones."""
_GPUS = 8


class _Spec(NamedTuple):
    name: str
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


def _with_adam(name: str, sizes: tuple[int, ...], dtype: torch.dtype) -> Iterator[_Spec]:
    yield _Spec(f"model.{name}", sizes, dtype)
    yield _Spec(f"optimizer.{name}.exp_avg", sizes)
    yield _Spec(f"optimizer.{name}.exp_avg_sq", sizes)


def _large(nbytes: int) -> list[_Spec]:
    """Llama 3 8B with Adam in float32, each tensor cut over 8 GPUs along its rows."""
    rows = {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024, "o_proj": 4096}
    rows |= {"gate_proj": 14336, "up_proj": 14336, "down_proj": 14336}

    def layer(number: int) -> list[_Spec]:
        return [
            spec
            for name, count in rows.items()
            for spec in _with_adam(f"layers.{number}.{name}.weight", (count // _GPUS, 4096), torch.float32)
        ]

    embedding = list(_with_adam("embed_tokens.weight", (128256 // _GPUS, 4096), torch.float32))
    return _cut_down(embedding, layer, nbytes)


def _small(nbytes: int) -> list[_Spec]:
    """20,000 tensors of 16 KiB."""
    count = max(1, min(20_000, nbytes // _Spec("", (64, 64)).nbytes))
    return [_Spec(f"blocks.{number // 8}.adapters.{number % 8}.weight", (64, 64)) for number in range(count)]


def _moe(nbytes: int) -> list[_Spec]:
    """Qwen3 30B-A3B: 16 of 128 experts, the rest cut over 8 GPUs; bfloat16 with Adam in float32, norms and steps."""
    hidden, expert = 2048, 768
    weights: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (4096 // _GPUS, hidden),
        "k_proj.weight": (512 // _GPUS, hidden),
        "v_proj.weight": (512 // _GPUS, hidden),
        "o_proj.weight": (hidden // _GPUS, 4096),
        "gate.weight": (128 // _GPUS, hidden),
        "q_norm.weight": (128,),
        "k_norm.weight": (128,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for number in range(128 // _GPUS):
        weights |= {f"experts.{number}.{name}_proj.weight": (expert, hidden) for name in ("gate", "up")}
        weights[f"experts.{number}.down_proj.weight"] = (hidden, expert)

    def layer(number: int) -> list[_Spec]:
        specs: list[_Spec] = []
        for name, sizes in weights.items():
            specs += _with_adam(f"layers.{number}.{name}", sizes, torch.bfloat16)
            specs.append(_Spec(f"optimizer.layers.{number}.{name}.step", ()))
        return specs

    return _cut_down([], layer, nbytes)


def _cut_down(first: list[_Spec], layer: Callable[[int], list[_Spec]], nbytes: int) -> list[_Spec]:
    """Take layers up to about ``nbytes``. If a single layer is too large, take matrices with fewer rows."""
    first_nbytes, layer_nbytes = (sum(spec.nbytes for spec in specs) for specs in (first, layer(0)))
    layers = max(1, round((nbytes - first_nbytes) / layer_nbytes))
    specs = first + [spec for number in range(layers) for spec in layer(number)]
    share = min(1.0, nbytes / sum(spec.nbytes for spec in specs))
    return [
        spec._replace(sizes=(max(1, int(spec.sizes[0] * share)), *spec.sizes[1:])) if len(spec.sizes) > 1 else spec
        for spec in specs
    ]


_FSDP2 = "fsdp2"
_OF_ONE_PROCESS: dict[str, Callable[[int], list[_Spec]]] = {"large": _large, "small": _small, "moe": _moe}
SHAPES = (*_OF_ONE_PROCESS, _FSDP2)
"""The names of all shapes."""


def ranks_of(shape: str) -> int:
    """The number of ranks that save and load a shape together. It is 1 without a process group."""
    return 2 if shape == _FSDP2 else 1


def nbytes_of(shape: str, nbytes: int) -> int:
    """The bytes of the tensors of all ranks, if about ``nbytes`` are requested."""
    if shape == _FSDP2:
        return _Model.nbytes(*_Model.size_for(nbytes))
    return sum(spec.nbytes for spec in _OF_ONE_PROCESS[shape](nbytes))


def state_dict_of(shape: str, nbytes: int) -> StateDict:
    """A state dict of about ``nbytes``. A rank gets the same bytes in every process.

    Args:
        shape: one of ``SHAPES``. If it has several ranks, all ranks of the default group call this together.
    """
    if shape == _FSDP2:
        state_dict = _trained(nbytes)
        # Adam's steps are equal on all ranks, and must stay equal, so they are not filled.
        _fill([tensor for path, tensor in leaves(state_dict).items() if path[-1] != "step"], dist.get_rank())
        return state_dict
    tensors = {spec.name: torch.empty(spec.sizes, dtype=spec.dtype) for spec in _OF_ONE_PROCESS[shape](nbytes)}
    _fill(tensors.values(), 0)
    return tensors


def leaves(state_dict: StateDict) -> dict[tuple[str, ...], torch.Tensor]:
    """All tensors of a nested state dict by path. For a DTensor it is this rank's part."""
    tensors: dict[tuple[str, ...], torch.Tensor] = {}
    for key, value in state_dict.items():
        if isinstance(value, dict):
            tensors |= {(key, *path): tensor for path, tensor in leaves(value).items()}
        elif isinstance(value, torch.Tensor):
            tensors[(key,)] = (value.to_local() if isinstance(value, DTensor) else value).detach()
    return tensors


def _fill(tensors: Iterable[torch.Tensor], rank: int) -> None:
    pool = np.frombuffer(np.random.default_rng(20_000 + rank).bytes(_POOL_NBYTES), np.uint8)
    at = 0
    for tensor in tensors:
        target = tensor.reshape(-1).view(torch.uint8).numpy()
        done = 0
        while done < target.size:
            part = min(target.size - done, pool.size - at)
            target[done : done + part] = pool[at : at + part]
            done += part
            at = (at + part) % pool.size


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv_proj = nn.Linear(width, 2 * width, bias=False)
        self.o_proj = nn.Linear(2 * width, width)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate_proj = nn.Linear(width, width * 11 // 4, bias=False)
        self.up_proj = nn.Linear(width, width * 11 // 4, bias=False)
        self.down_proj = nn.Linear(width * 11 // 4, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.o_proj(self.qkv_proj(self.norm(hidden)))
        normed = self.mlp_norm(hidden)
        result: torch.Tensor = hidden + self.down_proj(
            nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed)
        )
        return result


class _Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        # One more word than a multiple of the ranks: the first rank has one more row, the others a row of padding.
        self.words = 16 * width + 1
        self.embed_tokens = nn.Embedding(self.words, width)
        self.layers = nn.ModuleList(_Block(width) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    @classmethod
    def size_for(cls, nbytes: int) -> tuple[int, int]:
        """The width and the number of layers of the widest model that has room for at least two layers."""
        for width in (1024, 512, 256, 128):
            first, layer = cls.nbytes(width, 0), cls.nbytes(width, 1) - cls.nbytes(width, 0)
            if first + 2 * layer <= nbytes:
                return width, round((nbytes - first) / layer)
        return 64, 1

    @classmethod
    def nbytes(cls, width: int, layers: int) -> int:
        """The bytes of weights, of Adam's two moments, and of the copies of matrices in fp8 and bfloat16."""
        with torch.device("meta"):
            weights = list(cls(width, layers).parameters())
        return sum(weight.numel() * (3 * 4 + (1 + 2 if weight.dim() == 2 else 0)) for weight in weights)


def _trained(nbytes: int) -> StateDict:
    """This rank's state dict after two steps of Adam. All ranks of the default group call it together."""
    torch.manual_seed(20_000)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _Model(*_Model.size_for(nbytes))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randint(model.words, (32,))).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    weights, optimizer_state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": optimizer_state, **_copies(weights)}


@torch.no_grad()
def _copies(weights: dict[str, Any]) -> StateDict:
    """Copies of the matrices: in fp8 for a job that computes in it, and in bfloat16 as views of a flat buffer."""
    matrices = {name: weight for name, weight in weights.items() if weight.dim() == 2}
    flat = torch.cat([weight.to_local().to(torch.bfloat16).flatten() for weight in matrices.values()])
    views = flat.split([weight.to_local().numel() for weight in matrices.values()])

    def sharded(weight: DTensor, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )

    return {
        "fp8": {name: sharded(weight, weight.to_local().to(torch.float8_e4m3fn)) for name, weight in matrices.items()},
        "bf16": {
            name: sharded(weight, view.view_as(weight.to_local()))
            for (name, weight), view in zip(matrices.items(), views, strict=True)
        },
    }
