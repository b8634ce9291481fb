"""The 64-byte frame that opens, confirms and closes every exchange: its layout, and what makes one unacceptable.

Pure bytes to values and back; it never talks to anyone and never decides what to do about a bad frame. The exchange
(:mod:`robust_dcp.comm.exchange`) is its only user.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "FRAME_NBYTES",
    "MAX_PAYLOAD_NBYTES",
    "NO_PLAN_ID",
    "NO_SIGNATURE",
    "Fault",
    "Frame",
    "FrameError",
    "Kind",
    "Status",
    "operation_id",
]

FRAME_NBYTES = 64
MAX_PAYLOAD_NBYTES = 8 << 30
"""No rank announces more than this; a receiver allocates what a header announces, so there has to be a bound."""

NO_SIGNATURE = bytes(16)
NO_PLAN_ID = bytes(8)

MAGIC = b"RDCP"
PROTOCOL_VERSION = 1

# magic, version, kind, status, flags, operation, sequence, payload nbytes, payload CRC-32, signature, plan id, value;
# then the CRC-32 of all that. Magic and CRC keep their places in every version, so that damage and another version
# are told apart.
_BODY = struct.Struct("<4sBBBBIIQI16s8sQ")
_CRC = struct.Struct("<I")


class Kind(IntEnum):
    """Which round of an exchange a frame belongs to."""

    HEADER = 1
    CONFIRM = 2
    VERDICT = 3


class Status(IntEnum):
    """What a rank says of itself. Zero is no status: zeros are never mistaken for a frame."""

    OK = 1
    ERROR = 2  # its own work failed; the announced payload is the description
    STOPPED = 3  # it stopped because another rank announced a failure
    AGAIN = 4  # something arrived damaged; `value` is the rank that it came from


class Fault(IntEnum):
    """Why a frame is not accepted. It travels in the flags of a confirming frame."""

    NONE = 0
    LENGTH = 1
    ZEROS = 2
    MAGIC = 3
    CHECKSUM = 4
    VERSION = 5
    VALUES = 6
    KIND = 7
    OPERATION = 8
    SEQUENCE = 9


class FrameError(Exception):
    """A frame is not acceptable; internal to :mod:`robust_dcp.comm`, which turns it into an ``ExchangeError``."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault
        self.detail = detail


@dataclass(frozen=True)
class Frame:
    """What one rank says in one round.

    Attributes:
        kind: which round it is.
        operation: CRC-32 of the operation's name (:func:`operation_id`).
        sequence: how many exchanges this connection has completed.
        status: see :class:`Status`.
        flags: 8 bits; free for the operation in a header, a :class:`Fault` in a confirmation.
        payload_nbytes: length of the payload that follows; 0 for none. In a verdict: of the description of a failure
            (ERROR), or of a bundle that a later delivery brings (OK).
        payload_crc32: CRC-32 of that payload.
        signature: 16 bytes, the signature of the rank's structure.
        plan_id: 8 bytes, the cached plan that the rank offers.
        value: 64 bits; free for the operation.
    """

    kind: Kind
    operation: int
    sequence: int
    status: Status = Status.OK
    flags: int = 0
    payload_nbytes: int = 0
    payload_crc32: int = 0
    signature: bytes = NO_SIGNATURE
    plan_id: bytes = NO_PLAN_ID
    value: int = 0

    def encode(self) -> bytes:
        """The frame as 64 bytes.

        Raises:
            ValueError: a value does not fit its field.
        """
        if len(self.signature) != len(NO_SIGNATURE) or len(self.plan_id) != len(NO_PLAN_ID):
            raise ValueError(
                f"signature and plan_id have {len(self.signature)} and {len(self.plan_id)} bytes, not 16, 8"
            )
        if self.payload_nbytes > MAX_PAYLOAD_NBYTES:
            raise ValueError(f"a payload of {self.payload_nbytes} bytes is larger than {MAX_PAYLOAD_NBYTES}")
        try:
            body = _BODY.pack(
                MAGIC,
                PROTOCOL_VERSION,
                self.kind,
                self.status,
                self.flags,
                self.operation,
                self.sequence,
                self.payload_nbytes,
                self.payload_crc32,
                self.signature,
                self.plan_id,
                self.value,
            )
        except struct.error as error:
            raise ValueError(f"{self} does not fit a frame: {error}") from None
        return body + _CRC.pack(zlib.crc32(body))

    @classmethod
    def decode(cls, data: bytes) -> Frame:
        """The frame that ``data`` holds.

        Raises:
            FrameError: it holds none; says why.
        """
        if len(data) != FRAME_NBYTES:
            raise FrameError(Fault.LENGTH, f"{len(data)} bytes instead of {FRAME_NBYTES}")
        if not any(data):
            raise FrameError(Fault.ZEROS, "all zeros")
        body = data[: _BODY.size]
        magic, version, kind, status, flags, operation, sequence, nbytes, crc32, signature, plan_id, value = (
            _BODY.unpack(body)
        )
        if magic != MAGIC:
            raise FrameError(Fault.MAGIC, f"it begins with {magic!r} instead of {MAGIC!r}")
        (found,) = _CRC.unpack(data[_BODY.size :])
        expected = zlib.crc32(body)
        if found != expected:
            raise FrameError(Fault.CHECKSUM, f"its CRC-32 is {found:#010x}, that of its bytes is {expected:#010x}")
        if version != PROTOCOL_VERSION:
            raise FrameError(Fault.VERSION, f"protocol version {version} instead of {PROTOCOL_VERSION}")
        if nbytes > MAX_PAYLOAD_NBYTES:
            raise FrameError(Fault.VALUES, f"it announces {nbytes} bytes, more than {MAX_PAYLOAD_NBYTES}")
        try:
            return cls(
                kind=Kind(kind),
                operation=operation,
                sequence=sequence,
                status=Status(status),
                flags=flags,
                payload_nbytes=nbytes,
                payload_crc32=crc32,
                signature=signature,
                plan_id=plan_id,
                value=value,
            )
        except ValueError as error:
            raise FrameError(Fault.VALUES, str(error)) from None


def operation_id(text: str) -> int:
    """The number under which an operation, ``"gather 'save 3: plan' to rank 0"`` say, travels in frames."""
    return zlib.crc32(text.encode())
