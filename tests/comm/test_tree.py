"""What ranks offer adds up to the same, however the tree lies; the tree reaches every rank once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.comm import Agreement, Offer
from robust_dcp.comm.combine import N_FLAGS
from robust_dcp.comm.tree import Tree
from tests.comm.messages import combined_signature

sizes = st.integers(1, 300)


@given(sizes, st.integers(0, 299))
def test_all_ranks_hang_on_the_root_and_those_below_a_rank_follow_it_child_by_child(size: int, root: int) -> None:
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
        assert tree.below == [rank, *(below for child in tree.children for below in tree.ranks_below(child))]
    assert sorted(trees[root].below) == list(range(size))


offers = st.builds(
    Offer,
    signature=st.binary(min_size=16, max_size=16),
    same=st.sampled_from([bytes(16), bytes([1]) * 16, bytes([2]) * 16]),
    value=st.sampled_from([0, 0, 1, 5, 2**64 - 1]),
    flags=st.integers(0, (1 << N_FLAGS) - 1),
)


def agreed(of_all: list[Offer], root: int = 0, rank: int | None = None) -> Agreement:
    """What ``rank`` (the root) has combined of its own offer and those of all ranks below it."""
    tree = Tree(root if rank is None else rank, len(of_all), root)
    children = [agreed(of_all, root, child) for child in tree.children]
    return Agreement.decode(Agreement.of(tree.rank, of_all[tree.rank], children).encode())


@given(st.lists(offers, min_size=1, max_size=40), st.integers(0, 39))
def test_an_agreement_is_what_one_rank_would_say_that_sees_all_offers(of_all: list[Offer], root: int) -> None:
    root %= len(of_all)
    found = agreed(of_all, root)
    values = [offer.value for offer in of_all if offer.value]
    assert found.n_ranks == len(of_all)
    assert found.same == of_all[root].same
    assert found.is_same == (len({offer.same for offer in of_all}) == 1)
    assert (found.lowest, found.highest) == (min(values, default=0), max(values, default=0))
    assert not values or of_all[found.lowest_rank].value == found.lowest
    assert not values or of_all[found.highest_rank].value == found.highest
    assert found.same_value == (len(set(values)) <= 1)
    for bit in range(N_FLAGS):
        having = [rank for rank, offer in enumerate(of_all) if offer.flags >> bit & 1]
        assert found.count(1 << bit) == len(having)
        first = found.first_rank(1 << bit)
        assert first is None if not having else first in having
    assert found.signature == combined_signature([offer.signature for offer in of_all], root)
