"""Replicated objects that differ between ranks: told by digest on every save, named, and reported as the user asks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from robust_dcp.errors import ExchangeError, PlanConflict, ranks_in_words

__all__ = ["ObjectDigests", "differing_digests", "report_differing"]

logger = logging.getLogger(__name__)

_reported: set[str] = set()
"""Names that this process has warned of: an object that differs by design (a rank's RNG state) is told once."""


class ObjectDigests(msgspec.Struct, frozen=True):
    """uint64 for each object that every rank of the group holds, in the order of their names."""

    digests: bytes


def differing_digests(names: Sequence[str], gathered: Sequence[ObjectDigests]) -> dict[str, tuple[int, ...]]:
    """Names whose digests differ between ranks, with all ranks; a digest of 0 is unknown and equals everything.

    Raises:
        ExchangeError: if a rank did not send one digest for each name.
    """
    short = [rank for rank, message in enumerate(gathered) if len(message.digests) != 8 * len(names)]
    if short:
        raise ExchangeError(
            f"{ranks_in_words(short)} did not send one digest for each of the {len(names)} objects that all ranks hold",
            ranks=short,
        )
    digests = np.stack([np.frombuffer(message.digests, dtype="<u8") for message in gathered])
    low = np.where(digests == 0, np.iinfo(np.uint64).max, digests).min(axis=0)
    differs = np.flatnonzero(low < digests.max(axis=0))
    return {names[place]: tuple(range(len(gathered))) for place in differs.tolist()}


def report_differing(differing: Mapping[str, tuple[int, ...]], mode: str, *, is_reporter: bool) -> None:
    """Warn of objects that differ, or refuse them.

    Raises:
        PlanConflict: with ``mode="error"``, on every rank alike.
    """
    if not differing or mode == "ignore":
        return
    name, ranks = next(iter(differing.items()))
    text = (
        f"{len(differing)} object(s) of one name differ between ranks, only the copy of the lowest rank is saved: "
        + ", ".join(f"{name!r} ({ranks_in_words(list(ranks))})" for name, ranks in list(differing.items())[:8])
        + ". Give them a name for each rank (f'rng_state.{rank}') if each copy matters"
    )
    if mode == "error":
        raise PlanConflict(text, key=name, ranks=list(ranks))
    if is_reporter and not _reported.issuperset(differing):
        _reported.update(differing)
        logger.warning("%s", text)
