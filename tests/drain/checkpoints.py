"""Checkpoints of all kinds that tests copy, and what is found of them afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import CopyOptions, RobustWriter

__all__ = [
    "IMPATIENT",
    "ONE_THREAD",
    "files_of",
    "loaded",
    "save_like_megatron",
    "save_ours",
    "save_shards",
    "save_stock",
    "state_dict",
]

StateDict = dict[str, Any]

ONE_THREAD = CopyOptions(threads=1)
IMPATIENT = CopyOptions(retries=1)


def state_dict(value: float = 1.0) -> StateDict:
    return {"weight": torch.full((100_000,), value), "bias": torch.full((7,), value), "step": torch.tensor(value)}


def loaded(place: Any) -> float:
    found = state_dict(-1.0)
    robust_dcp.load(found, checkpoint_id=place)
    values = {float(each) for tensor in found.values() for each in tensor.unique()}
    assert len(values) == 1
    return values.pop()


def files_of(path: Path) -> set[str]:
    return {str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()}


def save_ours(path: str) -> None:
    robust_dcp.save(state_dict(), checkpoint_id=path)


def save_shards(path: str) -> None:
    robust_dcp.save(state_dict(), storage_writer=RobustWriter(path, layout="safetensors"))


def save_stock(path: str) -> None:
    dcp.save(state_dict(), checkpoint_id=path, no_dist=True)


def save_like_megatron(path: str) -> None:
    save_stock(path)
    torch.save({"iteration": 7}, f"{path}/common.pt")
    Path(path, "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    robust_dcp.save(state_dict(), checkpoint_id=f"{path}/modelopt_state")
