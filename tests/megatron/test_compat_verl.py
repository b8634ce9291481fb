"""verl's own ``save_dist_checkpointing`` and ``load_dist_checkpointing``.

Its ``MegatronCheckpointManager`` saves and loads by them. They are imported from verl's wheel without the package
around them, which needs Ray.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from demo import megatron_cpu
from robust_dcp.storage.files.paths import INDEX_NAME
from robust_dcp.testing.ranks import run_ranks, values
from tests.megatron.stock import stock_strategy

pytestmark = pytest.mark.compat


def _functions() -> ModuleType:
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None, "verl is not on the path: run make test-compat"
    path = Path(spec.origin).parent / "utils" / "megatron" / "dist_checkpointing.py"
    spec = importlib.util.spec_from_file_location("verl_dist_checkpointing", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _state(value: float) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = ShardedTensor.from_rank_offsets("cut.weight", torch.full((3, 4), value + rank), (0, rank, ranks))
    shared = ShardedTensor.from_rank_offsets("whole.weight", torch.full((5,), value), replica_id=rank)
    return {"cut": own, "whole": shared, "step": 7}


def _equal(loaded: dict[str, Any]) -> bool:
    expected = _state(1.0)
    return loaded["step"] == 7 and all(torch.equal(loaded[key], expected[key].data) for key in ("cut", "whole"))


def _save_and_load(directory: Path) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.strategies.base import async_calls

    import robust_dcp

    megatron_cpu.install()
    parallel_state.initialize_model_parallel(1, 1)
    verl = _functions()

    def save(name: str, *, async_save: bool) -> None:
        path = directory / name
        if dist.get_rank() == 0:
            path.mkdir()
        dist.barrier()
        request = verl.save_dist_checkpointing(_state(1.0), str(path), async_save=async_save, content_metadata={"a": 1})
        if request is not None:
            async_calls.schedule_async_request(request)
            async_calls.maybe_finalize_async_calls(blocking=True)

    def equal(*names: str) -> list[bool]:
        return [_equal(verl.load_dist_checkpointing(_state(0.0), str(directory / name))) for name in names]

    stock_strategy()
    save("stock", async_save=False)
    robust_dcp.install()
    save("sync", async_save=False)
    save("async", async_save=True)
    ours = equal("stock", "sync", "async")
    robust_dcp.uninstall()
    stock_strategy()
    return {"ours": ours, "stock": equal("sync", "async")}


def test_verl_saves_and_loads_by_robust_dcp_and_by_stock_what_either_has_written(tmp_path: Path) -> None:
    for rank in values(run_ranks(2, _save_and_load, tmp_path, timeout_seconds=150)):
        assert rank == {"ours": [True] * 3, "stock": [True] * 2}
    assert [(tmp_path / name / INDEX_NAME).is_file() for name in ("stock", "sync", "async")] == [False, True, True]
