"""Gathers by way of node leaders, on real ranks that count as several nodes: the same result, at less cost."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from robust_dcp.comm import Channel, ExchangeStats, nodes, transport
from robust_dcp.comm.nodes import RANKS_PER_NODE, TWO_LEVEL_GATHER
from robust_dcp.comm.roll_call import RollCall
from robust_dcp.errors import ExchangeTimeout, RobustCheckpointError
from tests.comm.messages import Columns
from tests.support.ranks import errors, run_ranks, values

SIZE = 8
SHARED_NBYTES = 50_000
COORDINATORS = (0, 5)

Speaks = Callable[[int], bool]
SPEAKERS: dict[str, Speaks] = {
    "all": lambda rank: True,
    "none": lambda rank: False,
    "no leader": lambda rank: rank not in (0, 2, 3, 4, 6),
    "leaders only": lambda rank: rank in (0, 2, 3, 4, 6),
    "two ranks": lambda rank: rank in (6, 7),
    "not a whole node": lambda rank: rank not in (3, 4, 5),
}


def _two_levels(ranks_per_node: int, switch: str = "on") -> dict[str, str]:
    return {RANKS_PER_NODE: str(ranks_per_node), TWO_LEVEL_GATHER: switch}


def _columns(rank: int) -> Columns:
    # Random, so that they do not get smaller; equal on pairs of ranks of different nodes, or on all of them.
    shared = random.Random(rank % 2).randbytes(SHARED_NBYTES)
    note = None if rank % 3 else "every third"
    return Columns(("weight", "bias"), shared, random.Random(rank).randbytes(500), note)


def _gather(channel: Channel, speaks: Speaks) -> list[Columns | None] | None:
    return channel.gather(
        "structures",
        lambda: _columns(channel.rank) if speaks(channel.rank) else None,
        Columns,
        value=lambda message: 7 if message is None else channel.rank,
    )


def _gather_both_ways() -> dict[tuple[str, int], dict[str, Any]]:
    transport.CHUNK_NBYTES = 20_000
    two_levels = Channel.for_group(timeout_seconds=50)
    two_levels.barrier("connect")
    os.environ[TWO_LEVEL_GATHER] = "off"
    one_level = Channel.for_group(timeout_seconds=50, purpose="one level")
    seen: dict[tuple[str, int], dict[str, Any]] = {}
    for who, speaks in SPEAKERS.items():
        for coordinator_rank in COORDINATORS:
            channel, other = two_levels.led_by(coordinator_rank), one_level.led_by(coordinator_rank)
            with channel.recording() as cost, other.recording() as other_cost:
                found, expected = _gather(channel, speaks), _gather(other, speaks)
            assert found == expected
            assert channel.last_values == tuple(rank if speaks(rank) else 7 for rank in range(SIZE))
            present = [message for message in found or () if message is not None]
            arrived = [message for rank, message in enumerate(found or ()) if message and rank != coordinator_rank]
            seen[who, coordinator_rank] = {
                "ranks": [rank for rank, message in enumerate(found or ()) if message is not None],
                "right": present == [_columns(rank) for rank in range(SIZE) if speaks(rank)] if found else None,
                "objects": len({id(message.shared) for message in arrived}),
                "cost": cost,
                "other cost": other_cost,
            }
    return seen


@pytest.fixture(scope="module", params=[2, 3, 4], ids=lambda ranks_per_node: f"{ranks_per_node} ranks a node")
def gathered(request: pytest.FixtureRequest) -> tuple[int, list[dict[tuple[str, int], dict[str, Any]]]]:
    outcomes = run_ranks(SIZE, _gather_both_ways, env=_two_levels(request.param))
    return request.param, values(outcomes)


Gathered = tuple[int, list[dict[tuple[str, int], dict[str, Any]]]]


@pytest.mark.parametrize("coordinator_rank", COORDINATORS)
@pytest.mark.parametrize("who", SPEAKERS)
def test_the_coordinator_has_what_it_has_in_one_level(gathered: Gathered, who: str, coordinator_rank: int) -> None:
    _, seen = gathered
    speaking = [rank for rank in range(SIZE) if SPEAKERS[who](rank)]
    for rank in range(SIZE):
        outcome = seen[rank][who, coordinator_rank]
        assert outcome["ranks"] == (speaking if rank == coordinator_rank else [])
        assert outcome["right"] is (True if rank == coordinator_rank else None)


@pytest.mark.parametrize("coordinator_rank", COORDINATORS)
def test_the_coordinator_receives_a_payload_from_each_rank_of_its_node_and_each_other_node(
    gathered: Gathered, coordinator_rank: int
) -> None:
    ranks_per_node, seen = gathered
    n_nodes = -(-SIZE // ranks_per_node)
    first = coordinator_rank // ranks_per_node * ranks_per_node
    n_mates = min(ranks_per_node, SIZE - first) - 1
    outcome = seen[coordinator_rank]["all", coordinator_rank]
    assert outcome["cost"].payloads_received == n_mates + n_nodes - 1
    assert outcome["other cost"].payloads_received == SIZE - 1


@pytest.mark.parametrize("coordinator_rank", COORDINATORS)
def test_equal_columns_reach_the_coordinator_once_for_each_node_and_are_one_object(
    gathered: Gathered, coordinator_rank: int
) -> None:
    ranks_per_node, seen = gathered
    outcome = seen[coordinator_rank]["all", coordinator_rank]
    nodes_of_ranks = [rank // ranks_per_node for rank in range(SIZE)]
    expected = 0
    for node in set(nodes_of_ranks):
        ranks = [rank for rank in range(SIZE) if nodes_of_ranks[rank] == node]
        own_node = coordinator_rank in ranks
        expected += len(ranks) - 1 if own_node else len({rank % 2 for rank in ranks})
    assert outcome["objects"] == 2
    found = outcome["cost"].payload_nbytes_received
    assert expected * SHARED_NBYTES < found < expected * SHARED_NBYTES + SIZE * 700
    assert outcome["other cost"].payload_nbytes_received > 7 * SHARED_NBYTES


def test_what_a_second_level_costs_is_one_more_verdict(gathered: Gathered) -> None:
    _, seen = gathered
    for rank in range(SIZE):
        outcome = seen[rank]["all", 0]
        assert (outcome["cost"].header_nbytes_sent, outcome["other cost"].header_nbytes_sent) == (384, 256)


def test_where_nobody_speaks_a_gather_costs_128_bytes_a_rank_in_two_levels_too(gathered: Gathered) -> None:
    _, seen = gathered
    for rank in range(SIZE):
        cost: ExchangeStats = seen[rank]["none", 0]["cost"]
        assert (cost.header_nbytes_sent, cost.payloads_received, cost.payload_nbytes_sent) == (128, 0, 0)
        assert cost.messages_sent == cost.messages_received == 2 * 3  # two rounds of log2(8) steps


def _costs(n_gathers: int = 1) -> list[int]:
    channel = Channel.for_group(timeout_seconds=50)
    with channel.recording() as cost:
        for _ in range(n_gathers):
            found = _gather(channel, SPEAKERS["all"])
    assert found is None or found == [_columns(rank) for rank in range(channel.size)]
    return [cost.payloads_received, cost.header_nbytes_sent]


def _costs_from_8_ranks_on() -> list[int]:
    nodes.TWO_LEVEL_FROM_RANKS = 8
    return _costs()


@pytest.mark.parametrize(
    ("ranks_per_node", "function", "expected"),
    [
        (4, _costs, [7, 256]),
        (4, _costs_from_8_ranks_on, [4, 384]),
        (8, _costs_from_8_ranks_on, [7, 256]),
        (1, _costs_from_8_ranks_on, [7, 256]),
    ],
)
def test_without_a_switch_large_groups_on_several_nodes_gather_in_two_levels(
    ranks_per_node: int, function: Callable[[], list[int]], expected: list[int]
) -> None:
    assert values(run_ranks(SIZE, function, env=_two_levels(ranks_per_node, "auto")))[0] == expected


def _costs_where_ranks_are_configured_differently(of_rank_0: str, of_others: str) -> list[int]:
    rank = int(os.environ["RANK"])
    os.environ[TWO_LEVEL_GATHER] = of_others if rank else of_rank_0
    if rank == 5:
        del os.environ[RANKS_PER_NODE]
    if rank in (6, 7):
        os.environ[RANKS_PER_NODE] = "3"
    return _costs()


@pytest.mark.parametrize(("of_rank_0", "of_others", "n_payloads"), [("on", "off", 5), ("off", "on", 7)])
def test_ranks_that_are_configured_differently_all_do_what_rank_0_says(
    of_rank_0: str, of_others: str, n_payloads: int
) -> None:
    # As they claim, ranks 0 and 1, 2 and 3, 6 and 7 share nodes; 4 and 5 are alone.
    outcomes = run_ranks(SIZE, _costs_where_ranks_are_configured_differently, of_rank_0, of_others, env=_two_levels(2))
    assert values(outcomes)[0][0] == n_payloads


def _costs_with_a_rank_of_another_version(claim: bytes | None) -> list[int]:
    if os.environ["RANK"] == "2":
        claim_node = RollCall.claim_node

        def claim_something_else(roll_call: RollCall, generation: int, _: bytes) -> None:
            if claim is not None:
                claim_node(roll_call, generation, claim)

        RollCall.claim_node = claim_something_else  # type: ignore[method-assign]
    return _costs()


@pytest.mark.parametrize("claim", [None, b"", b"\x93\x01\x02\x03", b"\xc1"])
def test_with_a_rank_that_does_not_say_where_it_is_gathers_have_one_level(claim: bytes | None) -> None:
    assert values(run_ranks(4, _costs_with_a_rank_of_another_version, claim, env=_two_levels(2)))[0] == [3, 256]


def _with_a_malformed_variable(name: str) -> list[int]:
    before = os.environ[name]
    channel = Channel.for_group(timeout_seconds=50)
    if channel.rank == 3:
        os.environ[name] = "many"
    try:
        _gather(channel, SPEAKERS["all"])
    except RobustCheckpointError:
        os.environ[name] = before
        assert _costs()[1] in (256, 384)
        assert channel._link.generation == 0
        raise
    return []


@pytest.mark.parametrize("name", [RANKS_PER_NODE, TWO_LEVEL_GATHER])
def test_a_malformed_variable_on_one_rank_is_an_error_on_all_that_names_rank_and_variable(name: str) -> None:
    for error in errors(run_ranks(4, _with_a_malformed_variable, name, env=_two_levels(2))):
        assert error.message.startswith("'structures' failed on rank 3: ValueError: ")
        assert f"{name} is 'many': set it to" in error.rank_failures[0].message


def _after_a_failure() -> list[int]:
    channel = Channel.for_group(timeout_seconds=0.7)
    with pytest.raises(ExchangeTimeout):
        channel.barrier("too late", lambda: _wait_until_given_up(channel))
    return _costs(2)


def _wait_until_given_up(channel: Channel) -> None:
    while channel.rank == 3 and channel._link.roll_call.verdict(0) is None:
        pass


def test_after_a_failure_ranks_meet_again_and_gather_in_two_levels() -> None:
    assert values(run_ranks(4, _after_a_failure, env=_two_levels(2)))[0] == [4, 768]
