"""Checkpoints of all kinds that tests copy, and what is found of them afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import CopyOptions, RobustWriter

StateDict = dict[str, Any]

ONE_THREAD = CopyOptions(threads=1, retries=1)


def state_dict(value: float = 1.0, rank: int = 0) -> StateDict:
    return {"weight": torch.full((100_000,), value), f"of_{rank}": torch.full((7,), value), "step": torch.tensor(value)}


def save(path: Any, value: float = 1.0) -> Path:
    robust_dcp.save(state_dict(value), checkpoint_id=path)
    return Path(path)


def loaded(place: Any, rank: int = 0) -> float:
    found = state_dict(-1.0, rank)
    robust_dcp.load(found, checkpoint_id=place)
    (value,) = {float(each) for tensor in found.values() for each in tensor.unique()}
    return value


def files_of(path: Path) -> set[str]:
    return {str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()}


def _save_like_megatron(path: Path) -> None:
    dcp.save(state_dict(), checkpoint_id=path, no_dist=True)
    torch.save({"iteration": 7}, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (path / "note").write_text("of 8 B\n")
    (path / "empty").touch()
    save(path / "modelopt_state")


KINDS: dict[str, Callable[[Path], object]] = {
    "ours": save,
    "safetensors": lambda path: robust_dcp.save(state_dict(), storage_writer=RobustWriter(path, layout="safetensors")),
    "stock": lambda path: dcp.save(state_dict(), checkpoint_id=path, no_dist=True),
    "Megatron": _save_like_megatron,
}
