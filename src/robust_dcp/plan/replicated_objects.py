"""Replicated objects that differ between ranks: found by digests in every save, and reported as the user asks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from robust_dcp.errors import ExchangeError, PlanConflict, ranks_in_words

__all__ = ["ObjectDigests", "report_differing"]

logger = logging.getLogger(__name__)

_UNKNOWN = np.iinfo(np.uint64).max

_reported: set[str] = set()
"""Names that this process has warned of. An object that differs by design (a rank's RNG state) is reported once."""


class ObjectDigests(msgspec.Struct, frozen=True):
    """uint64 for each object that every rank of the group holds, in the order of their names.

    These are the digests of one rank, or the lowest and highest of several ranks. 0 means unknown, and equals
    everything.
    """

    lowest: bytes
    highest: bytes

    @classmethod
    def of(cls, digests: npt.NDArray[np.uint64]) -> ObjectDigests:
        """The digests of one rank."""
        known = np.where(digests == 0, _UNKNOWN, digests)
        return cls(known.astype("<u8").tobytes(), digests.astype("<u8").tobytes())

    def with_other(self, other: ObjectDigests) -> ObjectDigests:
        """Combine the digests of two sets of ranks.

        Raises:
            ExchangeError: they are not for the same objects.
        """
        if len(self.lowest) != len(other.lowest) or len(self.highest) != len(other.highest):
            raise ExchangeError("some ranks did not send one digest for each of the objects that all ranks hold")
        return ObjectDigests(
            np.minimum(_array(self.lowest), _array(other.lowest)).tobytes(),
            np.maximum(_array(self.highest), _array(other.highest)).tobytes(),
        )

    def differing(self, names: Sequence[str], n_ranks: int) -> dict[str, tuple[int, ...]]:
        """The names with digests that differ between ranks, each with all ranks.

        Raises:
            ExchangeError: there is not one digest for each name.
        """
        if len(self.lowest) != 8 * len(names) or len(self.highest) != 8 * len(names):
            raise ExchangeError(f"{len(self.highest)} bytes of digests came for {len(names)} objects")
        differs = np.flatnonzero(_array(self.lowest) < _array(self.highest))
        return {names[place]: tuple(range(n_ranks)) for place in differs.tolist()}


def _array(data: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(data, dtype="<u8")


def report_differing(differing: Mapping[str, tuple[int, ...]], mode: str, *, is_reporter: bool) -> None:
    """Warn of objects that differ, or refuse them.

    Raises:
        PlanConflict: with ``mode="error"``, on every rank.
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
