"""Faults between ranks: what arrives at one rank is damaged, as a network card or a library might."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from robust_dcp.comm import Channel
from robust_dcp.comm.pipe import Payload, Pipe

FrameFault = Callable[[bytes], bytes]
PayloadFault = Callable[[bytearray], bytearray]


class FaultyPipe:
    """``inner``, with what arrives passed through ``frame_fault`` and ``payload_fault``."""

    def __init__(self, inner: Pipe, frame_fault: FrameFault, payload_fault: PayloadFault) -> None:
        self.inner = inner
        self.frame_fault = frame_fault
        self.payload_fault = payload_fault

    def send(self, data: Payload, tag: int) -> object:
        return self.inner.send(data, tag)

    def next_frame(self) -> bytes:
        return self.frame_fault(self.inner.next_frame())

    def receive(self, nbytes: int, tag: int) -> bytearray:
        return self.payload_fault(self.inner.receive(nbytes, tag))

    def close(self) -> None:
        self.inner.close()


def inject(
    channel: Channel,
    sender: int,
    *,
    frames: FrameFault = lambda frame: frame,
    payload: PayloadFault = lambda payload: payload,
) -> None:
    """Damage what arrives at this rank from ``sender``, from the next connection on."""
    meeting = channel._link._meeting
    assert meeting is not None
    connect = meeting.connect

    def connect_faulty(peer: int, generation: int, purpose: str = "exchanges", **how: Any) -> Pipe:
        pipe = connect(peer, generation, purpose, **how)
        return FaultyPipe(pipe, frames, payload) if peer == sender and purpose == "exchanges" else pipe

    meeting.connect = connect_faulty  # type: ignore[method-assign]


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
