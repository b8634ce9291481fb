"""What cannot be read for a rank on another node is refused on all ranks, and the error says why and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner

import robust_dcp
from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from tests.api import on_nodes
from tests.harness.nodes import can_become_node
from tests.harness.ranks import errors, run_ranks, values

SWAPPED = ("b", "a")


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    """A checkpoint of two nodes: the path under which each has its directory, and where these directories are."""
    if not can_become_node():
        pytest.skip("neither root nor user namespaces: no process can see a directory of its own under one path")
    path, nodes = tmp_path / "seen", tmp_path / "nodes"
    path.mkdir()
    values(run_ranks(2, on_nodes.save, str(path), str(nodes), ("a", "b"), [1], init=False))
    return str(path), str(nodes)


class Doubles(DefaultLoadPlanner):
    """Changes what is loaded, so each tensor has to pass through it where it is needed."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


def load_by_a_planner(path: str, nodes: str, placing: Sequence[str]) -> None:
    on_nodes.start(path, nodes, placing)
    robust_dcp.load(on_nodes.sharded(1, blank=True), checkpoint_id=f"{path}/ckpt", planner=Doubles())


def test_a_planner_that_must_see_each_tensor_cannot_have_it_read_elsewhere(places: tuple[str, str]) -> None:
    for error in errors(run_ranks(2, load_by_a_planner, *places, SWAPPED, init=False)):
        assert error.is_a(CorruptCheckpoint)
        assert "lies on another node, and the item is filled by Doubles: only the rank that needs it" in error.message
        assert "copy the files of all nodes into one directory" in error.message


def load_with_trust_of_one_rank(path: str, nodes: str, placing: Sequence[str], trusting: int) -> None:
    rank = on_nodes.start(path, nodes, placing)
    reader = robust_dcp.RobustReader(f"{path}/ckpt", trusted=rank == trusting)
    robust_dcp.load(on_nodes.sharded(1, blank=True), storage_reader=reader)


def test_a_rank_that_trusts_the_checkpoint_reads_no_object_for_one_that_does_not(places: tuple[str, str]) -> None:
    """Rank 1 sees the file with the objects. It would not check them, and rank 0 expects that somebody has."""
    for error in errors(run_ranks(2, load_with_trust_of_one_rank, *places, SWAPPED, 1, init=False)):
        assert error.is_a(UnsafeCheckpoint)
        assert "rank 1 loads with trusted=True, and reads " in error.message
        assert "pass the same to RobustReader on all ranks" in error.message


def load_with_nothing_to_hold(path: str, nodes: str, placing: Sequence[str]) -> list[int]:
    """Each rank asks for a tensor without elements too, whose file another node has."""
    rank = on_nodes.start(path, nodes, placing)
    state = {"nothing": torch.zeros(0, 3), f"own{rank}": torch.full((4,), float(rank))}
    robust_dcp.save(state, checkpoint_id=f"{path}/empty")
    dist.barrier()
    other = {"nothing": torch.zeros(0, 3), f"own{1 - rank}": torch.zeros(4)}
    robust_dcp.load(other, checkpoint_id=f"{path}/empty")
    return other[f"own{1 - rank}"].tolist()


def test_a_tensor_without_elements_is_loaded_where_its_file_is_not(places: tuple[str, str]) -> None:
    found = values(run_ranks(2, load_with_nothing_to_hold, *places, ("a", "b"), init=False))
    assert found == [[1.0] * 4, [0.0] * 4]
