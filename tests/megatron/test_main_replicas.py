"""Replicas that hold other contents on each rank: robust_dcp saves the very copy that stock Megatron saves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from demo import megatron_cpu
from tests.harness.ranks import run_ranks, values
from tests.megatron.stock import stock_strategy
from tests.megatron.torch_dist import chosen, save

_RANKS = 4
_LAYOUTS = (((2, 1, 2), ("alone", "dp")), ((1, 2, 2), ("stage", "world")), ((1, 1, 4), ("dp",)))
"""Tensor, pipeline and data parallel sizes, and the groups of Megatron's wrapper."""


class _Place:
    """Where this rank stands: tensor parallel ranks next to each other, then data parallel ones, as in Megatron."""

    def __init__(self, tp: int, pp: int, dp: int) -> None:
        self.tp_size, self.pp_size, self.dp_size = tp, pp, dp
        rank = dist.get_rank()
        self.tp, self.dp, self.pp = rank % tp, rank // tp % dp, rank // (tp * dp)
        self.dp_group = self._group(lambda other: (other % tp, other // (tp * dp)))
        self.stage_group = self._group(lambda other: other // (tp * dp))

    def _group(self, family: Any) -> Any:
        mine = None
        for which in sorted({family(rank) for rank in range(_RANKS)}, key=str):
            ranks = [rank for rank in range(_RANKS) if family(rank) == which]
            group = dist.new_group(ranks)
            mine = group if dist.get_rank() in ranks else mine
        return mine


def _state(place: _Place, *, is_template: bool = False) -> dict[str, Any]:
    """Every tensor and object holds another content on each rank; no two tensors of a rank are alike."""
    state: dict[str, Any] = {}
    draw = random.Random(7)  # the same on all ranks

    def data(*shape: int) -> torch.Tensor:
        number = len(state) + 1
        return torch.full(shape, 0.0 if is_template else 1000.0 * dist.get_rank() + number)

    def add(key: str, tensor: torch.Tensor, *cuts: tuple[int, int, int], **options: Any) -> None:
        state[key] = ShardedTensor.from_rank_offsets(key, tensor, *cuts, **options)

    tp, dp, pp = place.tp, place.dp, place.pp
    for number in range(12):  # sizes with ties, so that whom stock gives a shard to depends on all before it
        size, stage = draw.choice((3, 5, 5, 8, 40)), f"stage{pp}"
        add(f"{stage}.norm{number}", data(size), replica_id=(0, tp, dp))
        add(f"{stage}.column{number}", data(size, 2), (0, tp, place.tp_size), replica_id=(0, 0, dp))
        turned = (0, (tp + number) % place.tp_size, (dp + number // 2) % place.dp_size)
        add(f"{stage}.rotating{number}", data(size), replica_id=turned)
        add(f"{stage}.expert{number}", data(1, size), (0, dp, place.dp_size), replica_id=(0, tp, 0))
        add(f"everywhere{number}", data(size), replica_id=(dist.get_rank() + number) % _RANKS)
        state[f"object{number}"] = ShardedObject(
            f"object{number}", float(data(1)[0]), (1,), (0,), replica_id=(dist.get_rank() + number) % _RANKS
        )
    add("layers", data(4), (0, pp, place.pp_size), replica_id=(0, tp, dp), prepend_axis_num=1)
    if pp in (0, place.pp_size - 1):  # a tied embedding, and one whose main replica is that of the last stage
        is_last = int(pp != 0)
        add("tied", data(6, 2), (0, tp, place.tp_size), replica_id=(is_last, 0, dp))
        add("tied_to_last", data(6, 2), (0, tp, place.tp_size), replica_id=(int(pp != place.pp_size - 1), 0, dp))
    return state


def _loaded(directory: Path, place: _Place) -> dict[str, list[float]]:
    """All that a checkpoint holds of this rank's state dict, loaded by stock."""
    loaded = dist_checkpointing.load(_state(place, is_template=True), str(directory))
    return {
        key: value.flatten().tolist() if isinstance(value, torch.Tensor) else value for key, value in loaded.items()
    }


def _wrapped(strategy: Any, how: str, place: _Place) -> Any:
    groups = {"dp": place.dp_group, "stage": place.stage_group, "world": dist.group.WORLD}
    return strategy if how == "alone" else FullyParallelSaveStrategyWrapper(strategy, groups[how])


def _differences(directory: Path) -> list[str]:
    megatron_cpu.install()
    found = []
    for layout, groups in _LAYOUTS:
        place = _Place(*layout)
        for how in groups:
            name = f"{'x'.join(map(str, layout))} {how}"
            save(_state(place), directory / name / "stock", _wrapped(stock_strategy(), how, place))
            with chosen():
                for turn in ("first", "again"):
                    ours = TorchDistSaveShardedStrategy("torch_dist", 1)
                    save(_state(place), directory / name / turn, _wrapped(ours, how, place))
            dist.barrier()
            expected = _loaded(directory / name / "stock", place)
            for turn in ("first", "again"):
                saved = _loaded(directory / name / turn, place)
                found += [f"{name}, {turn}: {key}" for key in expected if saved[key] != expected[key]]
    return found


def test_of_replicas_that_differ_the_very_copies_are_saved_that_stock_saves(tmp_path: Path) -> None:
    outcomes = values(run_ranks(_RANKS, _differences, tmp_path, timeout_seconds=300))
    assert outcomes == [[]] * _RANKS
