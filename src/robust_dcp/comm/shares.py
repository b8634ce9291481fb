"""The payloads of a scatter on their way down the tree. Each rank takes its own, and passes on those of ranks below."""

from __future__ import annotations

import msgspec

from robust_dcp.comm.pipe import Payload

__all__ = ["Shares"]


class Shares(msgspec.Struct, array_like=True):
    """The payloads for consecutive places of the tree, from ``first_place`` on. It encodes to no bytes if all are
    empty."""

    first_place: int
    payloads: list[memoryview]

    def of(self, places: range) -> Shares:
        """The payloads for ``places``."""
        return Shares(places.start, self.payloads[places.start - self.first_place : places.stop - self.first_place])

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self) if any(map(len, self.payloads)) else b""

    @staticmethod
    def decode(payload: Payload) -> Shares:
        return msgspec.msgpack.decode(payload, type=Shares)
