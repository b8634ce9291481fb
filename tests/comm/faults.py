"""Faults between ranks: a transport that damages what arrives at one rank, as a network card or a library might."""

from __future__ import annotations

from collections.abc import Callable

import torch

from robust_dcp.comm import Channel
from robust_dcp.comm.deadline import Deadline
from robust_dcp.comm.link import Connection
from robust_dcp.comm.transport import Ends, Incoming, Payload, Transport

FramesFault = Callable[[list[bytes]], list[bytes]]
PayloadFault = Callable[[bytearray], bytearray]


class FaultyIncoming:
    """``inner``, passed through ``payload_fault``."""

    def __init__(self, inner: Incoming, payload_fault: PayloadFault) -> None:
        self.inner = inner
        self.payload_fault = payload_fault

    def finish(self, deadline: Deadline) -> bytearray:
        return self.payload_fault(self.inner.finish(deadline))


class FaultyTransport:
    """``inner``, with what arrives passed through ``frames_fault`` and ``payload_fault``."""

    def __init__(self, inner: Transport, frames_fault: FramesFault, payload_fault: PayloadFault) -> None:
        self.inner = inner
        self.frames_fault = frames_fault
        self.payload_fault = payload_fault

    @property
    def messages_sent(self) -> int:
        return self.inner.messages_sent

    @property
    def messages_received(self) -> int:
        return self.inner.messages_received

    def all_gather_frames(self, frame: bytes, tag: int, deadline: Deadline) -> list[bytes]:
        return self.frames_fault(self.inner.all_gather_frames(frame, tag, deadline))

    def send(self, payload: Payload, receiver: int, tag: int, deadline: Deadline) -> None:
        self.inner.send(payload, receiver, tag, deadline)

    def start_receiving(self, nbytes: int, sender: int, tag: int) -> Incoming:
        return FaultyIncoming(self.inner.start_receiving(nbytes, sender, tag), self.payload_fault)

    def broadcast(self, payload: Payload | None, nbytes: int, sender: int, tag: int, deadline: Deadline) -> Payload:
        arrived = self.inner.broadcast(payload, nbytes, sender, tag, deadline)
        return arrived if payload is not None else self.payload_fault(bytearray(arrived))

    def move_tensors(self, outgoing: Ends, incoming: Ends, tag: int, deadline: Deadline) -> None:
        self.inner.move_tensors(outgoing, incoming, tag, deadline)
        for tensor, _ in incoming:
            data = bytearray(tensor.numpy().tobytes())
            tensor.copy_(torch.frombuffer(self.payload_fault(data), dtype=torch.uint8))

    def close(self) -> None:
        self.inner.close()


def unharmed(frames: list[bytes]) -> list[bytes]:
    return frames


def inject(
    channel: Channel, *, frames: FramesFault = unharmed, payload: PayloadFault = lambda payload: payload
) -> None:
    """Damage what arrives at this rank over ``channel``, from its next connection on."""
    link = channel._link
    open_transport = link.open_transport

    def open_faulty(generation: int, deadline: Deadline) -> Connection:
        transport, nodes = open_transport(generation, deadline)
        return Connection(FaultyTransport(transport, frames, payload), nodes)

    link.open_transport = open_faulty


class Damage:
    """Damages the arrivals numbered ``which`` (from 0) and lets all others pass."""

    def __init__(self, which: set[int], change: Callable[[bytearray], bytearray], frame_of: int = 0) -> None:
        self.which = which
        self.change = change
        self.frame_of = frame_of
        self.arrivals = 0

    def _is_due(self) -> bool:
        self.arrivals += 1
        return self.arrivals - 1 in self.which

    def payload(self, payload: bytearray) -> bytearray:
        return self.change(payload) if self._is_due() else payload

    def frames(self, frames: list[bytes]) -> list[bytes]:
        if self._is_due():
            frames[self.frame_of] = bytes(self.change(bytearray(frames[self.frame_of])))
        return frames


def zeros(data: bytearray) -> bytearray:
    return bytearray(len(data))


def one_bit_flipped(data: bytearray) -> bytearray:
    data[len(data) // 2] ^= 0x10
    return data


def second_half_missing(data: bytearray) -> bytearray:
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    return data
