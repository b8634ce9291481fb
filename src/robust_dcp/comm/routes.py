"""Who sends what to whom in a gather: straight to the coordinator, or to a node leader that sends one bundle on.

Pure: from what all ranks know alike (the node map, and who has something to say) to lists of deliveries that are the
same on all ranks. Called by the gather.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from robust_dcp.comm.deliveries import Delivery
from robust_dcp.comm.frames import Frame
from robust_dcp.comm.nodes import NodeMap

__all__ = ["Route", "route_of"]


@dataclass(frozen=True)
class Route:
    """The way of every message to ``coordinator_rank``.

    Attributes:
        coordinator_rank: of this gather.
        first: the deliveries of the first level: to the leaders that make bundles, all others to the coordinator.
        bundled: for each leader that makes a bundle the ranks whose messages are in it, in ascending order; among them
            the leader, if it has something to say itself. Empty: one level is all.
    """

    coordinator_rank: int
    first: tuple[Delivery, ...]
    bundled: dict[int, tuple[int, ...]]

    def second(self, verdicts: Sequence[Frame]) -> list[Delivery]:
        """The deliveries of the second level: each bundle, as its leader announced it in ``verdicts``."""
        return [
            Delivery(leader, self.coordinator_rank, verdicts[leader].payload_nbytes, verdicts[leader].payload_crc32)
            for leader in self.bundled
        ]


def route_of(headers: Sequence[Frame], nodes: NodeMap, coordinator_rank: int) -> Route:
    """The route of the payloads that ``headers`` (of all ranks) announce.

    A node of which only one rank has something to say needs no bundle, nor does that of the coordinator.
    """
    speakers = [rank for rank, header in enumerate(headers) if header.payload_nbytes]
    bundled: dict[int, tuple[int, ...]] = {}
    if nodes.gathers_in_two_levels:
        leaders = nodes.leaders(coordinator_rank)
        led = defaultdict(list)
        for rank in speakers:
            led[leaders[rank]].append(rank)
        bundled = {
            leader: tuple(ranks) for leader, ranks in led.items() if leader != coordinator_rank and len(ranks) > 1
        }
    next_hop = {rank: leader for leader, ranks in bundled.items() for rank in ranks}
    first = tuple(
        Delivery(rank, next_hop.get(rank, coordinator_rank), headers[rank].payload_nbytes, headers[rank].payload_crc32)
        for rank in speakers
        if next_hop.get(rank) != rank
    )
    return Route(coordinator_rank, first, bundled)
