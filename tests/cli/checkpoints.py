"""One checkpoint of each kind that commands read."""

from __future__ import annotations

import collections
import inspect
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp.storage.metadata.metadata_file import decode_metadata

OURS = ("ours", "safetensors")
KINDS = (*OURS, "stock", "megatron")


def make_all(root: str) -> None:
    """Make a checkpoint of each kind below ``root``, on one rank."""
    state_dict = _state_dict()
    robust_dcp.save(state_dict, checkpoint_id=f"{root}/ours")
    writer = robust_dcp.RobustWriter(f"{root}/safetensors", options=robust_dcp.WriteOptions(layout="safetensors"))
    robust_dcp.save(state_dict, storage_writer=writer)
    dcp.save(state_dict, checkpoint_id=f"{root}/stock")
    if "use_collectives" in inspect.signature(dcp.save).parameters:  # not before torch 2.8
        dcp.save(state_dict, checkpoint_id=f"{root}/by_ranks", use_collectives=False)
        more = f"{root}/by_ranks/__1"  # as a second rank would have saved the same for itself
        shutil.copy(f"{root}/by_ranks/__0_0.distcp", f"{more}_0.distcp")
        metadata = decode_metadata(Path(f"{root}/by_ranks/__0.metadata").read_bytes(), "")
        for info in metadata.storage_data.values():
            info.relative_path = "__1_0.distcp"
        with open(f"{more}.metadata", "wb") as file:
            pickle.dump(metadata, file)
    _make_megatron(Path(root) / "megatron")


def _state_dict() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "model": {
            "weight": torch.rand(7, 5, generator=generator),
            "half": torch.rand(4, 3, generator=generator).to(torch.bfloat16),
            "scalar": torch.tensor(3),
            "empty": torch.empty(0, 3),
            "complex": torch.rand(3, generator=generator).to(torch.complex128),
            "large": torch.rand(400, 400, generator=generator) + 1,
        },
        "step": 17,
        "extra": collections.deque([1.5, "x"]),
        "evil\x1b]0;title\x07[red]\n\tname": torch.ones(2),
    }


def _make_megatron(path: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    from demo import megatron_cpu
    from tests.megatron.torch_dist import stock_strategy

    megatron_cpu.install()
    path.mkdir()
    weight = torch.rand(64, 16) + 1
    state = {
        "weight": ShardedTensor.from_rank_offsets("decoder.weight", weight),
        "rng": ShardedObject("rng_state", [1, 2], (1,), (0,)),
        "args": {"hidden": 16},
    }
    dist_checkpointing.save(state, str(path), stock_strategy())
