"""Faults between ranks: what arrives at one rank is damaged, as a network card or a library might."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from robust_dcp.comm.connections import GREETING_TAG, Connections
from robust_dcp.comm.frames import FRAME_NBYTES


def zeros(data: bytearray) -> bytearray:
    return bytearray(len(data))


def one_bit_flipped(data: bytearray) -> bytearray:
    data[len(data) // 2] ^= 0x10
    return data


def second_half_missing(data: bytearray) -> bytearray:
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    return data


class Damage:
    """Damages what arrives at this rank from ``sender``: of all frames, or of all payloads, those numbered ``which``.

    A rank that lost a connection gets everything again. So only a range without an end damages something twice.
    """

    def __init__(self, sender: int, which: range, *, frames: bool) -> None:
        self.which, self.change, self.arrivals = which, one_bit_flipped, 0
        receive: Callable[..., bytearray] = Connections.receive

        def receive_damaged(connections: Connections, peer: int, tag: int, nbytes: int, *args: Any, **more: Any) -> Any:
            data = receive(connections, peer, tag, nbytes, *args, **more)
            if peer == sender and tag != GREETING_TAG and frames == (nbytes == FRAME_NBYTES):
                self.arrivals += 1
                if self.arrivals - 1 in self.which:
                    return self.change(data)
            return data

        Connections.receive = receive_damaged  # type: ignore[assignment, method-assign]
