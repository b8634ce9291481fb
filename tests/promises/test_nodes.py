"""Nodes that do not share the directory of the checkpoint: each has its own under the same path."""

from __future__ import annotations

import copy
import errno
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import robust_dcp
from robust_dcp import CheckpointManager, CopyOptions, RobustPlanner, RobustWriter, StorageError
from tests.faults.disk import Fault, FaultDisk, kill
from tests.harness.faults import kill_in
from tests.harness.hosts import become_node, can_become_node
from tests.harness.ranks import Outcome, errors, run_ranks, values

ROWS = 24
AABB = ("a", "a", "b", "b")
Places = tuple[str, str]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """The path under which each node has its directory, and where these directories are."""
    if not can_become_node():
        pytest.skip("neither root nor user namespaces: no process can see a directory of its own under one path")
    path, nodes = tmp_path / "seen", tmp_path / "nodes"
    path.mkdir()
    return str(path), str(nodes)


def names(places: Places, node: str) -> set[str]:
    """The names of the files on a node, without the marks of their saves."""
    return {re.sub(r"\.[0-9a-f]{16}", "", each.name) for each in Path(places[1], node, "ckpt").iterdir()}


def on(places: Places, nodes: Sequence[str], function: Callable[..., Any], *args: Any) -> list[Outcome]:
    """Run a function on ranks, each on the node that ``nodes`` gives for it."""
    return run_ranks(len(nodes), function, *places, nodes, *args, init=False)


def in_the_way(places: Places) -> list[str]:
    return [name for node in "ab" for name in names(places, node) if "saving" in name or name.endswith(".tmp")]


# --- what ranks do ----------------------------------------------------------------------------------------------------


def start(path: str, nodes: str, placing: Sequence[str]) -> int:
    """Become the node that ``placing`` gives for this rank, and start the process group. Returns the rank."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(list(placing[:rank]).count(placing[rank]))
    os.environ["LOCAL_WORLD_SIZE"] = str(list(placing).count(placing[rank]))
    become_node(f"host-{placing[rank]}", path, Path(nodes, placing[rank]))
    dist.init_process_group("gloo")
    return rank


def values_of(step: int, more: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    state = {
        "weight": torch.randn(ROWS, 16, generator=generator),
        "embedding": torch.randn(ROWS, 3, generator=generator).to(torch.bfloat16),
        "shared": torch.arange(100) * step,
    }
    return {**state, **{f"more.{number}": torch.full((ROWS,), float(step + number)) for number in range(more)}}


def sharded(step: int, more: int = 0, *, blank: bool = False) -> dict[str, Any]:
    """The state dict of a step: some tensors are sharded over all ranks, one is replicated, and one is an object."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for name, value in values_of(step, more).items():
        full = torch.zeros_like(value) if blank else value
        state[name] = distribute_tensor(full, mesh, [Replicate() if name == "shared" else Shard(0)])
    return {**state, "step": -1 if blank else step, "text": "" if blank else f"step {step} " * 10}


def check(state: dict[str, Any], step: int, more: int = 0) -> None:
    for name, value in values_of(step, more).items():
        assert torch.equal(state[name].full_tensor(), value), name
    assert (state["step"], state["text"]) == (step, f"step {step} " * 10)


def save(path: str, nodes: str, placing: Sequence[str], *steps: tuple[int, int], files_per_rank: int = 2) -> list[str]:
    """Save each step, with some more tensors, into the same checkpoint. What became of the plan each time."""
    start(path, nodes, placing)
    plans = []
    for step, more in steps:
        writer = RobustWriter(f"{path}/ckpt", files_per_rank=files_per_rank)
        plans.append(robust_dcp.save(sharded(step, more), storage_writer=writer).plan)
    return plans


