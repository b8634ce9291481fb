"""The messages of a scatter on their way down the tree. Each rank takes its own, and passes on those of ranks below."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from robust_dcp.comm import wire
from robust_dcp.comm.pipe import Payload

__all__ = ["Shares"]


class Shares(msgspec.Struct, array_like=True):
    """The encoded messages for consecutive places of the tree. It encodes to no bytes if there are none.

    A message for several ranks is held and sent once. So ``.metadata`` for the first rank of each node takes no more
    memory on the coordinator with 256 nodes than with two.

    Attributes:
        first_place: the first of these places.
        numbers: for each place the place of its message in ``payloads``; -1 if it gets none.
        payloads: the encoded messages.
    """

    first_place: int
    numbers: list[int]
    payloads: list[memoryview]

    @classmethod
    def to(cls, first_place: int, messages: Sequence[msgspec.Struct | None]) -> Shares:
        """Encode one message for each place. The same object for several places is one message."""
        number_of: dict[int, int] = {}
        payloads: list[memoryview] = []
        for message in messages:
            if message is not None and id(message) not in number_of:
                number_of[id(message)] = len(payloads)
                payloads.append(memoryview(wire.encode(message)))
        return cls(first_place, [-1 if each is None else number_of[id(each)] for each in messages], payloads)

    def of(self, places: range) -> Shares:
        """The messages for ``places``."""
        numbers = self.numbers[places.start - self.first_place : places.stop - self.first_place]
        kept = [number for number in dict.fromkeys(numbers) if number >= 0]
        new = {number: place for place, number in enumerate(kept)}
        return Shares(places.start, [new.get(number, -1) for number in numbers], [self.payloads[each] for each in kept])

    def first(self) -> Payload:
        """The message for the first place; no bytes if it gets none."""
        return self.payloads[self.numbers[0]] if self.numbers[0] >= 0 else b""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self) if self.payloads else b""

    @staticmethod
    def decode(payload: Payload) -> Shares:
        return msgspec.msgpack.decode(payload, type=Shares)
