"""Replicas that hold other contents on each rank: robust_dcp saves the very copy that stock Megatron saves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from tests.megatron.torch_dist import Scenarios, chosen, plain, save, stock_strategy

_RANKS = 4
SCENARIOS = Scenarios(_RANKS)
_LAYOUTS = (((2, 1), ("alone", "dp")), ((1, 2), ("stage", "world")), ((1, 1), ("dp",)))
"""Tensor and pipeline parallel sizes, and the groups of Megatron's wrapper."""


def _state(*, is_template: bool = False) -> dict[str, Any]:
    """Every tensor and object holds another content on each rank; no two tensors of a rank are alike."""
    state: dict[str, Any] = {}
    draw = random.Random(7)  # the same on all ranks

    def data(*shape: int) -> torch.Tensor:
        number = len(state) + 1
        return torch.full(shape, 0.0 if is_template else 1000.0 * dist.get_rank() + number)

    def add(key: str, tensor: torch.Tensor, *cuts: tuple[int, int, int], **options: Any) -> None:
        state[key] = ShardedTensor.from_rank_offsets(key, tensor, *cuts, **options)

    tp, tp_size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    dp, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    pp = parallel_state.get_pipeline_model_parallel_rank()
    pp_size = parallel_state.get_pipeline_model_parallel_world_size()
    for number in range(6):  # sizes with ties, so that whom stock gives a shard to depends on all before it
        size, stage = draw.choice((3, 5, 5, 8, 40)), f"stage{pp}"
        add(f"{stage}.norm{number}", data(size), replica_id=(0, tp, dp))
        add(f"{stage}.column{number}", data(size, 2), (0, tp, tp_size), replica_id=(0, 0, dp))
        turned = (0, (tp + number) % tp_size, (dp + number // 2) % dp_size)
        add(f"{stage}.rotating{number}", data(size), replica_id=turned)
        add(f"{stage}.expert{number}", data(1, size), (0, dp, dp_size), replica_id=(0, tp, 0))
        add(f"everywhere{number}", data(size), replica_id=(dist.get_rank() + number) % _RANKS)
        state[f"object{number}"] = ShardedObject(
            f"object{number}", float(data(1)[0]), (1,), (0,), replica_id=(dist.get_rank() + number) % _RANKS
        )
    add("layers", data(4), (0, pp, pp_size), replica_id=(0, tp, dp), prepend_axis_num=1)
    if pp in (0, pp_size - 1):  # a tied embedding, and one whose main replica is that of the last stage
        is_last = int(pp != 0)
        add("tied", data(6, 2), (0, tp, tp_size), replica_id=(is_last, 0, dp))
        add("tied_to_last", data(6, 2), (0, tp, tp_size), replica_id=(int(pp != pp_size - 1), 0, dp))
    return state


def _loaded(directory: Path) -> dict[str, Any]:
    """All that a checkpoint holds of this rank's state dict, loaded by stock."""
    return plain(dist_checkpointing.load(_state(is_template=True), str(directory)))


def _wrapped(strategy: Any, how: str) -> Any:
    groups = {
        "dp": parallel_state.get_data_parallel_group(),
        "stage": parallel_state.get_tensor_and_data_parallel_group(),
        "world": dist.group.WORLD,
    }
    return strategy if how == "alone" else FullyParallelSaveStrategyWrapper(strategy, groups[how])


@SCENARIOS.add
def of_replicas_that_differ_the_very_copies_are_saved_that_stock_saves(directory: Path) -> None:
    for layout, groups in _LAYOUTS:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(*layout)
        for how in groups:
            name = f"{'x'.join(map(str, layout))} {how}"
            save(_state(), directory / name / "stock", _wrapped(stock_strategy(), how))
            with chosen():
                for turn in ("first", "again"):
                    ours = TorchDistSaveShardedStrategy("torch_dist", 1)
                    save(_state(), directory / name / turn, _wrapped(ours, how))
            dist.barrier()
            expected = _loaded(directory / name / "stock")
            for turn in ("first", "again"):
                assert _loaded(directory / name / turn) == expected, (name, turn)


test_on_four_ranks = SCENARIOS.test()
