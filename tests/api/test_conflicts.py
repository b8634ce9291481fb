"""Ranks that contradict each other, or themselves, are told so before anything is written: same error on all."""

from __future__ import annotations

import logging
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
from robust_dcp.testing.ranks import run_ranks, values
from tests.api.test_cached_plans import check_loads
from tests.api.verdicts import Verdict, verdict_of

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
    outcomes = values(run_ranks(3, run_into_conflicts, str(tmp_path / "checkpoint")))
    for cases in zip(*outcomes, strict=True):
        assert all(case == cases[0] for case in cases)
        case, verdict = cases[0]
        _, key, words = CONFLICTS[case]
        assert all(word in verdict.message + verdict.failures for word in words), (case, verdict)
        if key is not None:
            assert (verdict.type_name, verdict.fields["key"]) == ("PlanConflict", key), (case, verdict)


def stock_keeps_one_silently(directory: str) -> float:
    state_dict = {"w": torch.full((2 + dist.get_rank(),), float(dist.get_rank()))}
    dcp.save(state_dict, checkpoint_id=directory)
    metadata: Any = dcp.FileSystemReader(directory).read_metadata()
    return float(metadata.state_dict_metadata["w"].size[0])


def test_stock_keeps_one_of_two_tensors_of_a_name_silently(tmp_path: Path) -> None:
    assert values(run_ranks(2, stock_keeps_one_silently, str(tmp_path))) in ([2.0, 2.0], [3.0, 3.0])


def stock_asserts(directory: str) -> str:
    state_dict: StateDict = {"w": torch.ones(2) if dist.get_rank() else "text"}
    return verdict_of(dcp.save, state_dict, checkpoint_id=directory).message


def test_stock_ends_in_a_bare_assertion_error_or_says_nothing(tmp_path: Path) -> None:
    for message in values(run_ranks(2, stock_asserts, str(tmp_path))):
        assert "'w'" not in message


def save_objects_that_differ(directory: str, mode: str) -> tuple[list[Verdict], list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("robust_dcp").addHandler(handler)
    rank = dist.get_rank()
    verdicts = []
    for step, differs in enumerate([False, True, False, True]):
        state_dict: StateDict = {
            "iteration": step,
            "rng": {"state": (rank if differs else 0, step)},
            "w": torch.ones(2),
        }
        planner = RobustPlanner(on_object_mismatch=mode)  # type: ignore[arg-type]
        path = f"{directory}/{mode}{step}"
        verdict = verdict_of(
            lambda p=path, s=state_dict, q=planner: robust_dcp.save(s, checkpoint_id=p, planner=q).differing_objects
        )
        verdicts.append(verdict)
        dist.barrier()
        if not verdict.type_name:
            target = {"iteration": -1, "rng": {"state": ()}, "w": torch.zeros(2)}
            robust_dcp.load(target, checkpoint_id=path)
            assert target["iteration"] == step and target["rng"] == {"state": (0, step)}
    return verdicts, lines


def test_replicated_objects_that_differ_are_named_once_in_a_warning(tmp_path: Path) -> None:
    outcomes = values(run_ranks(3, save_objects_that_differ, str(tmp_path), "warn"))
    for verdicts, _ in outcomes:
        assert [verdict.value for verdict in verdicts] == [{}, {"rng.state": (0, 1, 2)}] * 2
    lines = outcomes[0][1]
    assert len(lines) == 1 and "rng.state" in lines[0]
    assert outcomes[1][1] == outcomes[2][1] == []


def test_replicated_objects_that_differ_are_an_error_on_request(tmp_path: Path) -> None:
    for verdicts, _ in values(run_ranks(3, save_objects_that_differ, str(tmp_path), "error")):
        assert [verdict.type_name for verdict in verdicts] == ["", "PlanConflict"] * 2
        assert verdicts[1].fields == {"key": "rng.state", "ranks": [0, 1, 2]}
    assert sorted(os.listdir(tmp_path)) == ["error0", "error2"]


def test_replicated_objects_that_differ_are_nobodys_business_on_request(tmp_path: Path) -> None:
    for verdicts, lines in values(run_ranks(3, save_objects_that_differ, str(tmp_path), "ignore")):
        assert [verdict.type_name for verdict in verdicts] == [""] * 4
        assert lines == []


@pytest.mark.parametrize("wrong", ["on_structure_change", "on_object_mismatch"])
def test_an_unknown_option_is_refused_with_those_that_exist(wrong: str) -> None:
    with pytest.raises(ValueError, match='"error"'):
        RobustPlanner(**{wrong: "explode"})  # type: ignore[arg-type]
