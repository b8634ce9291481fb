"""Turns a state dict into plain values that can be compared. For every tensor these are its bytes.

Owns the comparison of what was saved with what was loaded. It never uses ``==`` on tensors, because there NaN differs
from itself, and 0.0 equals -0.0.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

import robust_dcp

__all__ = ["blank", "differences", "fingerprint", "raw_bytes", "wrongly_loaded"]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a plain tensor's elements in row-major order."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    if tensor.numel() == 0:
        return b""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def fingerprint(value: Any, path: str = "") -> dict[str, Any]:
    """The plain values of everything within ``value``, by path."""
    if isinstance(value, Stateful) and not isinstance(value, torch.Tensor):
        return fingerprint(value.state_dict(), path)
    if isinstance(value, Mapping):
        items = [(f"{path}/{key!r}", each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"{path}/{place}", each) for place, each in enumerate(value)]
    elif isinstance(value, ShardedTensor):
        shards = {tuple(s.metadata.shard_offsets): _of_tensor(s.tensor) for s in value.local_shards()}
        return {path: ("ShardedTensor", tuple(value.size()), shards)}
    elif isinstance(value, DTensor):
        placements = tuple(str(placement) for placement in value.placements)
        return {path: ("DTensor", tuple(value.shape), placements, _of_tensor(value.to_local()))}
    elif isinstance(value, torch.Tensor):
        return {path: _of_tensor(value)}
    else:
        return {path: (type(value).__name__, repr(value))}
    return {key: found for place, each in items for key, found in fingerprint(each, place).items()}


def differences(expected: Any, found: Any) -> list[str]:
    """List the differences between ``expected`` and ``found``, in words. The list is empty if they are the same."""
    left, right = fingerprint(expected), fingerprint(found)
    return [
        f"{key}: expected {left.get(key, 'nothing')!s:.200}, found {right.get(key, 'nothing')!s:.200}"
        for key in sorted({*left, *right})
        if left.get(key) != right.get(key)
    ]


def blank(value: Any) -> Any:
    """The same structure with other contents: what is saved as ``value`` can be loaded into it."""
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else f"not {value}"


def wrongly_loaded(expected: dict[str, Any], path: str | os.PathLike[str], **options: Any) -> list[str]:
    """What robust_dcp's or stock's load finds otherwise in a checkpoint than it is expected, in words."""
    found: list[str] = []
    for load in (robust_dcp.load, dcp.load):
        target = blank(expected)
        load(target, checkpoint_id=os.fspath(path), **options)
        found += differences(expected, target)
    return found


def _of_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    shape = tuple(tensor.shape)
    if not tensor.is_quantized:
        return str(tensor.dtype), shape, hashlib.blake2b(raw_bytes(tensor), digest_size=12).hexdigest()
    if tensor.qscheme() == torch.per_tensor_affine:
        scheme: tuple[Any, ...] = ("per tensor", tensor.q_scale(), tensor.q_zero_point())
    else:
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        scheme = ("per channel", tensor.q_per_channel_axis(), raw_bytes(scales), raw_bytes(zeros))
    return str(tensor.dtype), shape, raw_bytes(tensor.int_repr()), *scheme