def load(path: str, nodes: str, placing: Sequence[str], step: int, more: int = 0) -> tuple[int, int]:
    """Load and compare. Returns the bytes that came from other ranks, and all."""
    start(path, nodes, placing)
    state = sharded(step, more, blank=True)
    report = robust_dcp.load(state, checkpoint_id=f"{path}/ckpt")
    check(state, step, more)
    return report.shared_nbytes, report.nbytes


def load_killed(path: str, nodes: str, placing: Sequence[str]) -> None:
    start(path, nodes, placing)
    with kill_in("share", rank=1):
        robust_dcp.load(sharded(1, blank=True), checkpoint_id=f"{path}/ckpt", timeout_seconds=20)


def save_with_a_fault(path: str, nodes: str, placing: Sequence[str], of_rank: int, key: str, fault: Fault) -> None:
    """Save step 1 well, and step 2 with a disk that fails on one rank."""
    rank = start(path, nodes, placing)
    robust_dcp.save(sharded(1), checkpoint_id=f"{path}/ckpt")
    with FaultDisk(path, on={key: fault} if rank == of_rank else {}):
        robust_dcp.save(sharded(2), checkpoint_id=f"{path}/ckpt", timeout_seconds=20)


def load_either(path: str, nodes: str, placing: Sequence[str]) -> int:
    """Load what a save that failed has left, then save and load another step. Returns which step was there."""
    start(path, nodes, placing)
    state = sharded(1, blank=True)
    robust_dcp.load(state, checkpoint_id=f"{path}/ckpt")
    found: int = state["step"]
    check(state, found)
    robust_dcp.save(sharded(3), checkpoint_id=f"{path}/ckpt")
    robust_dcp.load(state, checkpoint_id=f"{path}/ckpt")
    check(state, 3)
    return found


def refuse_what_needs_one_directory(path: str, nodes: str, placing: Sequence[str]) -> list[str]:
    start(path, nodes, placing)
    tensors = {name: value for name, value in sharded(1).items() if isinstance(value, torch.Tensor)}
    told = []
    with pytest.raises(StorageError) as caught:
        robust_dcp.save(tensors, storage_writer=RobustWriter(f"{path}/ckpt", layout="safetensors"))
    told.append(str(caught.value))
    for planner in (RobustPlanner(), None):
        with pytest.raises(dcp.api.CheckpointException) as raised:
            dcp.save(sharded(1), storage_writer=RobustWriter(f"{path}/ckpt"), planner=planner)
        told.append(str(raised.value))
    return told


def manage(path: str, nodes: str, placing: Sequence[str], executor: Any, drain_to: str | None) -> list[int]:
    """Save four steps, and keep the last and the best. Returns the steps that this rank's node has."""
    start(path, nodes, placing)
    slow = CopyOptions(limit_bytes_per_second=4e3)
    manager = CheckpointManager(f"{path}/run", keep_last=1, keep_best="loss", drain_to=drain_to, drain_options=slow)
    for step in (1, 2, 3, 4):
        metrics = {"loss": abs(step - 2)}
        if executor is None:
            manager.save(step, sharded(step), metrics=metrics)
        else:
            manager.async_save(step, sharded(step), metrics=metrics, executor=executor)
            robust_dcp.finish_async_saves()
    robust_dcp.finish_async_saves()
    manager.prune()  # what had not arrived before
    dist.barrier()
    return [each.step for each in manager.checkpoints()]


def go_on(path: str, nodes: str, placing: Sequence[str]) -> int:
    start(path, nodes, placing)
    state = sharded(4, blank=True)
    loaded = CheckpointManager(f"{path}/run").load_latest(state)
    assert loaded is not None
    check(state, loaded.checkpoint.step)
    return loaded.checkpoint.step


