"""What a rank reports about the files it has written: only what does not follow from the plan.

This module makes each rank's offer and the message with new places. It also checks that the coordinator has the places
that the ranks meant.
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
from robust_dcp.storage.writing.engine import WrittenFiles

__all__ = [
    "LEADS_DIRECTORY",
    "WrittenMessage",
    "written_by_all",
    "written_message",
    "written_offer",
]

Places = npt.NDArray[np.int64]

LEADS_DIRECTORY = 1
"""Flag of the offer of :func:`written_offer`: this rank does not see the coordinator's directory, and is the first of
those that see its own."""


class WrittenMessage(msgspec.Struct, frozen=True):
    """Places of items of variable size that the coordinator does not know yet.

    Attributes:
        items: int64 ``[n]``, which of the rank's items of variable size, in plan order.
        places: int64 ``[n, 2]``, offset and length of each.
        unloadable: objects that a load would refuse, and why, by key.
        row: what the report of the save says of this rank; no bytes if there is to be no report.
        node, how: the name of the rank's node, and how it wrote. They are not in the row, because what many ranks have
            in common is sent once.
    """

    items: bytes
    places: bytes
    unloadable: dict[str, str] = {}
    row: bytes = b""
    node: str = ""
    how: tuple[str, ...] = ()


def written_offer(written: WrittenFiles | None, *, leads_directory: bool = False) -> Offer:
    """The offer has a digest of the places of all variable items. So the coordinator notices if it would fill in other
    places than a rank meant.
    """
    if written is None:
        return Offer()
    flags = LEADS_DIRECTORY if leads_directory else 0
    return Offer(signature=_digest(written.variable_places), flags=flags)


def written_message(
    places: Places,
    known: Places | None,
    unloadable: Mapping[str, str] | None = None,
    said: SaidOfRank | None = None,
) -> WrittenMessage | None:
    """The message to the coordinator; ``None`` if it knows everything.

    Args:
        known: this rank's places in the last committed save with the same plan, as the coordinator has them.
        unloadable: as in :class:`WrittenMessage`.
        said: this rank's row, node and ways of writing; ``None`` if there is to be no report.
    """
    new = np.arange(len(places))
    if known is not None and len(known) == len(places):
        new = np.flatnonzero((known != places).any(axis=1))
    if not len(new) and not unloadable and said is None:
        return None
    return WrittenMessage(
        items=new.astype("<i8").tobytes(),
        places=places[new].astype("<i8").tobytes(),
        unloadable=dict(unloadable or {}),
        **({} if said is None else said._asdict()),
    )


def written_by_all(
    messages: Sequence[WrittenMessage | None],
    known: Sequence[Places] | None,
    digest: bytes,
    combined: Callable[[Sequence[bytes]], bytes],
) -> tuple[WrittenFiles, ...]:
    """What every rank has written, on the coordinator.

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
    places = [
        each if message is None else _updated(each, message) for each, message in zip(places, messages, strict=True)
    ]
    if combined([_digest(each) for each in places]) != digest:
        raise ExchangeError(
            "the places of the objects that ranks wrote are not those that the coordinator has; save again"
        )
    return tuple(WrittenFiles(variable_places=each, names=(), nbytes=0) for each in places)


def _updated(places: Places, message: WrittenMessage) -> Places:
    n_items = len(message.items) // 8
    if len(message.items) % 8 or len(message.places) != 16 * n_items:
        raise ExchangeError(f"{len(message.places)} bytes of places came for {len(message.items)} bytes of items")
    items = np.frombuffer(message.items, dtype="<i8")
    changed = np.frombuffer(message.places, dtype="<i8").reshape(-1, 2)
    if n_items and not 0 <= items.min() <= items.max() < len(places) + n_items:
        raise ExchangeError(f"a place came for item {items.max()} of {len(places) + n_items} of variable size at most")
    updated = np.zeros((max(len(places), int(items.max(initial=-1)) + 1), 2), dtype=np.int64)
    updated[: len(places)] = places
    updated[items] = changed
    return updated


def _digest(places: Places) -> bytes:
    return hashlib.blake2b(places.astype("<i8").tobytes(), digest_size=16).digest()
