"""Opening the gloo transport of a generation: first all ranks meet in the store, then they connect.

gloo's own wait for a missing rank cannot be interrupted and names nobody. So ranks wait for each other here, where
they notice that another has given up; and here each says on which node it is, so that when they have met, all know
the same map. Called by the link through the registry; it keeps no state.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec

from robust_dcp.comm import process_group, wire
from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.link import Connection
from robust_dcp.comm.nodes import NodeClaim, NodeMap
from robust_dcp.comm.roll_call import RollCall, StoreLost
from robust_dcp.comm.transport import GlooTransport, TransportFailure

__all__ = ["open_gloo"]

_FIRST_POLL_SECONDS = 0.002
_LAST_POLL_SECONDS = 0.25
_POLL_GROWTH = 1.3


def open_gloo(
    store: Any, prefix: str, roll_call: RollCall, rank: int, size: int, generation: int, deadline: Deadline
) -> Connection:
    """Connect all ``size`` ranks, and learn on which nodes they are.

    Args:
        store: where gloo's addresses are exchanged.
        prefix: of the keys of this link in ``store``.
        roll_call: of this link.
        rank: of this process in the group.
        size: of the group.
        generation: which transport of the link it is; each rank opens it once.
        deadline: when to give up.

    Raises:
        TransportFailure: some rank did not come in time, or they cannot reach each other.
    """
    try:
        nodes = _meet(roll_call, rank, size, generation, deadline)
        group = process_group.connect(store, f"{prefix}/{generation}/gloo", rank, size, deadline.as_timeout())
    except StoreLost as error:
        detail = f"the store does not answer: {error}"
    except RuntimeError as error:
        detail = str(error)
    else:
        return Connection(GlooTransport(group, rank, size), nodes)
    raise TransportFailure(None, f"connecting: {detail}")


def _meet(roll_call: RollCall, rank: int, size: int, generation: int, deadline: Deadline) -> NodeMap:
    """Wait until all ranks have come. Either all ranks leave this in order to connect, or none does.

    The last to come decides that all connect; whoever cannot wait any longer decides that none does. The store takes
    the first decision, so nobody connects to ranks that have left. The map is there before that decision, so all who
    connect read the same.
    """
    try:
        roll_call.claim_node(generation, msgspec.msgpack.encode(NodeClaim.of_this_process(rank)))
        if roll_call.arrive(generation) == size:
            _publish_map(roll_call, size, generation)
            decision: bool | None = roll_call.decide_meeting(generation, connect=True)
        else:
            decision = _await_decision(roll_call, generation, deadline)
        if decision is None:
            decision = roll_call.decide_meeting(generation, connect=False)
    except BaseException:  # an interrupt, say: the others should not wait for this rank
        roll_call.decide_meeting(generation, connect=False)
        raise
    if not decision:
        raise TransportFailure(None, "not all ranks came in time")
    published = roll_call.nodes(generation)
    return NodeMap.unknown(size) if published is None else wire.decode(published, NodeMap)


def _publish_map(roll_call: RollCall, size: int, generation: int) -> None:
    """One rank reads what all have claimed and tells the others in one key: not every rank reads every rank's.

    A rank with another version of the package may claim nothing, or something else: then there is no map.
    """
    found = roll_call.node_claims(generation, size)
    if found is not None:
        with contextlib.suppress(msgspec.MsgspecError, ValueError):
            claims = [msgspec.msgpack.decode(claim, type=NodeClaim) for claim in found]
            roll_call.publish_nodes(generation, wire.encode(NodeMap.of(claims)))


def _await_decision(roll_call: RollCall, generation: int, deadline: Deadline) -> bool | None:
    pause_seconds = _FIRST_POLL_SECONDS
    while not deadline.has_passed:
        decision = roll_call.meeting(generation)
        if decision is not None:
            return decision
        # The longer it has taken, the longer it may take, and the less the store should suffer for it.
        time.sleep(min(pause_seconds, deadline.seconds_left))
        pause_seconds = min(_LAST_POLL_SECONDS, pause_seconds * _POLL_GROWTH)
    return None
