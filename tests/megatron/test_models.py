"""Megatron models on CPU, saved by RobustSaveStrategy and loaded by stock Megatron-Core, into other layouts too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from demo import megatron_cpu
from demo.megatron_model import Layout, Trainer
from demo.megatron_truth import compare, gather_truth
from robust_dcp.megatron import RobustSaveStrategy
from tests.support.ranks import run_ranks, values


def _trainer(layout: Layout, *, seed: int, experts: int) -> Trainer:
    return Trainer(layout, seed=seed, experts=experts, n_layers=2, hidden_size=32)


def _shared_truth(sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
    box = [gather_truth(sharded_state_dict)]
    dist.broadcast_object_list(box, src=0)
    if box[0] is None:
        raise AssertionError("rank 0 gathered nothing")
    return box[0]


def _make(directory: Path) -> str:
    if dist.get_rank() == 0:
        directory.mkdir()
    dist.barrier()
    return str(directory)


def _save_and_load_elsewhere(
    directory: Path, saved: Layout, others: list[Layout], experts: int, fully_parallel: bool
) -> dict[str, Any]:
    """Save twice from ``saved``; load the second with stock Megatron into ``saved`` and ``others``."""
    megatron_cpu.install()
    trainer = _trainer(saved, seed=1, experts=experts)
    inner = RobustSaveStrategy(timeout_seconds=60)
    strategy: Any = inner
    if fully_parallel:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(inner, group)
    plans: list[str | None] = []
    truth: dict[str, Any] = {}
    for number in (1, 2):
        trainer.train(n_microbatches=2)
        truth = _shared_truth(trainer.sharded_state_dict())
        dist_checkpointing.save(trainer.sharded_state_dict(), _make(directory / str(number)), strategy)
        plans.append(inner.last_report.plan if inner.last_report else None)
    found = {}
    for layout in (saved, *others):
        fresh = _trainer(layout, seed=2, experts=experts)
        loaded = dist_checkpointing.load(fresh.sharded_state_dict(is_loading=True), str(directory / "2"))
        iteration = loaded["iteration"]
        fresh.model.load_state_dict(loaded.pop("model"))
        comparison = compare(fresh.sharded_state_dict(is_loading=True), loaded, truth).over_all_ranks(truth)
        found[str(layout)] = (comparison["differing"], comparison["not_loaded"], iteration - trainer.iteration)
    return {"plans": plans, "found": found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "others", "experts", "fully_parallel"),
    [
        pytest.param(Layout(pipeline=2, expert=2), [Layout(tensor=2, expert=2)], 4, True, id="moe-fully-parallel"),
        pytest.param(Layout(tensor=2, pipeline=2), [Layout(), Layout(pipeline=2)], 0, False, id="dense"),
    ],
)
def test_stock_megatron_loads_what_we_saved_bit_for_bit_into_any_layout(
    tmp_path: Path, saved: Layout, others: list[Layout], experts: int, fully_parallel: bool
) -> None:
    outcomes = run_ranks(
        4, _save_and_load_elsewhere, tmp_path, saved, others, experts, fully_parallel, timeout_seconds=120
    )
    for outcome in values(outcomes):
        assert outcome["plans"] == ["built", "reused"]
        assert outcome["found"] == {str(layout): ([], [], 0) for layout in (saved, *others)}
