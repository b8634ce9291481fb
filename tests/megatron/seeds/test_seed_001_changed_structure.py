"""Seed 001 (Megatron-LM #4378, #4448): the state dict changes though ``--ckpt-assume-constant-structure`` was given.

Stock saves by the plan of the first save: what is new is dropped, what has grown keeps its old size, and no error says
so. Ours validates the claim on every save.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from tests.megatron.torch_dist import Scenarios, chosen, cut, per_rank_object, replicated, save, stock_strategy

SCENARIOS = Scenarios()


def _state(step: int) -> dict[str, Any]:
    """At save 2 an object appears, at save 3 a tensor of each kind, at save 4 one has another size."""
    state: dict[str, Any] = {"weight": cut("weight", torch.full((2, 3), float(step)))}
    state["table"] = replicated("table", torch.full((8 if step >= 4 else 4,), float(step)))
    if step >= 2:
        state["rerun"] = per_rank_object("rerun_state_machine_state", {"step": step, "rank": dist.get_rank()})
    if step >= 3:
        state["bias"] = cut("bias", torch.full((2,), float(step)))
        state["norm"] = replicated("norm", torch.full((3,), float(step)))
    return state


def _saved(directory: Path) -> dict[str, Any]:
    """The size of each tensor; from 0.19 on there is the common state as well, which is the same in all versions."""
    items = FileSystemReader(directory).read_metadata().state_dict_metadata
    sizes = {
        key: list(item.size) if isinstance(item, TensorStorageMetadata) else "object" for key, item in items.items()
    }
    return {key: size for key, size in sizes.items() if not key.startswith("common_state")}


def _save_four_times(directory: Path, strategy: Any, *, is_wrapped: bool) -> dict[int, Any]:
    """As Megatron-LM does with the flag: sharding is validated at the first save only."""
    if is_wrapped:
        strategy = FullyParallelSaveStrategyWrapper(strategy, dist.group.WORLD, do_cache_distribution=True)
    for step in (1, 2, 3, 4):
        save(_state(step), directory / str(step), strategy, validate_access_integrity=step == 1)
    return {step: _saved(directory / str(step)) for step in (3, 4)}


@SCENARIOS.add
def stock_drops_what_is_new_and_keeps_old_sizes_without_an_error(directory: Path) -> None:
    for is_wrapped in (False, True):
        strategy = stock_strategy(cached_metadata=True)
        saved = _save_four_times(directory / str(is_wrapped), strategy, is_wrapped=is_wrapped)
        assert not saved[3].keys() & {"bias", "norm"}
        assert not any(key.startswith("rerun") for key in saved[3])
        assert saved[4]["table"] == [4]


@SCENARIOS.add
def ours_saves_all_of_it_in_its_present_size_and_stock_loads_it(directory: Path) -> None:
    for is_wrapped in (False, True):
        with chosen():
            strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
            saved = _save_four_times(directory / str(is_wrapped), strategy, is_wrapped=is_wrapped)
        sizes = {"weight": [4, 3], "table": [8], "bias": [4], "norm": [3]}
        assert saved[4] == sizes | {f"rerun_state_machine_state/shard_{rank}_2": "object" for rank in range(2)}
        template = _state(4)
        for key in sizes:
            template[key].data.zero_()
        template["rerun"].data = None
        loaded = dist_checkpointing.load(template, str(directory / str(is_wrapped) / "4"))
        assert loaded.pop("rerun") == {"step": 4, "rank": dist.get_rank()}
        assert {key: value.tolist() for key, value in loaded.items()} == {
            "weight": [[4.0] * 3] * 2,
            "table": [4.0] * 8,
            "bias": [4.0] * 2,
            "norm": [4.0] * 3,
        }


test_on_two_ranks = SCENARIOS.test()
