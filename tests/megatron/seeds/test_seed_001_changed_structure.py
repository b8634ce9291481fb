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

from demo import megatron_cpu
from tests.harness.ranks import run_ranks, values
from tests.megatron.stock import stock_strategy
from tests.megatron.torch_dist import chosen, cut, per_rank_object, replicated, save


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


def _save_four_times(directory: Path, strategy: Any) -> None:
    """As Megatron-LM does with the flag: sharding is validated at the first save only."""
    for step in (1, 2, 3, 4):
        save(_state(step), directory / str(step), strategy, validate_access_integrity=step == 1)


def _saved(directory: Path) -> dict[str, Any]:
    """The size of each tensor; from 0.19 on there is the common state as well, which is the same in all versions."""
    items = FileSystemReader(directory).read_metadata().state_dict_metadata
    sizes = {
        key: list(item.size) if isinstance(item, TensorStorageMetadata) else "object" for key, item in items.items()
    }
    return {key: size for key, size in sizes.items() if not key.startswith("common_state")}


def _run(directory: Path) -> dict[str, Any]:
    megatron_cpu.install()
    found: dict[str, Any] = {}
    for name, is_wrapped in (("plain", False), ("fully parallel", True)):

        def wrapped(strategy: Any, is_wrapped: bool = is_wrapped) -> Any:
            if not is_wrapped:
                return strategy
            return FullyParallelSaveStrategyWrapper(strategy, dist.group.WORLD, do_cache_distribution=True)

        stock = directory / f"stock {name}"
        _save_four_times(stock, wrapped(stock_strategy(cached_metadata=True)))
        ours = directory / f"ours {name}"
        with chosen():
            _save_four_times(ours, wrapped(TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)))
        template = _state(4)
        for key in ("weight", "table", "bias", "norm"):
            template[key].data.zero_()
        template["rerun"].data = None
        loaded = dist_checkpointing.load(template, str(ours / "4"))
        found[name] = {
            "stock": [_saved(stock / str(step)) for step in (1, 2, 3, 4)],
            "ours": _saved(ours / "4"),
            "loaded": {
                key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in loaded.items()
            },
        }
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(run_ranks(2, _run, tmp_path_factory.mktemp("seed_001"), timeout_seconds=120))


@pytest.mark.parametrize("name", ["plain", "fully parallel"])
def test_stock_drops_what_is_new_and_keeps_old_sizes_without_an_error(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        third, fourth = rank[name]["stock"][2:]
        assert "bias" not in third
        assert "norm" not in third
        assert not any(key.startswith("rerun") for key in third)
        assert fourth["table"] == [4]


@pytest.mark.parametrize("name", ["plain", "fully parallel"])
def test_ours_saves_all_of_it_in_its_present_size_and_stock_loads_it(found: list[dict[str, Any]], name: str) -> None:
    for number, rank in enumerate(found):
        assert rank[name]["ours"] == {
            "weight": [4, 3],
            "table": [8],
            "bias": [4],
            "norm": [3],
            "rerun_state_machine_state/shard_0_2": "object",
            "rerun_state_machine_state/shard_1_2": "object",
        }
        assert rank[name]["loaded"] == {
            "weight": [[4.0] * 3] * 2,
            "table": [4.0] * 8,
            "bias": [4.0] * 2,
            "norm": [4.0] * 3,
            "rerun": {"step": 4, "rank": number},
        }
