"""Which ranks share a node: made of what each rank claimed, the same for all, whatever they claimed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.comm import nodes, wire
from robust_dcp.comm.nodes import RANKS_PER_NODE, TWO_LEVEL_GATHER, NodeClaim, NodeMap, check_environment

claims = st.lists(
    st.builds(NodeClaim, node=st.sampled_from("abcd"), switch=st.sampled_from(["auto", "on", "off"])), min_size=1
)


def _map(ranks_per_node: int, size: int, switch: str = "auto") -> NodeMap:
    environment = {RANKS_PER_NODE: str(ranks_per_node), TWO_LEVEL_GATHER: switch}
    return NodeMap.of([NodeClaim.of_this_process(rank, environment) for rank in range(size)])


def test_ranks_of_one_host_and_boot_share_a_node() -> None:
    assert NodeMap.of([NodeClaim.of_this_process(rank, {}) for rank in range(3)]).node_of == (0, 0, 0)


def test_equal_names_of_hosts_are_not_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = NodeClaim.of_this_process(0, {})
    monkeypatch.setattr(nodes, "_BOOT_ID", tmp_path / "boot_id")
    without = NodeClaim.of_this_process(0, {})
    (tmp_path / "boot_id").write_text("other\n")
    other = NodeClaim.of_this_process(0, {})
    assert len({here.node, without.node, other.node}) == 3


@pytest.mark.parametrize(
    ("ranks_per_node", "size", "expected"),
    [(1, 3, (0, 1, 2)), (2, 5, (0, 0, 1, 1, 2)), (3, 8, (0, 0, 0, 1, 1, 1, 2, 2)), (8, 4, (0, 0, 0, 0))],
)
def test_the_environment_divides_the_group_in_its_order(
    ranks_per_node: int, size: int, expected: tuple[int, ...]
) -> None:
    assert _map(ranks_per_node, size).node_of == expected


def test_ranks_that_disagree_share_nodes_only_with_those_who_say_the_same() -> None:
    environments: list[dict[str, str]] = [{RANKS_PER_NODE: "2"}, {RANKS_PER_NODE: "2"}, {}, {RANKS_PER_NODE: "3"}, {}]
    claims = [NodeClaim.of_this_process(rank, environment) for rank, environment in enumerate(environments)]
    assert NodeMap.of(claims).node_of == (0, 0, 1, 2, 1)


def test_the_switch_of_rank_0_counts() -> None:
    claims = [NodeClaim("a", "on"), NodeClaim("b", "off"), NodeClaim("b", "auto")]
    assert NodeMap.of(claims).gathers_in_two_levels
    assert not NodeMap.of(claims[1:]).gathers_in_two_levels


@pytest.mark.parametrize(
    ("ranks_per_node", "size", "switch", "expected"),
    [
        (8, 64, "auto", True),
        (8, 63, "auto", False),
        (64, 64, "auto", False),
        (63, 64, "auto", True),
        (1, 64, "auto", False),
        (2, 4, "on", True),
        (8, 512, "off", False),
    ],
)
def test_two_levels_from_64_ranks_on_several_nodes_with_several_ranks(
    ranks_per_node: int, size: int, switch: str, expected: bool
) -> None:
    assert _map(ranks_per_node, size, switch).gathers_in_two_levels is expected


def test_where_not_all_ranks_have_said_where_they_are_gathers_have_one_level() -> None:
    assert NodeMap.unknown(100).node_of == tuple(range(100))
    assert not NodeMap.unknown(100).gathers_in_two_levels


@given(claims, st.data())
def test_each_node_is_led_by_its_lowest_rank_and_that_of_the_coordinator_by_the_coordinator(
    claims: list[NodeClaim], data: st.DataObject
) -> None:
    coordinator = data.draw(st.integers(0, len(claims) - 1))
    leaders = NodeMap.of(claims).leaders(coordinator)
    for rank, leader in enumerate(leaders):
        mates = [mate for mate, claim in enumerate(claims) if claim.node == claims[rank].node]
        assert leader == (coordinator if coordinator in mates else min(mates))


@given(claims)
def test_the_map_comes_out_as_it_was_published(claims: list[NodeClaim]) -> None:
    assert wire.decode(wire.encode(NodeMap.of(claims)), NodeMap) == NodeMap.of(claims)


@pytest.mark.parametrize("text", ["0", "-2", "two", "1.5", " 2", "1_000", "²", "9999999999"])
def test_a_number_of_ranks_without_meaning_is_refused_with_name_and_value(text: str) -> None:
    with pytest.raises(ValueError, match=f"{RANKS_PER_NODE} is {text!r}: set it to a number of ranks from 1 on"):
        check_environment({RANKS_PER_NODE: text})
    assert NodeClaim.of_this_process(0, {RANKS_PER_NODE: text}) == NodeClaim.of_this_process(0, {})


def test_a_switch_without_meaning_is_refused_with_name_and_value() -> None:
    with pytest.raises(ValueError, match=f"{TWO_LEVEL_GATHER} is 'yes': set it to one of"):
        check_environment({TWO_LEVEL_GATHER: "yes"})
    assert NodeClaim.of_this_process(0, {TWO_LEVEL_GATHER: "yes"}).switch == "auto"


@pytest.mark.parametrize("environment", [{}, {RANKS_PER_NODE: "8", TWO_LEVEL_GATHER: "off"}, {RANKS_PER_NODE: ""}])
def test_what_has_a_meaning_or_is_empty_is_accepted(environment: dict[str, str]) -> None:
    check_environment(environment)
