"""Fully parallel load: each rank ends with what it would have read by itself, and each byte is read by one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

from benchmarks.collectives import counted_collectives
from demo import megatron_cpu
from robust_dcp.errors import RobustCheckpointError
from robust_dcp.megatron.loading.load_strategy import RobustLoadStrategy
from tests.harness.ranks import run_ranks, values
from tests.megatron.stock import stock_strategy
from tests.megatron.torch_dist import chosen, made


def _tensor(key: str, data: torch.Tensor, first: int = 0) -> ShardedTensor:
    """On rank ``first`` the main replica."""
    return ShardedTensor.from_rank_offsets(key, data, replica_id=dist.get_rank() - first)


def _state(factor: float) -> dict[str, Any]:
    """What rank 0 and 1 want, 1 and 2, all, one alone; tensors of many dtypes, an empty one, a scalar; objects."""
    rank = dist.get_rank()
    state: dict[str, Any] = {
        "all": {
            str(dtype): _tensor(f"all.{dtype}", (factor * torch.arange(7)).to(dtype))
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8)
        },
        "scalar": _tensor("scalar", torch.tensor(factor * 3.0)),
        "empty": _tensor("empty", torch.zeros(0, 4)),
        "object": ShardedObject("object", [factor] if factor else None, (1,), (0,), replica_id=rank),
        "own": ShardedTensor.from_rank_offsets("own", factor * torch.full((2,), rank + 1.0), (0, rank, 3)),
        "own object": ShardedObject("own_object", rank if factor else None, (3,), (rank,)),
    }
    for pair in ((0, 1), (1, 2)):
        if rank in pair:
            state[f"pair {pair}"] = [
                _tensor(f"pair.{pair[0]}.{n}", factor * torch.full((5,), n + 1.0), pair[0]) for n in range(4)
            ]
            state[f"object {pair}"] = ShardedObject(
                f"object{pair[0]}", {"pair": pair} if factor else None, (1,), (0,), replica_id=rank - pair[0]
            )
    return state


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value


def _load(state: dict[str, Any], path: str, strategy: Any = None) -> Any:
    return dist_checkpointing.load(state, path, strategy, validate_access_integrity=False)


def _run(directory: Path) -> dict[str, Any]:
    megatron_cpu.install()
    path = str(made(directory / "1"))
    dist_checkpointing.save(_state(1.0), path, stock_strategy(), validate_access_integrity=False)
    plain = _plain(_load(_state(0.0), path))
    strategy = RobustLoadStrategy(timeout_seconds=30)
    wrapper = FullyParallelLoadStrategyWrapper(strategy, dist.group.WORLD)
    with chosen(), counted_collectives() as calls:
        parallel = _plain(_load(_state(0.0), path, wrapper))
    report = strategy.last_report
    assert report is not None
    unknown = _state(0.0)
    if dist.get_rank() == 2:
        unknown["more"] = _tensor("more", torch.zeros(2))
    with chosen(), pytest.raises(RobustCheckpointError) as caught:
        _load(unknown, path, wrapper)
    return {
        "same": parallel == plain,
        "objects": calls["all_gather_object"] + calls["gather_object"],
        "nbytes": (report.nbytes, report.shared_nbytes),
        "failed": sorted({failure.rank for failure in caught.value.rank_failures}),
        "names": "more" in str(caught.value),
        **_converted(directory / "2"),
        **_of_a_class_of_its_own(directory / "3"),
    }


def _converted(directory: Path) -> dict[str, Any]:
    """A table of float32 as each rank's model has it: in bfloat16, in float32, in columns of a wider tensor."""
    path, rank = str(made(directory)), dist.get_rank()
    table = torch.arange(40.0).reshape(8, 5)
    with chosen():
        dist_checkpointing.save({"table": _tensor("table", table)}, path, stock_strategy())
        strategy = RobustLoadStrategy(timeout_seconds=30)
        wrapper = FullyParallelLoadStrategyWrapper(strategy, dist.group.WORLD)
        into = [torch.zeros(8, 5, dtype=torch.bfloat16), torch.zeros(8, 5), torch.zeros(8, 9)[:, 2:7]][rank]
        loaded = _load({"table": _tensor("table", into)}, path, wrapper)["table"]
    assert strategy.last_report is not None
    is_right = loaded.dtype == into.dtype and torch.equal(loaded.float(), table)
    return {"converted": is_right, "converted nbytes": strategy.last_report.shared_nbytes}


class Tagged(torch.Tensor):
    """A tensor of a class of its own, as Transformer Engine's FP8 tensors are."""


def _of_a_class_of_its_own(directory: Path) -> dict[str, Any]:
    path, table = str(made(directory)), torch.arange(6.0)
    with chosen():
        dist_checkpointing.save({"table": _tensor("table", table)}, path, stock_strategy())
        strategy = RobustLoadStrategy(timeout_seconds=30)
        wrapper = FullyParallelLoadStrategyWrapper(strategy, dist.group.WORLD)
        loaded = [
            _load({"table": _tensor("table", torch.zeros(6).as_subclass(Tagged))}, path, each)["table"]
            for each in (strategy, wrapper)
        ]
    assert strategy.last_report is not None
    return {"tagged": [each.tolist() for each in loaded], "tagged nbytes": strategy.last_report.shared_nbytes}


def test_each_rank_gets_what_it_would_read_alone_and_a_missing_key_of_one_is_an_error_on_all(tmp_path: Path) -> None:
    ranks = values(run_ranks(3, _run, tmp_path, timeout_seconds=100))
    nbytes = [found.pop("nbytes") for found in ranks]
    converted_nbytes = sum(found.pop("converted nbytes") for found in ranks)
    for found in ranks:
        # Megatron's planner wants to hear of each tensor of a class of its own, so each rank reads it.
        assert (found.pop("tagged"), found.pop("tagged nbytes")) == ([list(range(6))] * 2, 0)
        assert found == {"same": True, "objects": 0, "failed": [2], "names": True, "converted": True}
    # What all ranks hold, each of three parts that one rank holds, and two pairs.
    stored = 7 * (4 + 2 + 8 + 1 + 1) + 4 + 3 * 2 * 4 + 2 * 4 * 5 * 4
    assert sum(whole - shared for whole, shared in nbytes) == stored
    assert converted_nbytes == 8 * 5 * 4  # of the two ranks that want float32, one reads for both
