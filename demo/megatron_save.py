"""A job on 4 ranks: it trains a Megatron-Core MoE model, and saves three times with robust_dcp and with stock Megatron.

The stock strategy has ``cached_metadata=True`` (``--ckpt-assume-constant-structure``), because its repeated saves are
slow without that.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import megatron.core
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from demo import megatron_cpu
from demo.evidence import of_save, write_evidence
from demo.megatron_model import SAVED_LAYOUT, Trainer
from demo.megatron_truth import gather_truth
from demo.truth import write_truth
from robust_dcp.megatron import RobustSaveStrategy


def main(work: Path) -> None:
    """Train, save, and leave truth, checkpoints and evidence in ``work``."""
    megatron_cpu.install()
    trainer = Trainer(SAVED_LAYOUT, seed=1)
    data_parallel_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    robust = RobustSaveStrategy()
    wrapped = FullyParallelSaveStrategyWrapper(robust, data_parallel_group)
    stock = FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True), data_parallel_group
    )
    saves: list[Any] = []
    for number in (1, 2, 3):
        trainer.train()
        write_truth(gather_truth(_state_dict(trainer, number)), work / "megatron_truth" / f"{number}.pt")
        seconds = _save(_state_dict(trainer, number), work / "megatron_robust" / str(number), wrapped)
        stock_seconds = _save(_state_dict(trainer, number), work / "megatron_stock" / str(number), stock)
        if robust.last_report is None:
            raise RuntimeError("the strategy made no report")
        saves.append(of_save(robust.last_report, seconds, stock_seconds))
    evidence = {"saves": saves, "layout": str(SAVED_LAYOUT), "megatron": megatron.core.__version__}
    write_evidence(work, "megatron_save", evidence)


def _state_dict(trainer: Trainer, number: int) -> dict[str, Any]:
    """The state dict to save. In the third save the rerun state machine adds its object (Megatron-LM #4378)."""
    state_dict = trainer.sharded_state_dict()
    state_dict["rng_state"] = trainer.rng_state()
    if number == 3:
        state_dict["rerun_state_machine"] = trainer.rerun_state()
    return state_dict


def _save(state_dict: dict[str, Any], directory: Path, strategy: Any) -> float:
    """Save as Megatron training does. Returns the wall time in seconds."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()
    begin = time.perf_counter()
    dist_checkpointing.save(state_dict, str(directory), strategy)
    return time.perf_counter() - begin
