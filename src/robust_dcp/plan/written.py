"""What a rank tells of the files it has written: only what the plan did not determine.

Owns the 64-bit word that stands in its header, the message with the places that are new, and the check that rank and
coordinator mean the same places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.errors import ExchangeError
from robust_dcp.storage.writing.engine import WrittenFiles

__all__ = ["WrittenMessage", "news_of", "word_of", "written_by_all"]

Places = npt.NDArray[np.int64]

_DIGEST_BITS = 40
_MAX_GENERATION = (1 << (64 - _DIGEST_BITS)) - 1


class WrittenMessage(msgspec.Struct, frozen=True):
    """Places of items of variable size that the coordinator does not know yet.

    Attributes:
        items: int64 ``[n]``, which of the rank's items of variable size, in plan order.
        places: int64 ``[n, 2]``, offset and length of each.
        unloadable: objects that a load would refuse, and why, by key.
    """

    items: bytes
    places: bytes
    unloadable: dict[str, str] = {}


def word_of(written: WrittenFiles) -> int:
    """64 bits for the header: the generation of the file names, and a digest of all places of variable items.

    With it the coordinator never fills in places that the rank did not mean.
    """
    if written.generation > _MAX_GENERATION:
        raise ValueError(f"more than {_MAX_GENERATION} saves have left files in one directory: clean it up")
    return written.generation << _DIGEST_BITS | _digest(written.variable_places)


def news_of(places: Places, known: Places | None, unloadable: Mapping[str, str] | None = None) -> WrittenMessage | None:
    """What the coordinator has to be told; ``None`` if it knows all.

    Args:
        known: this rank's places in the last committed save by the same plan, as the coordinator has them.
        unloadable: objects that a load would refuse, and why.
    """
    new = np.arange(len(places))
    if known is not None and len(known) == len(places):
        new = np.flatnonzero((known != places).any(axis=1))
    if not len(new) and not unloadable:
        return None
    return WrittenMessage(
        items=new.astype("<i8").tobytes(),
        places=places[new].astype("<i8").tobytes(),
        unloadable=dict(unloadable or {}),
    )


def written_by_all(
    words: Sequence[int], messages: Sequence[WrittenMessage | None], known: Sequence[Places] | None
) -> tuple[WrittenFiles, ...]:
    """What every rank has written; on the coordinator.

    Args:
        words: from the header of each rank, :func:`word_of`.
        messages: from each rank, :func:`news_of`.
        known: the places of each rank in the last committed save by the same plan.

    Raises:
        ExchangeError: if a rank's places are not those that it means.
    """
    return tuple(
        _written(rank, word, message, None if known is None else known[rank])
        for rank, (word, message) in enumerate(zip(words, messages, strict=True))
    )


def _written(rank: int, word: int, message: WrittenMessage | None, known: Places | None) -> WrittenFiles:
    places = np.empty((0, 2), dtype=np.int64) if known is None else known
    if message is not None:
        places = _updated(places, message)
    if _digest(places) != word & ((1 << _DIGEST_BITS) - 1):
        raise ExchangeError(
            f"the places of the objects that rank {rank} wrote are out of step with the coordinator's; save again",
            ranks=[rank],
        )
    return WrittenFiles(generation=word >> _DIGEST_BITS, variable_places=places, names=(), nbytes=0)


def _updated(places: Places, message: WrittenMessage) -> Places:
    n_items = len(message.items) // 8
    if len(message.items) % 8 or len(message.places) != 16 * n_items:
        raise ExchangeError(f"{len(message.places)} bytes of places came for {len(message.items)} bytes of items")
    items = np.frombuffer(message.items, dtype="<i8")
    news = np.frombuffer(message.places, dtype="<i8").reshape(-1, 2)
    if n_items and not 0 <= items.min() <= items.max() < len(places) + n_items:
        raise ExchangeError(f"a place came for item {items.max()} of {len(places) + n_items} of variable size at most")
    updated = np.zeros((max(len(places), int(items.max(initial=-1)) + 1), 2), dtype=np.int64)
    updated[: len(places)] = places
    updated[items] = news
    return updated


def _digest(places: Places) -> int:
    data = places.astype("<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=_DIGEST_BITS // 8).digest(), "little")
