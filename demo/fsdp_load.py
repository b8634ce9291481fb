"""A job in new processes without robust_dcp: stock DCP loads the FSDP2 checkpoints into the same and other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from demo.evidence import write_evidence
from demo.fsdp_model import Trainer, global_values
from demo.truth import Comparison, Truth, read_truth


def main(work: Path) -> None:
    """On 4 ranks, load into the mesh that saved and into 2 x 2 (replicated, sharded). On 2 ranks, shard over both."""
    world_size = dist.get_world_size()
    shapes = [(world_size,), (2, world_size // 2)] if world_size > 2 else [(world_size,)]
    loads = []
    for shape in shapes:
        names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for number in (1, 2, 3, 4) if shape == (4,) else (3, 4):
            truth = read_truth(work / "fsdp_truth" / f"{number}.pt")
            comparison = _load_and_compare(mesh, work / "fsdp_robust" / str(number), truth)
            layout = " x ".join(map(str, shape)) + " ranks"
            loads.append({"save": number, "layout": layout, **comparison.over_all_ranks()})
    evidence: dict[str, Any] = {"loads": loads}
    if world_size > 2 and dist.get_rank() == 0:
        truth = read_truth(work / "fsdp_truth" / "4.pt")
        evidence["loss_weights"] = {
            "saved": truth["loss_weights"].tolist(),
            "robust": _as_the_converter_reads_it(work / "fsdp_robust" / "4", work),
            "stock": _as_the_converter_reads_it(work / "fsdp_stock" / "4", work),
        }
    write_evidence(work, "fsdp_load", evidence)


def _load_and_compare(mesh: DeviceMesh, checkpoint: Path, truth: Truth) -> Comparison:
    trainer = Trainer(mesh, seed=2)
    state_dict = trainer.state_dict()
    state_dict["loss_weights"] = torch.empty_like(truth["loss_weights"])
    if any(key.startswith("ema.") for key in truth):
        state_dict["ema"] = {name: torch.zeros_like(weight) for name, weight in state_dict["model"].items()}
    dcp.load(state_dict, checkpoint_id=checkpoint)
    trainer.load_state_dict(state_dict)
    in_use = {**state_dict, **trainer.state_dict()}
    comparison = Comparison(truth)
    for key, value in global_values(in_use).items():
        comparison.compare(key, value)
    return comparison


def _as_the_converter_reads_it(checkpoint: Path, work: Path) -> list[float]:
    """Read ``loss_weights`` by torch's own ``dcp_to_torch_save``, which allocates the tensors of ``.metadata``."""
    converted = work / "converted.pt"
    dcp_to_torch_save(checkpoint, converted)
    values: list[float] = torch.load(converted, weights_only=True)["loss_weights"].tolist()
    return values
