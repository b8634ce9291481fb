"""Ranks that contradict each other, or themselves, are told so before anything is written: same error on all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter
from tests.api.test_cached_plans import check_loads
from tests.api.verdicts import Verdict, verdict_of
from tests.harness.ranks import in_ranks, values

StateDict = dict[str, Any]


def partial(rank: int) -> StateDict:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": DTensor.from_local(torch.ones(3), mesh, [Partial()])}


def partial_in_one_dimension(rank: int) -> StateDict:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    return {"deep": {"w": DTensor.from_local(torch.ones(3), mesh, [Replicate(), Partial()])}}


def shard_is_missing(rank: int) -> StateDict:
    shards = [LocalShard.from_tensor_and_offsets(torch.ones(2, 3), [2 * rank, 0], rank)]
    sharded = init_from_local_shards(shards, 2 * dist.get_world_size(), 3)
    return {"w": sharded} if rank != 1 else {"other": 1}


def same_name_by_two_paths(rank: int) -> StateDict:
    return {"a.w": torch.ones(2)} if rank == 0 else {"a": {"w": torch.ones(2)}}


def same_name_twice_on_one_rank(rank: int) -> StateDict:
    return {"w": torch.ones(2)} if rank == 0 else {"a.w": torch.ones(2), "a": {"w": torch.ones(2)}}


CONFLICTS: dict[str, tuple[Callable[[int], StateDict], str | None, list[str]]] = {
    # state dict of a rank, key of the conflict, words of the message
    "tensor and object": (lambda rank: {"w": torch.ones(2) if rank else "text"}, "w", ["object", "float32"]),
    "shapes": (lambda rank: {"w": torch.ones(2 + rank)}, "w", ["[2]", "[3]"]),
    "numbers of dimensions": (lambda rank: {"w": torch.ones((2,) * (1 + rank))}, "w", ["[2]", "[2, 2]"]),
    "dtypes": (lambda rank: {"w": torch.ones(2).to([torch.float32, torch.int32, torch.bool][rank])}, "w", ["int32"]),
    "Partial": (partial, "w", ["Partial", "redistribute"]),
    "Partial in a mesh of two dimensions": (partial_in_one_dimension, "deep.w", ["Partial"]),
    "a shard that nobody passed": (shard_is_missing, "w", ["gap"]),
    "one name by two paths": (same_name_by_two_paths, "a.w", ["flattened"]),
    "one name twice on a rank": (same_name_twice_on_one_rank, "a.w", ["flatten to the name"]),
}


def run_into_conflicts(directory: str) -> list[tuple[str, Verdict]]:
    found = []
    rank = dist.get_rank()
    robust_dcp.save({"good": torch.ones(3)}, checkpoint_id=directory)
    dist.barrier()  # the coordinator has tidied up
    files = sorted(os.listdir(directory))
    for case, (make, _, _) in CONFLICTS.items():
        dist.barrier()
        found.append((case, verdict_of(robust_dcp.save, make(rank), checkpoint_id=directory)))
        writer = RobustWriter(directory)
        stock = verdict_of(dcp.save, make(rank), storage_writer=writer, planner=RobustPlanner(), no_dist=True)
        assert stock.type_name == "CheckpointException", case
        assert found[-1][1].type_name + ": " + found[-1][1].message.partition("\n")[0][:60] in stock.message, case
        dist.barrier()
        assert sorted(os.listdir(directory)) == files
    check_loads({"good": torch.ones(3)}, directory)
    return found


def test_contradictions_name_the_key_and_the_ranks_on_all_ranks(tmp_path: Path) -> None:
    outcomes = values(in_ranks(3, run_into_conflicts, str(tmp_path / "checkpoint")))
    for cases in zip(*outcomes, strict=True):
        assert all(case == cases[0] for case in cases)
        case, verdict = cases[0]
        _, key, words = CONFLICTS[case]
        assert all(word in verdict.message + verdict.failures for word in words), (case, verdict)
        if key is not None:
            assert (verdict.type_name, verdict.fields["key"]) == ("PlanConflict", key), (case, verdict)


@pytest.mark.parametrize("wrong", ["on_structure_change", "on_replica_mismatch"])
def test_an_unknown_option_is_refused_with_those_that_exist(wrong: str) -> None:
    with pytest.raises(ValueError, match='"error"'):
        RobustPlanner(**{wrong: "explode"})  # type: ignore[arg-type]
