"""The state dicts to save. Each is what one GPU of a real training job holds, reduced to a number of bytes.

There are fewer layers, but single tensors keep their real sizes if the number of bytes allows it. Most shapes have no
process group and only a rank's local tensors, because the benchmark measures the way from a rank to its drive.
``fsdp2`` is the state of real ranks after real training, with the memory layout that training leaves (``fsdp_state``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.drive.fsdp_state import fsdp_nbytes, fsdp_state

__all__ = ["FSDP2", "SHAPES", "SHAPE_NAMES", "StateDict", "leaves", "nbytes_of", "ranks_of", "state_dict_of"]

StateDict = dict[str, Any]
"""Tensors by name. ``fsdp2`` has nested dicts and objects too."""

_MANY = 20_000
_RANKS = 8
_POOL_NBYTES = (32 << 20) + 4099
"""This is not a multiple of a block, so no two blocks of a checkpoint are equal. A device or file system could
deduplicate equal ones."""


class _Spec(NamedTuple):
    name: str
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


def _with_adam(name: str, sizes: tuple[int, ...], dtype: torch.dtype) -> Iterator[_Spec]:
    yield _Spec(f"model.{name}", sizes, dtype)
    yield _Spec(f"optimizer.{name}.exp_avg", sizes, torch.float32)
    yield _Spec(f"optimizer.{name}.exp_avg_sq", sizes, torch.float32)


def _large(nbytes: int) -> list[_Spec]:
    """Llama 3 8B with Adam in float32, each tensor cut over 8 GPUs along its rows."""
    hidden = 4096
    rows = {
        "self_attn.q_proj": 4096,
        "self_attn.k_proj": 1024,
        "self_attn.v_proj": 1024,
        "self_attn.o_proj": 4096,
        "mlp.gate_proj": 14336,
        "mlp.up_proj": 14336,
        "mlp.down_proj": 14336,
    }

    def layer(number: int) -> list[_Spec]:
        return [
            spec
            for name, count in rows.items()
            for spec in _with_adam(f"layers.{number}.{name}.weight", (count // _RANKS, hidden), torch.float32)
        ]

    embedding = list(_with_adam("embed_tokens.weight", (128256 // _RANKS, hidden), torch.float32))
    return _cut_down(embedding, layer, nbytes)


def _many_small(nbytes: int) -> list[_Spec]:
    """20,000 tensors of 16 KiB."""
    spec = _Spec("", (64, 64), torch.float32)
    return [
        spec._replace(name=f"blocks.{number // 8}.adapters.{number % 8}.weight")
        for number in range(max(1, min(_MANY, nbytes // spec.nbytes)))
    ]


def _mixed_moe(nbytes: int) -> list[_Spec]:
    """Qwen3 30B-A3B: 16 of 128 experts, the rest cut over 8 GPUs; bfloat16 with Adam in float32, norms and steps."""
    hidden, expert = 2048, 768
    dense = {
        "self_attn.q_proj.weight": (4096 // _RANKS, hidden),
        "self_attn.k_proj.weight": (512 // _RANKS, hidden),
        "self_attn.v_proj.weight": (512 // _RANKS, hidden),
        "self_attn.o_proj.weight": (hidden // _RANKS, 4096),
        "mlp.gate.weight": (128 // _RANKS, hidden),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    experts = {
        f"mlp.experts.{number}.{name}.weight": sizes
        for number in range(128 // _RANKS)
        for name, sizes in (
            ("gate_proj", (expert, hidden)),
            ("up_proj", (expert, hidden)),
            ("down_proj", (hidden, expert)),
        )
    }

    def layer(number: int) -> list[_Spec]:
        specs: list[_Spec] = []
        for name, sizes in (dense | experts).items():
            specs += _with_adam(f"layers.{number}.{name}", sizes, torch.bfloat16)
            specs.append(_Spec(f"optimizer.layers.{number}.{name}.step", (), torch.float32))
        return specs

    return _cut_down([], layer, nbytes)


SHAPES: dict[str, Callable[[int], list[_Spec]]] = {"large": _large, "small": _many_small, "moe": _mixed_moe}
"""The shapes of one process without a group, by name. Each function takes a number of bytes."""

FSDP2 = "fsdp2"
_FSDP2_RANKS = 2

SHAPE_NAMES = (*SHAPES, FSDP2)


def ranks_of(shape: str) -> int:
    """The number of ranks that save and load a shape together. It is 1 without a process group."""
    return _FSDP2_RANKS if shape == FSDP2 else 1


def nbytes_of(shape: str, nbytes: int) -> int:
    """The bytes of the tensors of all ranks, if about ``nbytes`` are requested."""
    return fsdp_nbytes(nbytes) if shape == FSDP2 else sum(spec.nbytes for spec in SHAPES[shape](nbytes))


def leaves(state_dict: StateDict) -> dict[tuple[str, ...], torch.Tensor]:
    """All tensors of a nested state dict by path. For a DTensor it is this rank's part."""
    found: dict[tuple[str, ...], torch.Tensor] = {}
    for key, value in state_dict.items():
        if isinstance(value, dict):
            found |= {(key, *path): tensor for path, tensor in leaves(value).items()}
        elif isinstance(value, torch.Tensor):
            found[(key,)] = value.detach().to_local() if isinstance(value, DTensor) else value
    return found


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


def state_dict_of(shape: str, nbytes: int) -> StateDict:
    """A state dict of about ``nbytes``. A rank gets the same bytes in every process.

    Args:
        shape: one of ``SHAPE_NAMES``. If it has several ranks, all ranks of the default group call this together.
    """
    if shape == FSDP2:
        state_dict = fsdp_state(nbytes)
        # Adam's steps are equal on all ranks, and must stay equal, so they are not filled.
        _fill([tensor for path, tensor in leaves(state_dict).items() if path[-1] != "step"], dist.get_rank())
        return state_dict
    tensors = {spec.name: torch.empty(spec.sizes, dtype=spec.dtype) for spec in SHAPES[shape](nbytes)}
    _fill(tensors.values(), 0)
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
