"""Megatron's checkpoints on drives of each node: each has the common files and the tracker, and outlives a node."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

import robust_dcp
from demo import megatron_cpu
from robust_dcp.megatron.resume import load_checkpoint
from tests.harness.hosts import become_node, can_become_node
from tests.harness.ranks import run_ranks, values
from tests.megatron.torch_dist import chosen


@pytest.fixture(autouse=True, scope="module")
def _nodes() -> None:  # no mark, which each rank would find out anew
    if not can_become_node():
        pytest.skip("neither root nor user namespaces: no process can see a directory of its own")


NODES = "abc"


def state_of(*, blank: bool) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    shard = torch.zeros(50, 30) if blank else torch.full((50, 30), float(rank + 1))
    # One object of each rank, and common state.
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", shard, (0, rank, size)),
        "rng": ShardedObject("rng", None if blank else [rank] * 20, (size,), (rank,)),
        "common": {"iteration": 0 if blank else 10},
    }


def check(loaded: dict[str, Any]) -> None:
    rank = dist.get_rank()
    assert torch.equal(loaded["weight"], torch.full((50, 30), float(rank + 1)))
    assert (loaded["rng"], loaded["common"]) == ([rank] * 20, {"iteration": 10})


def lose(nodes: str, lost: str) -> None:
    """Nodes get an empty drive. Their mounts stay."""
    dist.barrier()
    if dist.get_rank() == 0:
        for each in Path(nodes, lost).iterdir():
            shutil.rmtree(each)
    dist.barrier()


def resume(root: str) -> int:
    """What Megatron-LM's ``load_checkpoint`` does: the tracker on each rank, the directory on each rank, the shards."""

    def stock(load_arg: str = "load") -> int:
        iteration = torch.tensor(int(Path(root, "latest_checkpointed_iteration.txt").read_text()))
        dist.all_reduce(iteration, dist.ReduceOp.MAX)
        directory = Path(root, f"iter_{iteration.item():07d}")
        assert dist_checkpointing.check_is_distributed_checkpoint(str(directory))
        check(dist_checkpointing.load(state_of(blank=True), str(directory)))
        return int(iteration.item())

    return int(load_checkpoint(stock))


def work(seen: str, nodes: str) -> list[str]:
    """Save, lose each node in turn, and load. The names of the files that the node of this rank has at first."""
    megatron_cpu.install()
    rank, root = dist.get_rank(), f"{seen}/run"
    become_node(f"host-{NODES[rank]}", seen, Path(nodes, NODES[rank]))
    parsed = types.ModuleType("megatron.training.global_vars")
    parsed.get_args = lambda: argparse.Namespace(save=root, load=root)  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"megatron.training.global_vars": parsed}), chosen(parity_nodes="3"):
        directory = f"{root}/iter_0000010"
        os.makedirs(directory, exist_ok=rank != 0)
        dist_checkpointing.save(state_of(blank=False), directory)
        robust_dcp.finish_async_saves()
        if rank == 0:  # as Megatron-LM does when the save is over
            Path(root, "latest_checkpointed_iteration.txt").write_text("10")
        names = sorted(re.sub(r"\.[0-9a-f]{16}", "", each.name) for each in Path(directory).iterdir())
        assert Path(root, "latest_checkpointed_iteration.txt").read_text() == "10"
        for lost in NODES:
            lose(nodes, lost)
            check(dist_checkpointing.load(state_of(blank=True), directory))
            assert dist_checkpointing.load_common_state_dict(directory)["common"] == {"iteration": 10}  # by each rank
            lose(nodes, lost)
            assert resume(root) == 10
        lose(nodes, "a")
        lose(nodes, "b")
        with pytest.raises((robust_dcp.CorruptCheckpoint, CheckpointingException), match="has lost 2 nodes"):
            resume(root)
    return names


def test_each_node_has_the_common_files_and_the_tracker_and_outlives_the_loss_of_each_one(tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    of_all = {".metadata", ".robust_dcp.index", ".robust_dcp.nodes", ".robust_dcp.parity", "common.pt", "metadata.json"}
    outcomes = run_ranks(len(NODES), work, str(tmp_path / "seen"), str(tmp_path / "nodes"))
    for rank, names in enumerate(values(outcomes)):
        assert of_all <= set(names), names
        assert {name for name in names if name.endswith(".distcp")} and all(
            name.startswith(f"__{rank}_") for name in names if name.endswith(".distcp")
        )
