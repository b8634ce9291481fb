"""Nodes that do not share the directory of the checkpoint: each has its own under the same path."""

from __future__ import annotations

from pathlib import Path

import pytest

from robust_dcp.testing.ranks import errors, run_ranks, values
from tests.api import on_nodes

AABB = ("a", "a", "b", "b")


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    """The path under which each node has its directory, and where these directories are."""
    path, nodes = tmp_path / "seen", tmp_path / "nodes"
    path.mkdir()
    return str(path), str(nodes)


def names(places: tuple[str, str], node: str) -> set[str]:
    return {each.name for each in Path(places[1], node, "ckpt").iterdir()}


def test_each_node_gets_the_metadata_and_the_files_of_its_own_ranks(places: tuple[str, str]) -> None:
    values(run_ranks(4, on_nodes.save, *places, AABB, [1], init=False))
    of_all = {".metadata", ".robust_dcp.index", ".robust_dcp.nodes"}
    assert names(places, "a") == {*of_all, *(f"__{rank}_{number}.distcp" for rank in (0, 1) for number in (0, 1)), "__0_2.distcp"}
    assert names(places, "b") == {*of_all, "__2_0.distcp", "__2_1.distcp", "__3_0.distcp", "__3_1.distcp"}


@pytest.mark.parametrize(
    "placing",
    [AABB, ("b", "b", "a", "a"), ("a", "b"), ("b", "a", "b"), ("a", "a", "empty", "b")],
    ids="same swapped fewer three empty".split(),
)
def test_what_a_rank_does_not_see_comes_from_a_node_that_has_it(
    places: tuple[str, str], placing: tuple[str, ...]
) -> None:
    values(run_ranks(4, on_nodes.save, *places, AABB, [1], init=False))
    values(run_ranks(len(placing), on_nodes.load, *places, placing, 1, init=False))
