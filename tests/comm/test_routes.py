"""Every message has exactly one way to the coordinator, and a second level only where it saves messages."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.comm.frames import Frame, Kind
from robust_dcp.comm.nodes import NodeMap
from robust_dcp.comm.routes import route_of


def _headers(speaks: list[bool]) -> list[Frame]:
    return [
        Frame(Kind.HEADER, 1, 0, payload_nbytes=10 + rank if each else 0, payload_crc32=rank)
        for rank, each in enumerate(speaks)
    ]


@given(st.data())
def test_every_message_reaches_the_coordinator_exactly_once(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 20))
    node_of = tuple(data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)))
    speaks = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    coordinator = data.draw(st.integers(0, size - 1))
    speaks[coordinator] = False  # its own message does not travel
    headers = _headers(speaks)
    route = route_of(headers, NodeMap(node_of, "on"), coordinator)

    held: dict[int, set[int]] = {rank: {rank} if speaks[rank] else set() for rank in range(size)}
    at_coordinator: Counter[int] = Counter()
    for delivery in route.first:
        assert (delivery.nbytes, delivery.crc32) == (10 + delivery.sender, delivery.sender)
        assert delivery.receiver is not None
        if delivery.receiver == coordinator:
            at_coordinator[delivery.sender] += 1
        else:
            held[delivery.receiver].add(delivery.sender)
    verdicts = [Frame(Kind.VERDICT, 1, 0, payload_nbytes=100 + rank, payload_crc32=200 + rank) for rank in range(size)]
    second = route.second(verdicts)
    for delivery in second:
        leader = delivery.sender
        assert (delivery.nbytes, delivery.crc32, delivery.receiver) == (100 + leader, 200 + leader, coordinator)
        assert tuple(sorted(held[leader])) == route.bundled[leader]
        assert len(route.bundled[leader]) > 1
        at_coordinator.update(route.bundled[leader])
    assert at_coordinator == Counter({rank: 1 for rank in range(size) if speaks[rank]})

    nodes_with_speakers = {node_of[rank] for rank in range(size) if speaks[rank]} - {node_of[coordinator]}
    mates = [rank for rank in range(size) if speaks[rank] and node_of[rank] == node_of[coordinator]]
    arriving = sum(delivery.receiver == coordinator for delivery in route.first) + len(second)
    assert arriving == len(nodes_with_speakers) + len(mates)


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_with_one_level_all_send_to_the_coordinator(speaks: list[bool]) -> None:
    speaks[0] = False
    route = route_of(_headers(speaks), NodeMap(tuple(rank // 2 for rank in range(len(speaks))), "off"), 0)
    assert not route.bundled
    assert [(each.sender, each.receiver) for each in route.first] == [
        (rank, 0) for rank, each in enumerate(speaks) if each
    ]