# --- what becomes of it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "placing", [("b", "b", "a", "a"), ("b", "a", "b"), ("empty", "a", "b")], ids=["swapped", "three", "an empty node"]
)
def test_each_node_has_the_files_of_its_ranks_and_what_a_rank_does_not_see_comes_from_a_node_that_has_it(
    places: Places, placing: tuple[str, ...]
) -> None:
    values(on(places, AABB, save, (1, 0)))
    of_all = {".metadata", ".robust_dcp.index", ".robust_dcp.nodes"}
    of_ranks = [{f"__{rank}_{number}.distcp" for number in (0, 1)} for rank in range(4)]
    of_rank_0 = {"__0_2.distcp", ".robust_dcp.report.json"}  # it has the objects, and writes the report
    assert names(places, "a") == of_all | of_ranks[0] | of_ranks[1] | of_rank_0
    assert names(places, "b") == of_all | of_ranks[2] | of_ranks[3]
    fetched = values(on(places, placing, load, 1))
    assert all(0 < nbytes <= of_all_nbytes for nbytes, of_all_nbytes in fetched)


def test_repeated_saves_by_ranks_that_are_placed_otherwise_leave_one_checkpoint(places: Places) -> None:
    plans = values(on(places, ("a", "b", "c"), save, (1, 0), (2, 0), (3, 30)))
    assert plans[1] == ["built", "reused", "rebuilt"]
    values(on(places, ("a", "b", "c"), load, 3, 30))
    values(on(places, ("b", "c", "a"), save, (4, 0)))
    for node, rank in zip("bca", range(3), strict=True):
        data = [each.name for each in Path(places[1], node, "ckpt").glob("*.distcp")]
        assert {name[:4] for name in data} == {f"__{rank}_"} and len({name.split(".")[1] for name in data}) == 1
    values(on(places, ("a", "b", "c"), load, 4))


def test_more_than_64_files_on_nodes_of_their_own_are_noticed_and_saved(places: Places) -> None:
    values(on(places, ("a", "b"), partial(save, files_per_rank=40), (1, 80)))
    assert all(sum(name.endswith(".distcp") for name in names(places, node)) > 32 for node in "ab")
    values(on(places, ("b", "a"), load, 1, 80))


def test_a_file_that_no_node_of_the_load_has_is_named_and_so_is_a_rank_that_dies_reading_for_others(
    places: Places,
) -> None:
    values(on(places, ("a", "b"), save, (1, 0)))
    for placing in (("a", "a"), ("a", "empty")):
        for error in errors(on(places, placing, load, 1)):
            assert (
                error.type_name == "CorruptCheckpoint"
                and "'embedding'" in error.message
                and "'weight'" in error.message
            )
            assert re.search(
                r"are on no node of this load: __1_0\.\w+\.distcp \(written by rank 1 on host-b\)", str(error)
            )
    outcomes = on(places, ("b", "a"), load_killed)
    (error,) = errors(outcomes, [0])
    assert outcomes[1].exitcode == -9 and error.fields["missing_ranks"] == [1]


@pytest.mark.parametrize(
    ("killed", "key", "steps"), [(1, "rename:.metadata", (1, 2)), (0, "fsync:ckpt#2", (1, 2)), (1, "unlink:__*", (2,))]
)
def test_a_rank_killed_between_the_commits_of_two_nodes_leaves_a_checkpoint_that_is_whole(
    places: Places, killed: int, key: str, steps: tuple[int, ...]
) -> None:
    outcomes = on(places, ("a", "b"), save_with_a_fault, killed, key, kill)
    assert outcomes[killed].exitcode == -9
    one, other = values(on(places, ("a", "b"), load_either))
    assert one == other and one in steps and in_the_way(places) == []
    assert len({data.suffixes[0] for data in Path(places[1]).glob("*/ckpt/*.distcp")}) == 1  # the mark of one save


