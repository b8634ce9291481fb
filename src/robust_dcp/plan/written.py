"""What a rank tells of the files it has written: only what does not follow from the plan.

This module makes each rank's offer and message, and checks that the coordinator has the places that the ranks meant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.comm import Offer
from robust_dcp.errors import ExchangeError
from robust_dcp.report_rows import SaidOfRank

Places = npt.NDArray[np.int64]

LEADS_DIRECTORY = 1
"""Flag of the offer of :func:`written_offer`: this rank does not see the coordinator's directory, and is the first of
those that see its own."""


class Written(SaidOfRank, frozen=True):
    """What a rank tells of what it has written, with what the report of the save says of it.

    Attributes:
        places: int64 ``[n, 2]``, offset and length of the rank's items of variable size, in plan order. No bytes if the
            coordinator knows these places.
        unloadable: objects that a load would refuse, and why, by key.
    """

    places: bytes = b""
    unloadable: dict[str, str] = msgspec.field(default_factory=dict)


def written_offer(places: Places, *, leads_directory: bool = False) -> Offer:
    """The offer has a digest of the places of a rank's variable items. So the coordinator notices if it would fill in
    other places than a rank meant."""
    return Offer(signature=_digest(places), flags=LEADS_DIRECTORY if leads_directory else 0)


def written_message(
    places: Places,
    known: Places | None,
    unloadable: Mapping[str, str] | None = None,
    said: SaidOfRank | None = None,
) -> Written | None:
    """The message to the coordinator; ``None`` if it knows everything.

    Args:
        known: this rank's places in the last committed save with the same plan, as the coordinator has them.
        unloadable: as in :class:`Written`.
        said: this rank's row, node and ways of writing; ``None`` if there is to be no report.
    """
    new = b"" if known is not None and np.array_equal(known, places) else places.astype("<i8").tobytes()
    if not new and not unloadable and said is None:
        return None
    row = {} if said is None else msgspec.structs.asdict(said)
    return Written(places=new, unloadable=dict(unloadable or {}), **row)


def places_of_all(
    messages: Sequence[Written | None],
    known: Sequence[Places] | None,
    digest: bytes,
    combined: Callable[[Sequence[bytes]], bytes],
) -> tuple[Places, ...]:
    """The places of the variable items of every rank, on the coordinator.

    Args:
        messages: the :func:`written_message` of each rank.
        known: the places of each rank in the last committed save with the same plan.
        digest: the combined digests of all ranks (:func:`written_offer`).
        combined: combines digests in rank order in the same way.

    Raises:
        ExchangeError: the coordinator's places are not those that the ranks meant.
    """
    none = np.empty((0, 2), dtype=np.int64)
    places = [none if known is None else known[rank] for rank in range(len(messages))]
    for rank, message in enumerate(messages):
        if message is not None and message.places:
            if len(message.places) % 16:
                raise ExchangeError(f"rank {rank} sent {len(message.places)} bytes of places", ranks=[rank])
            places[rank] = np.frombuffer(message.places, dtype="<i8").reshape(-1, 2)
    if combined([_digest(each) for each in places]) != digest:
        raise ExchangeError(
            "the places of the objects that ranks wrote are not those that the coordinator has; save again"
        )
    return tuple(places)


def _digest(places: Places) -> bytes:
    return hashlib.blake2b(places.astype("<i8").tobytes(), digest_size=16).digest()
