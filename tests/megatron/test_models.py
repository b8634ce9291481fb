"""Megatron models on CPU: ours and stock load each other's checkpoints, into other layouts, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

from benchmarks.collectives import counted_collectives
from demo import megatron_cpu
from demo.megatron_model import Layout, Trainer
from demo.megatron_truth import compare, gather_truth
from tests.harness.ranks import run_ranks, values
from tests.megatron.torch_dist import chosen, save, stock_strategy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "saved", "other"),
    [
        pytest.param(4, Layout(pipeline=2, expert=2), Layout(tensor=2, expert=2), id="moe"),
        pytest.param(0, Layout(tensor=2, pipeline=2), Layout(pipeline=2), id="dense"),
    ],
)
def test_ours_and_stock_load_each_others_checkpoints_bit_for_bit_into_any_layout(
    tmp_path: Path, experts: int, saved: Layout, other: Layout
) -> None:
    """Ours reuses its plan, and makes no collective of the world. Those with experts are in Megatron's fully parallel
    wrappers."""
    for outcome in values(run_ranks(4, _both_ways, experts, (saved, other), tmp_path)):
        assert outcome["plans"] == ["built", "reused"]
        assert outcome["calls"] == [0, 0]
        assert outcome["found"] == {str(layout): (([], []), ([], [])) for layout in (saved, other)}


def _trainer(layout: Layout, experts: int, *, seed: int) -> Trainer:
    return Trainer(layout, seed=seed, experts=experts, n_layers=2, hidden_size=32)


def _both_ways(experts: int, layouts: tuple[Layout, Layout], directory: Path) -> dict[str, Any]:
    """Save with ours twice and with stock once, from the first layout; load each with the other into all layouts."""
    megatron_cpu.install()
    trainer = _trainer(layouts[0], experts, seed=1)
    ours = TorchDistSaveShardedStrategy("torch_dist", 1)
    plans, calls = [], []
    for number in (1, 2):
        _step(trainer)
        box: list[Any] = [gather_truth(trainer.sharded_state_dict())]
        dist.broadcast_object_list(box, src=0)
        state = trainer.sharded_state_dict()  # the optimizer's own gathers are none of the save's
        with chosen(timeout_seconds=60), counted_collectives() as counts:
            strategy = FullyParallelSaveStrategyWrapper(ours, _group()) if experts else ours
            save(state, directory / f"ours{number}", strategy)
        plans.append(ours.last_report.plan)
        calls.append(sum(counts.values()) - counts["barrier"])
    save(trainer.sharded_state_dict(), directory / "stock", stock_strategy())
    found = {}
    for layout in layouts:
        by_stock = _load_and_compare(_trainer(layout, experts, seed=2), directory / "ours2", box[0], is_parallel=False)
        with chosen(timeout_seconds=60):
            fresh = _trainer(layout, experts, seed=2)
            by_ours = _load_and_compare(fresh, directory / "stock", box[0], is_parallel=experts > 0)
        found[str(layout)] = (by_stock, by_ours)
    return {"plans": plans, "calls": calls, "found": found}


def _load_and_compare(
    fresh: Trainer, directory: Path, truth: dict[str, Any], *, is_parallel: bool
) -> tuple[list[str], list[str]]:
    """Load into a fresh model; what differs, and what was not loaded, on any rank."""
    strategy: Any = TorchDistLoadShardedStrategy()
    if is_parallel:
        strategy = FullyParallelLoadStrategyWrapper(strategy, _group())
    loaded = dist_checkpointing.load(fresh.sharded_state_dict(is_loading=True), str(directory), strategy)
    fresh.model.load_state_dict(loaded.pop("model"))
    comparison = compare(fresh.sharded_state_dict(is_loading=True), loaded, truth).over_all_ranks()
    return comparison["differing"], comparison["not_loaded"]


def _group() -> Any:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _step(trainer: Trainer) -> None:
    """Other weights than before. Megatron trains experts with tensor parallelism only if sequences are parallel too."""
    if trainer.layout.tensor == 1 or trainer.layout.expert == 1:
        trainer.train(n_microbatches=2)
        return
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.5)
