"""Opening the gloo transport of a generation: first all ranks meet in the store, then they connect.

gloo's own wait for a missing rank cannot be interrupted and names nobody. So ranks wait for each other here, where
they notice that another has given up. Called by the link through the registry; it keeps no state.
"""

from __future__ import annotations

import time
from typing import Any

from robust_dcp.comm import process_group
from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.roll_call import RollCall, StoreLost
from robust_dcp.comm.transport import GlooTransport, TransportFailure

__all__ = ["open_gloo"]

_FIRST_POLL_SECONDS = 0.002
_LAST_POLL_SECONDS = 0.25
_POLL_GROWTH = 1.3


def open_gloo(
    store: Any, prefix: str, roll_call: RollCall, rank: int, size: int, generation: int, deadline: Deadline
) -> GlooTransport:
    """Connect all ``size`` ranks.

    Args:
        store: where gloo's addresses are exchanged.
        prefix: of the keys of this link in ``store``.
        roll_call: of this link.
        rank: of this process in the group.
        size: of the group.
        generation: which transport of the link it is; each rank opens it once.
        deadline: when to give up.

    Raises:
        TransportFailure: some rank did not come in time, or one gave up, or they cannot reach each other.
    """
    try:
        _meet(roll_call, size, generation, deadline)
        group = process_group.connect(store, f"{prefix}/{generation}/gloo", rank, size, deadline.as_timeout())
    except StoreLost as error:
        detail = f"the store does not answer: {error}"
    except RuntimeError as error:
        detail = str(error)
    else:
        return GlooTransport(group, rank, size)
    raise TransportFailure(None, f"connecting: {detail}")


def _meet(roll_call: RollCall, size: int, generation: int, deadline: Deadline) -> None:
    """Wait until all ranks have come."""
    roll_call.arrive(generation)
    pause_seconds = _FIRST_POLL_SECONDS
    while (present := roll_call.count_arrived(generation)) < size:
        if roll_call.has_ended(generation):
            raise TransportFailure(None, "another rank has given up")
        if deadline.has_passed:
            raise TransportFailure(None, f"{present} of {size} ranks came")
        # The longer it has taken, the longer it may take, and the less the store should suffer for it.
        time.sleep(min(pause_seconds, deadline.seconds_left))
        pause_seconds = min(_LAST_POLL_SECONDS, pause_seconds * _POLL_GROWTH)
