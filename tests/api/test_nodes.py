"""Nodes that do not share the directory of the checkpoint: each has its own under the same path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from robust_dcp.errors import CorruptCheckpoint, StorageError
from tests.api import on_nodes
from tests.harness.nodes import can_become_node
from tests.harness.ranks import errors, in_ranks, run_ranks, values

AABB = ("a", "a", "b", "b")


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    """The path under which each node has its directory, and where these directories are."""
    if not can_become_node():
        pytest.skip("neither root nor user namespaces: no process can see a directory of its own under one path")
    path, nodes = tmp_path / "seen", tmp_path / "nodes"
    path.mkdir()
    return str(path), str(nodes)


def names(places: tuple[str, str], node: str) -> set[str]:
    """The names of the files on a node, without the marks of their saves."""
    return {re.sub(r"\.[0-9a-f]{16}", "", each.name) for each in Path(places[1], node, "ckpt").iterdir()}


def test_each_node_gets_the_metadata_and_the_files_of_its_own_ranks(places: tuple[str, str]) -> None:
    values(run_ranks(4, on_nodes.save, *places, AABB, [1], init=False))
    of_all = {".metadata", ".robust_dcp.index", ".robust_dcp.nodes"}
    of_ranks = [{f"__{rank}_{number}.distcp" for number in (0, 1)} for rank in range(4)]
    of_rank_0 = {"__0_2.distcp", ".robust_dcp.report.json"}  # it has the objects, and writes the report
    assert names(places, "a") == of_all | of_ranks[0] | of_ranks[1] | of_rank_0
    assert names(places, "b") == of_all | of_ranks[2] | of_ranks[3]


@pytest.mark.parametrize(
    "placing",
    [("b", "b", "a", "a"), ("b", "a", "b"), ("empty", "a", "b")],
    ids=["swapped", "three", "rank 0 on an empty node"],
)
def test_what_a_rank_does_not_see_comes_from_a_node_that_has_it(
    places: tuple[str, str], placing: tuple[str, ...]
) -> None:
    values(run_ranks(4, on_nodes.save, *places, AABB, [1], init=False))
    fetched = values(run_ranks(len(placing), on_nodes.load, *places, placing, 1, init=False))
    assert all(0 < nbytes <= of_all for nbytes, of_all in fetched)


def test_repeated_saves_with_changes_leave_one_checkpoint_on_three_nodes(places: tuple[str, str]) -> None:
    """The second save reuses the plan, and the third one has 20 files more."""
    placing = ("a", "b", "c")
    plans = values(run_ranks(3, on_nodes.save, *places, placing, [1, 2, 3], [0, 0, 30], init=False))
    assert plans[1] == ["built", "reused", "rebuilt"]
    values(run_ranks(3, on_nodes.load, *places, placing, 3, 30, init=False))
    for node in placing:
        left = {name for name in names(places, node) if not name.endswith(".distcp")}
        assert left - {".robust_dcp.report.json"} == {".metadata", ".robust_dcp.index", ".robust_dcp.nodes"}
        marks = {each.name.split(".")[1] for each in Path(places[1], node, "ckpt").glob("*.distcp")}
        assert len(marks) == 1  # the files of one save


def test_ranks_placed_otherwise_in_the_next_save_leave_no_file_under_the_name_of_a_new_one(
    places: tuple[str, str],
) -> None:
    values(run_ranks(2, on_nodes.save, *places, ("a", "b"), [1], init=False))
    values(run_ranks(2, on_nodes.save, *places, ("b", "a"), [2], init=False))
    assert not {name for name in names(places, "a") if name.startswith("__0_")}
    assert not {name for name in names(places, "b") if name.startswith("__1_")}
    values(run_ranks(2, on_nodes.load, *places, ("a", "b"), 2, init=False))


def test_a_rank_that_dies_while_it_reads_for_another_node_is_named(places: tuple[str, str]) -> None:
    values(run_ranks(2, on_nodes.save, *places, ("a", "b"), [1], init=False))
    outcomes = run_ranks(2, on_nodes.load_killed, *places, ("b", "a"), init=False)
    (error,) = errors(outcomes, [0])
    assert outcomes[1].exitcode == -9 and error.fields["missing_ranks"] == [1]


def test_more_than_64_files_on_nodes_of_their_own_are_noticed_and_saved(places: tuple[str, str]) -> None:
    values(run_ranks(2, on_nodes.save_many_files, *places, ("a", "b"), init=False))
    assert all(sum(name.endswith(".distcp") for name in names(places, node)) > 32 for node in "ab")
    values(run_ranks(2, on_nodes.load, *places, ("b", "a"), 1, 80, init=False))


def test_a_file_that_no_node_of_the_load_has_is_named_with_its_node_and_its_keys(places: tuple[str, str]) -> None:
    values(run_ranks(4, on_nodes.save, *places, AABB, [1], init=False))
    for placing in (("a", "a"), ("a",), ("a", "empty")):
        for error in errors(run_ranks(len(placing), on_nodes.load_alone, *places, placing, init=False)):
            assert error.is_a(CorruptCheckpoint)
            assert re.search(
                r"are on no node of this load: __2_0\.\w+\.distcp \(written by rank 2 on host-b\)", error.message
            )
            assert "'embedding'" in error.message and "'weight'" in error.message


@pytest.mark.parametrize(
    ("killed", "instant", "step"),
    [(1, "before its commit", None), (0, "after its commit", None), (1, "while it removes the old files", 2)],
)
def test_a_rank_killed_between_the_commits_of_two_nodes_leaves_a_checkpoint_that_is_whole(
    places: tuple[str, str], killed: int, instant: str, step: int | None
) -> None:
    outcomes = run_ranks(2, on_nodes.save_killed_at, *places, ("a", "b"), killed, instant, init=False)
    assert outcomes[killed].exitcode == -9
    found = values(run_ranks(2, on_nodes.load_either, *places, ("a", "b"), 3, init=False))
    assert found in ([[step, step]] if step is not None else [[1, 1], [2, 2]])
    for node in "ab":
        assert not [name for name in names(places, node) if "saving" in name or name.endswith(".tmp")]


@pytest.mark.parametrize(
    ("operation", "step"), [("saving", 1), (".distcp", 1), (".metadata.", 1), ("rename", 2)], ids=str
)
def test_a_failure_on_one_node_is_raised_on_all_ranks_and_loses_nothing(
    places: tuple[str, str], operation: str, step: int
) -> None:
    """``operation`` is what fails on rank 2, which leads on its node. If it is the rename, another node may have
    renamed before, so both checkpoints stay whole."""
    found = errors(run_ranks(3, on_nodes.save_failing, *places, ("a", "a", "b"), operation, init=False))
    assert {failure.rank for error in found for failure in error.rank_failures} == {2}
    assert set(values(run_ranks(3, on_nodes.load_either, *places, ("a", "a", "b"), 3, init=False))) == {step}
    for node in "ab":
        assert not [name for name in names(places, node) if "saving" in name or name.endswith(".tmp")]


def test_a_shared_directory_that_is_seen_late_is_not_taken_for_another_one(tmp_path: Path) -> None:
    assert values(in_ranks(2, on_nodes.save_late, str(tmp_path / "ckpt"))) == [(False, 0), (False, 0)]
    assert not (tmp_path / "ckpt" / ".robust_dcp.nodes").exists()


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_async_saves_commit_on_every_node(places: tuple[str, str], executor: str) -> None:
    values(run_ranks(2, on_nodes.save_async, *places, ("a", "b"), executor, init=False))


@pytest.mark.parametrize("planner", ["ours", "stock"])
def test_stocks_save_refuses_directories_that_are_not_one(places: tuple[str, str], planner: str) -> None:
    outcomes = run_ranks(2, on_nodes.stock_save, *places, ("a", "b"), planner, init=False)
    assert all("is not one directory for all ranks: rank 1 does not see" in str(each) for each in outcomes)
    assert not any(Path(places[1], node, "ckpt", ".metadata").exists() for node in "ab")


def test_a_safetensors_save_refuses_directories_that_are_not_one(places: tuple[str, str]) -> None:
    for error in errors(run_ranks(2, on_nodes.save_safetensors, *places, ("a", "b"), init=False)):
        assert error.is_a(StorageError) and "layout='safetensors' commits on one node only" in error.message
    assert not any(Path(places[1], node, "ckpt", ".metadata").exists() for node in "ab")


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
def test_a_manager_keeps_and_removes_the_same_steps_on_every_node(places: tuple[str, str], is_async: bool) -> None:
    assert values(run_ranks(2, on_nodes.manage, *places, ("a", "b"), is_async, init=False)) == [[2, 4], [2, 4]]
    assert values(run_ranks(2, on_nodes.go_on, *places, ("b", "a"), init=False)) == [4, 4]
    assert values(run_ranks(3, on_nodes.go_on, *places, ("new", "b", "a"), init=False)) == [4, 4, 4]