@pytest.mark.parametrize(
    ("key", "steps"),
    [
        ("create:.robust_dcp.saving*", {1}),
        ("create:*.distcp", {1}),
        ("create:.metadata.*", {1}),
        ("rename:.metadata", {1, 2}),
    ],
)
def test_a_failure_on_one_node_is_raised_on_all_ranks_and_loses_nothing(
    places: Places, key: str, steps: set[int]
) -> None:
    """Rank 2 leads on its node. If it is the rename that fails, another node has renamed before, or has heard of that
    before it could."""
    fault = OSError(errno.EIO, "")
    found = errors(on(places, ("a", "a", "b"), save_with_a_fault, 2, key, fault))
    assert {failure.rank for error in found for failure in error.rank_failures} == {2}
    (step,) = set(values(on(places, ("a", "a", "b"), load_either)))
    assert step in steps
    assert in_the_way(places) == []


def save_late(path: str) -> bool:
    """Rank 1 sees new files late, as an NFS client with an old cache does."""
    late = OSError(errno.ENOENT, "")
    with FaultDisk(path, on={f"stat:.robust_dcp.saving*#{n}": late for n in (1, 2, 3)} if dist.get_rank() else {}):
        report = robust_dcp.save(sharded(1), checkpoint_id=path)
    state = sharded(1, blank=True)
    robust_dcp.load(state, checkpoint_id=path)
    check(state, 1)
    return bool(report.leads_directory)


def test_a_shared_directory_that_is_seen_late_is_not_taken_for_another_one(tmp_path: Path) -> None:
    assert values(run_ranks(2, save_late, str(tmp_path / "ckpt"))) == [False, False]
    assert not (tmp_path / "ckpt" / ".robust_dcp.nodes").exists()


def test_saves_that_need_one_directory_refuse_several(places: Places) -> None:
    for safetensors, *stock in values(on(places, ("a", "b"), refuse_what_needs_one_directory)):
        assert "layout='safetensors' commits on one node only" in safetensors
        assert all("is not one directory for all ranks: rank 1 does not see" in each for each in stock)
    assert not any(Path(places[1], node, "ckpt", ".metadata").exists() for node in "ab")


@pytest.mark.parametrize(("executor", "drains"), [(None, True), (None, False), ("thread", False), ("process", False)])
def test_a_manager_keeps_and_removes_the_same_steps_on_every_node(
    places: Places, executor: str | None, drains: bool, tmp_path: Path
) -> None:
    far = tmp_path / "far"
    assert values(on(places, ("a", "b"), manage, executor, str(far) if drains else None)) == [[2, 4], [2, 4]]
    assert values(on(places, ("new", "b", "a"), go_on)) == [4, 4, 4]
    for step in (1, 2, 3, 4) if drains else ():  # none was removed on a node before it had arrived
        robust_dcp.load(values_of(step, 0), checkpoint_id=far / f"step_{step}")


def prove_replicas(path: str, nodes: str) -> list[Any]:
    """Of each, some rank has no file. The long one comes in several boxes, and the dict as an object."""
    rank = dist.get_rank()
    become_node(f"host-{rank}", path, Path(nodes, str(rank)))
    state: dict[str, Any] = {"short": torch.arange(1000.0), "long": torch.zeros(3, 1 << 20), "set": {1, 2}}
    state[f"own_{rank}"] = torch.ones(10)
    robust_dcp.save(state, checkpoint_id=f"{path}/ckpt")
    equal = robust_dcp.prove(state, checkpoint_id=f"{path}/ckpt")
    state["short"][7] += 1
    state["long"][2, -1] += 1
    state["set"] = {rank}
    before = copy.deepcopy(state)
    proof = robust_dcp.prove(state, checkpoint_id=f"{path}/ckpt")
    is_untouched = all(torch.equal(state[key], before[key]) for key in ("short", "long")) and state["set"] == {rank}
    return [str(equal) if not equal.equal else "", is_untouched, dict(proof.differing), proof.missing, proof.unread]


def test_a_proof_reads_what_only_another_node_has_from_there(places: Places) -> None:
    both = (0, 1)
    differing = {"long": (2, (2, (1 << 20) - 1), both), "set": (2, (), both), "short": (2, (7,), both)}
    assert values(run_ranks(2, prove_replicas, *places)) == [["", True, differing, (), ()]] * 2
