"""The frame: 160 bytes that begin every message between two ranks.

This module converts frames to bytes and back, and says what makes a frame unacceptable. It never sends anything and
never decides what to do about a bad frame: an operation does.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

FRAME_NBYTES = 160
BODY_NBYTES = 104
MAX_PAYLOAD_NBYTES = 8 << 30
"""The largest payload that a rank may announce. A receiver allocates what a frame announces, so it needs a bound."""

MAGIC = b"RDCP"
PROTOCOL_VERSION = 7

# Magic, version, and the fields of a frame in their order; then the CRC-32 of all that. Magic and CRC have the same
# place in every version, so that we can tell damage from another version.
_CONTENT = struct.Struct(f"<4sBBxQIII?{BODY_NBYTES}sQIIQ")
_CRC = struct.Struct("<I")


class Kind(IntEnum):
    """What a frame is for."""

    UP = 1  # what a rank and all ranks below it contribute to an exchange
    DOWN = 2  # how that exchange ended, and the part of the reply for this subtree
    HEARD = 3  # the answer to DOWN; nothing more comes in this exchange
    BEAT = 4  # the sender is alive, and its work has come this far
    STOP = 5  # the current exchange will fail; the payload says why
    GONE = 6  # the sender drops its connections; the store says why
    RELAY = 7  # a tensor that is passed on within an exchange


class FrameError(Exception):
    """Some bytes are not a frame. This is internal to :mod:`robust_dcp.comm`, which has them sent once more."""


class Frame(NamedTuple):
    """One message between two ranks, without its payload.

    Attributes:
        kind: what the message is for.
        operation: 64 bits, :func:`operation_id` of the operation's name.
        occurrence: how many operations of that name this rank was in before.
        exchange: how many exchanges of the operation were completed before.
        phase: 32 bits, :func:`phase_id` of the exchange's description.
        has_failed: the sender, or a rank below it, has failed, or has stopped because another one did. The payload says
            more.
        body: at most ``BODY_NBYTES`` bytes, padded with zeros. Their meaning depends on the kind.
        payload_nbytes: the length of the payload that follows; 0 for none.
        payload_crc32: the CRC-32 of that payload.
        payload_tag: the gloo tag under which the payload is sent.
        secret: 64 bits that only ranks of the group know.
    """

    kind: Kind
    operation: int = 0
    occurrence: int = 0
    exchange: int = 0
    phase: int = 0
    has_failed: bool = False
    body: bytes = b""
    payload_nbytes: int = 0
    payload_crc32: int = 0
    payload_tag: int = 0
    secret: int = 0

    def encode(self) -> bytes:
        """Encode the frame as ``FRAME_NBYTES`` bytes.

        Raises:
            ValueError: a value does not fit its field.
        """
        if len(self.body) > BODY_NBYTES or self.payload_nbytes > MAX_PAYLOAD_NBYTES:
            raise ValueError(f"a frame has no room for a body of {len(self.body)} bytes, or its payload is too large")
        content = _CONTENT.pack(MAGIC, PROTOCOL_VERSION, *self)
        return content + _CRC.pack(zlib.crc32(content))

    @classmethod
    def decode(cls, data: bytes, secret: int = 0) -> Frame:
        """Decode the frame in ``data``, which ranks that know ``secret`` send.

        Raises:
            FrameError: ``data`` is not a frame. The message says why.
        """
        if len(data) != FRAME_NBYTES:
            raise FrameError(f"it has {len(data)} bytes instead of {FRAME_NBYTES}")
        if not any(data):
            raise FrameError("it is all zeros")
        magic, version, kind, *fields = _CONTENT.unpack_from(data)
        if magic != MAGIC:
            raise FrameError(f"it begins with {magic!r} instead of {MAGIC!r}")
        (found,), expected = _CRC.unpack_from(data, _CONTENT.size), zlib.crc32(data[: _CONTENT.size])
        if found != expected:
            raise FrameError(f"its CRC-32 is {found:#010x}, that of its bytes is {expected:#010x}")
        if version != PROTOCOL_VERSION:
            raise FrameError(f"it is of protocol version {version} instead of {PROTOCOL_VERSION}")
        try:
            frame = cls(Kind(kind), *fields)
        except ValueError as error:
            raise FrameError(str(error)) from None
        if frame.secret != secret:
            raise FrameError("it is of another group: it does not carry the secret of this one")
        if frame.payload_nbytes > MAX_PAYLOAD_NBYTES:
            raise FrameError(f"it announces {frame.payload_nbytes} bytes, more than {MAX_PAYLOAD_NBYTES}")
        return frame


def operation_id(name: str) -> int:
    """The number that stands for an operation, such as ``"save /ckpt/step_3"``, in frames."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def phase_id(text: str) -> int:
    """The number that stands for an exchange, such as ``"gather 'save 3: plan' to rank 0"``, in frames."""
    return zlib.crc32(text.encode())
