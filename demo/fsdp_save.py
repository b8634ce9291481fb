"""A job on 4 ranks: it trains FSDP2, and saves four times with robust_dcp, and with stock DCP and its plan cache.

At the third save an average of the weights appears. At the fourth save a tensor changes from int64 to float32. Stock
compares plans without looking at dtypes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import robust_dcp
from demo.evidence import of_save, write_evidence
from demo.fsdp_model import Trainer, global_values
from demo.truth import write_truth

_EMA_SINCE = 3
_WEIGHTED_SINCE = 4


def main(work: Path) -> None:
    """Train, save, and leave truth, checkpoints and evidence in ``work``."""
    trainer = Trainer(init_device_mesh("cpu", (dist.get_world_size(),)), seed=1)
    saves: list[Any] = []
    for number in (1, 2, 3, 4):
        trainer.train()
        state_dict = _state_dict(trainer, number)
        truth = global_values(state_dict)
        write_truth(truth if dist.get_rank() == 0 else None, work / "fsdp_truth" / f"{number}.pt")

        begin = time.perf_counter()
        report = robust_dcp.save(
            state_dict, checkpoint_id=work / "fsdp_robust" / str(number), planner=robust_dcp.RobustPlanner()
        )
        seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        dcp.save(
            state_dict,
            checkpoint_id=work / "fsdp_stock" / str(number),
            planner=dcp.DefaultSavePlanner(enable_plan_caching=True),
        )
        stock_seconds = time.perf_counter() - begin
        saves.append(of_save(report, seconds, stock_seconds))
    write_evidence(work, "fsdp_save", {"saves": saves, "torch": torch.__version__})


def _state_dict(trainer: Trainer, number: int) -> dict[str, Any]:
    state_dict = trainer.state_dict()
    state_dict["loss_weights"] = torch.tensor([1, 1, 1] if number < _WEIGHTED_SINCE else [0.5, 1.5, 2.5])
    if number >= _EMA_SINCE:
        state_dict["ema"] = {name: 0.5 * weight for name, weight in state_dict["model"].items()}
    return state_dict
