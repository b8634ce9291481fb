"""The 160-byte frame that every message between two ranks begins with: its layout, and what makes one unacceptable.

Pure bytes to values and back; it never talks to anyone and never decides what to do about a bad frame. A
:class:`~robust_dcp.comm.connection.Connection` sends and receives frames, an operation reads them.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

__all__ = ["BODY_NBYTES", "FRAME_NBYTES", "MAX_PAYLOAD_NBYTES", "Frame", "FrameError", "Kind", "Status"]

FRAME_NBYTES = 160
BODY_NBYTES = 104
MAX_PAYLOAD_NBYTES = 8 << 30
"""No rank announces more than this; a receiver allocates what a frame announces, so there has to be a bound."""

MAGIC = b"RDCP"
PROTOCOL_VERSION = 2

# magic, version, kind, status, a free byte, serial, acknowledged, operation, occurrence, exchange, phase, payload
# nbytes, payload CRC-32, payload tag, body; then the CRC-32 of all that. Magic and CRC keep their places in every
# version, so that damage and another version are told apart.
_CONTENT = struct.Struct(f"<4sBBBxIIQIIIQII{BODY_NBYTES}s")
_CRC = struct.Struct("<I")


class Kind(IntEnum):
    """What a frame is for."""

    UP = 1  # what a rank and all ranks below it contribute to an exchange
    DOWN = 2  # how that exchange ended, and this subtree's share of the reply
    BEAT = 3  # still here, and how far the work has come
    STOP = 4  # the exchange that is under way will fail; the payload says why
    FAIL = 5  # the operations that the payload names are over, out of step; it holds the exception for all ranks
    AGAIN = 6  # send once more what you have sent from serial `exchange` on
    ASK = 7  # which operations are you in, and whom do you miss?
    ANSWER = 8
    LEAVE = 9  # nothing more is read over this connection; the next one is to be made
    GONE = 10  # the process ends, or its group does; answered alike, so that nothing sent before is lost
    HELLO = 11  # the first over a connection; the body says which process sends it


class Status(IntEnum):
    """What a rank says of itself and of the ranks below it. Zero is no status: zeros are no frame."""

    OK = 1
    STOPPED = 2  # it stopped because another rank had announced a failure
    ERROR = 3  # its own work failed; the payload describes it


class FrameError(Exception):
    """Some bytes are no frame; internal to :mod:`robust_dcp.comm`, which asks for them again."""


class Frame(NamedTuple):
    """One message between two ranks, but for its payload.

    Attributes:
        kind: what it is for.
        operation: 64 bits, :func:`operation_id` of the name of the operation that it belongs to.
        occurrence: how many operations of that name this rank had been in before.
        exchange: how many exchanges of the operation were completed before.
        phase: 32 bits of a hash of what the exchange is (:func:`phase_id`).
        status: see :class:`Status`.
        body: at most ``BODY_NBYTES`` bytes, zero-padded; their meaning depends on the kind.
        serial: how many frames the sender had sent over this connection before.
        acknowledged: how many it had received.
        payload_nbytes: length of the payload that follows; 0 for none.
        payload_crc32: CRC-32 of that payload.
        payload_tag: under which it is sent.
    """

    kind: Kind
    operation: int = 0
    occurrence: int = 0
    exchange: int = 0
    phase: int = 0
    status: Status = Status.OK
    body: bytes = b""
    serial: int = 0
    acknowledged: int = 0
    payload_nbytes: int = 0
    payload_crc32: int = 0
    payload_tag: int = 0

    def encode(self) -> bytes:
        """The frame as ``FRAME_NBYTES`` bytes.

        Raises:
            ValueError: a value does not fit its field.
        """
        if len(self.body) > BODY_NBYTES:
            raise ValueError(f"the body of a frame has at most {BODY_NBYTES} bytes, not {len(self.body)}")
        if self.payload_nbytes > MAX_PAYLOAD_NBYTES:
            raise ValueError(f"a payload of {self.payload_nbytes} bytes is larger than {MAX_PAYLOAD_NBYTES}")
        try:
            content = _CONTENT.pack(
                MAGIC,
                PROTOCOL_VERSION,
                self.kind,
                self.status,
                self.serial,
                self.acknowledged,
                self.operation,
                self.occurrence,
                self.exchange,
                self.phase,
                self.payload_nbytes,
                self.payload_crc32,
                self.payload_tag,
                self.body,
            )
        except struct.error as error:
            raise ValueError(f"{self} does not fit a frame: {error}") from None
        return content + _CRC.pack(zlib.crc32(content))

    @classmethod
    def decode(cls, data: bytes) -> Frame:
        """The frame that ``data`` holds.

        Raises:
            FrameError: it holds none; says why.
        """
        if len(data) != FRAME_NBYTES:
            raise FrameError(f"it has {len(data)} bytes instead of {FRAME_NBYTES}")
        if not any(data):
            raise FrameError("it is all zeros")
        content = data[: _CONTENT.size]
        fields = _CONTENT.unpack(content)
        if fields[0] != MAGIC:
            raise FrameError(f"it begins with {fields[0]!r} instead of {MAGIC!r}")
        (found,) = _CRC.unpack(data[_CONTENT.size :])
        expected = zlib.crc32(content)
        if found != expected:
            raise FrameError(f"its CRC-32 is {found:#010x}, that of its bytes is {expected:#010x}")
        if fields[1] != PROTOCOL_VERSION:
            raise FrameError(f"it is of protocol version {fields[1]} instead of {PROTOCOL_VERSION}")
        _, _, kind, status, serial, acknowledged, operation, occurrence, exchange, phase, *payload, body = fields
        if payload[0] > MAX_PAYLOAD_NBYTES:
            raise FrameError(f"it announces {payload[0]} bytes, more than {MAX_PAYLOAD_NBYTES}")
        try:
            return cls(
                kind=Kind(kind),
                operation=operation,
                occurrence=occurrence,
                exchange=exchange,
                phase=phase,
                status=Status(status),
                body=body,
                serial=serial,
                acknowledged=acknowledged,
                payload_nbytes=payload[0],
                payload_crc32=payload[1],
                payload_tag=payload[2],
            )
        except ValueError as error:
            raise FrameError(str(error)) from None


def operation_id(name: str) -> int:
    """The number under which an operation, ``"save /ckpt/step_3"`` say, travels in frames."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors="replace"), digest_size=8).digest(), "little")


def phase_id(text: str) -> int:
    """The number under which an exchange, ``"gather 'save 3: plan' to rank 0"`` say, travels in frames."""
    return zlib.crc32(text.encode(errors="replace"))
