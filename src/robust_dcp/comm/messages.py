"""The messages of one exchange, on their way up the tree: bundled by rank, merged where they meet, opened at the top.

This module knows the type of the messages and the name of the exchange, which every error about them names. It never
sends anything: ``channel`` hands its methods to the operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import msgspec

from robust_dcp.comm.bundle import Bundler, merge_bundles, open_bundles
from robust_dcp.comm.pipe import Payload
from robust_dcp.errors import ExchangeError

__all__ = ["Messages"]

M = TypeVar("M", bound=msgspec.Struct)


class Messages(Generic[M]):
    """The messages of one exchange.

    Args:
        phase: the name of the exchange.
        message_type: the type that messages are decoded as and checked against.
    """

    def __init__(self, phase: str, message_type: type[M]) -> None:
        self._phase = phase
        self._type = message_type

    def bundled(self, rank: int, message: M | None) -> Payload:
        """Encode the message of one rank; no bytes if it has none."""
        if message is None:
            return b""
        bundler = Bundler(self._type)
        bundler.add(rank, message)
        return bundler.encode()

    def merge(self, own: Payload, below: Sequence[Payload]) -> Payload:
        """Make one payload of this rank's and those from below it in the tree.

        Raises:
            ExchangeError: one cannot be decoded.
        """
        with self._phase_in_error():
            return merge_bundles([own, *below], self._type)

    def open(self, payloads: Sequence[Payload]) -> dict[int, M]:
        """Decode all messages, by rank.

        Raises:
            ExchangeError: one cannot be decoded.
        """
        with self._phase_in_error():
            return open_bundles(payloads, self._type)

    @contextmanager
    def _phase_in_error(self) -> Iterator[None]:
        try:
            yield
        except ExchangeError as error:
            raise ExchangeError(f"{self._phase!r}: {error.message}", phase=self._phase, ranks=error.ranks) from None
