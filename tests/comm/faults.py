"""Faults between ranks: what arrives at one rank is damaged, as a network card or a library might."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from robust_dcp.comm import Channel
from robust_dcp.comm.connections import GREETING_TAG, Connections
from robust_dcp.comm.frames import FRAME_NBYTES

FrameFault = Callable[[bytes], bytes]
PayloadFault = Callable[[bytearray], bytearray]


def inject(
    channel: Channel,
    sender: int,
    *,
    frames: FrameFault = lambda frame: frame,
    payload: PayloadFault = lambda payload: payload,
) -> None:
    """Damage what arrives at this rank from ``sender``."""
    assert channel.size > 1
    receive = Connections.receive

    def receive_damaged(self: Connections, peer: int, tag: int, nbytes: int, *args: Any, **more: Any) -> bytearray:
        data = receive(self, peer, tag, nbytes, *args, **more)
        if peer != sender or tag == GREETING_TAG:
            return data
        return bytearray(frames(bytes(data))) if nbytes == FRAME_NBYTES else payload(data)

    Connections.receive = receive_damaged  # type: ignore[method-assign]


class Damage:
    """Damages the arrivals numbered ``which`` (from 0) and lets all others pass."""

    def __init__(self, which: set[int], change: Callable[[bytearray], bytearray]) -> None:
        self.which = which
        self.change = change
        self.arrivals = 0

    def _is_due(self) -> bool:
        self.arrivals += 1
        return self.arrivals - 1 in self.which

    def payload(self, payload: bytearray) -> bytearray:
        return self.change(payload) if self._is_due() else payload

    def frame(self, frame: bytes) -> bytes:
        return bytes(self.change(bytearray(frame))) if self._is_due() else frame


def zeros(data: bytearray) -> bytearray:
    return bytearray(len(data))


def one_bit_flipped(data: bytearray) -> bytearray:
    data[len(data) // 2] ^= 0x10
    return data


def second_half_missing(data: bytearray) -> bytearray:
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    return data
