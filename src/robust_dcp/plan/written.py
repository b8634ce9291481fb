"""What a rank tells of the files it has written: only what the plan did not determine.

Owns the message and the check that rank and coordinator mean the same places when none are sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.errors import ExchangeError
from robust_dcp.plan.cache import CoordinatorPlan
from robust_dcp.storage.engine import WrittenFiles

__all__ = ["WrittenMessage", "news_of", "written_by_all"]

Places = npt.NDArray[np.int64]


class WrittenMessage(msgspec.Struct, frozen=True):
    """The generation of the rank's file names, and where its items of variable size came to lie.

    Attributes:
        places: int64 ``[v, 2]``, offset and length; ``None`` if they are those of the last committed save.
        places_digest: of the places, sent or not: the coordinator never fills in places that the rank did not mean.
    """

    generation: int
    places: bytes | None
    places_digest: bytes


def news_of(written: WrittenFiles, known: Places | None) -> WrittenMessage | None:
    """What the coordinator has to be told; ``None`` if the plan says it all.

    Args:
        known: this rank's places in the last committed save by the same plan, as the coordinator has them.
    """
    places = written.variable_places
    if written.generation == 0 and not len(places):
        return None
    same = known is not None and np.array_equal(known, places)
    return WrittenMessage(
        generation=written.generation,
        places=None if same else places.astype("<i8").tobytes(),
        places_digest=_digest(places),
    )


def written_by_all(messages: Sequence[WrittenMessage | None], plan: CoordinatorPlan) -> tuple[WrittenFiles, ...]:
    """What every rank has written, from its message and the plan; on the coordinator.

    Raises:
        ExchangeError: if a rank's places are not those that the coordinator knows.
    """
    return tuple(
        _written(rank, message, None if plan.variable_places is None else plan.variable_places[rank])
        for rank, message in enumerate(messages)
    )


def _written(rank: int, message: WrittenMessage | None, known: Places | None) -> WrittenFiles:
    if message is None:
        places, generation = np.empty((0, 2), dtype=np.int64), 0
    else:
        generation = message.generation
        found = known if message.places is None else _places(message.places)
        if found is None or _digest(found) != message.places_digest:
            raise ExchangeError(
                f"the places of the objects that rank {rank} wrote are out of step with the coordinator's; save again",
                ranks=[rank],
            )
        places = found
    return WrittenFiles(generation=generation, variable_places=places, names=(), nbytes=0)


def _places(data: bytes) -> Places:
    if len(data) % 16:
        raise ExchangeError(f"places of variable items have {len(data)} bytes, not a multiple of 16")
    return np.frombuffer(data, dtype="<i8").reshape(-1, 2).astype(np.int64)


def _digest(places: Places) -> bytes:
    return hashlib.blake2b(places.astype("<i8").tobytes(), digest_size=8).digest()
