"""Fully parallel load: who reads what, and that each rank ends with what it would have read by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

from benchmarks.collectives import counted_collectives
from demo import megatron_cpu
from robust_dcp import PlanConflict
from robust_dcp.errors import RobustCheckpointError
from robust_dcp.megatron.loading import tensor_exchange
from robust_dcp.megatron.loading.load_strategy import RobustLoadStrategy
from robust_dcp.megatron.loading.parallel_load import distribute
from tests.megatron.stock import stock_strategy
from tests.megatron.torch_dist import chosen, made
from tests.support.ranks import run_ranks, values

_SHARD = st.tuples(st.sampled_from("abcdefgh"), st.tuples(st.integers(0, 2)), st.just("torch.float32"))


@given(
    wanted=st.lists(st.lists(_SHARD, unique=True, max_size=12), min_size=1, max_size=5),
    sizes=st.lists(st.integers(0, 1000), min_size=24, max_size=24),
)
def test_every_shard_is_read_once_by_a_rank_that_wants_it_whatever_the_order(wanted: Any, sizes: list[int]) -> None:
    def nbytes(shard: Any) -> int:
        return sizes[3 * "abcdefgh".index(shard[0]) + shard[1][0]]

    found = distribute([[(shard, nbytes(shard)) for shard in rank] for rank in wanted])
    assert [shard for shard, _, _ in found] == sorted({shard for shard, _, _ in found}, key=[f[0] for f in found].index)
    for shard, reader, ranks in found:
        assert ranks == tuple(rank for rank, shards in enumerate(wanted) if shard in shards)
        assert reader in ranks
    assert {shard for shard, _, _ in found} == {shard for rank in wanted for shard in rank}
    assert found == distribute([[(shard, nbytes(shard)) for shard in reversed(rank)] for rank in wanted])


def test_what_all_ranks_want_is_spread_by_bytes() -> None:
    shards = [((f"w{n}", (0,), "torch.float32"), 100 + n) for n in range(40)]
    found = distribute([shards] * 4)
    load = [sum(dict(shards)[shard] for shard, reader, _ in found if reader == rank) for rank in range(4)]
    assert max(load) - min(load) <= 140


def test_a_shard_that_ranks_want_in_different_dtypes_is_a_conflict() -> None:
    with pytest.raises(PlanConflict, match="'w'") as caught:
        distribute([[(("w", (0,), "torch.float32"), 8)], [(("w", (0,), "torch.bfloat16"), 4)]])
    assert caught.value.ranks == [0, 1]


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


def _run(directory: Path) -> dict[str, Any]:
    megatron_cpu.install()
    tensor_exchange._BUNDLE_NBYTES = 64  # type: ignore[misc]
    path = str(made(directory / "1"))
    dist_checkpointing.save(_state(1.0), path, stock_strategy(), validate_access_integrity=False)
    plain = _plain(dist_checkpointing.load(_state(0.0), path, validate_access_integrity=False))
    wrapper = FullyParallelLoadStrategyWrapper(RobustLoadStrategy(timeout_seconds=30), dist.group.WORLD)
    with chosen(), counted_collectives() as calls:
        parallel = _plain(dist_checkpointing.load(_state(0.0), path, wrapper, validate_access_integrity=False))
    unknown = _state(0.0)
    if dist.get_rank() == 2:
        unknown["more"] = _tensor("more", torch.zeros(2))
    with chosen(), pytest.raises(RobustCheckpointError) as caught:
        dist_checkpointing.load(unknown, path, wrapper, validate_access_integrity=False)
    return {
        "same": parallel == plain,
        "objects": calls["all_gather_object"] + calls["gather_object"],
        "failed": sorted({failure.rank for failure in caught.value.rank_failures}),
        "names": "more" in str(caught.value),
    }


def test_each_rank_gets_what_it_would_read_alone_and_a_missing_key_of_one_is_an_error_on_all(tmp_path: Path) -> None:
    for found in values(run_ranks(3, _run, tmp_path, timeout_seconds=100)):
        assert found == {"same": True, "objects": 0, "failed": [2], "names": True}
