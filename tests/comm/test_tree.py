"""The tree reaches every rank once, and no rank has more than log2(size) neighbours below it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.comm.tree import Tree

sizes = st.integers(1, 300)


@given(sizes, st.integers(0, 299))
def test_parents_and_children_agree_and_all_ranks_hang_on_the_root(size: int, root: int) -> None:
    root %= size
    trees = [Tree(rank, size, root) for rank in range(size)]
    assert trees[root].parent is None
    for rank, tree in enumerate(trees):
        assert all(trees[child].parent == rank for child in tree.children)
        depth, at = 0, tree
        while at.parent is not None:
            depth, at = depth + 1, trees[at.parent]
        assert at.rank == root
        assert depth <= size.bit_length()


@given(sizes, st.integers(0, 299))
def test_the_places_below_a_rank_are_its_own_and_then_those_of_its_children(size: int, root: int) -> None:
    root %= size
    for rank in range(size):
        tree = Tree(rank, size, root)
        below = [place for child in tree.children for place in tree.places_below(child)]
        assert list(tree.below) == [tree.below.start, *below]
        assert tree.ranks_by_place[tree.below.start] == rank


@given(st.integers(2, 5000))
def test_a_rank_has_few_neighbours(size: int) -> None:
    log2 = (size - 1).bit_length()
    counts = [len(Tree(rank, size).neighbours) for rank in range(size)]
    assert max(counts) <= log2
    assert sum(counts) == 2 * (size - 1)


@given(st.integers(2, 300))
def test_trees_of_all_roots_together_have_few_neighbours(size: int) -> None:
    neighbours = {peer for root in range(size) for peer in Tree(0, size, root).neighbours}
    assert len(neighbours) <= 2 * (size - 1).bit_length()
