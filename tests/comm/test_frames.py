"""A frame comes out as it went in, or is refused with the reason."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.comm.frames import (
    BODY_NBYTES,
    FRAME_NBYTES,
    MAX_PAYLOAD_NBYTES,
    Frame,
    FrameError,
    Kind,
    operation_id,
    phase_id,
)

_u32 = st.integers(0, 2**32 - 1)
frames = st.builds(
    Frame,
    kind=st.sampled_from(Kind),
    operation=st.integers(0, 2**64 - 1),
    occurrence=_u32,
    exchange=_u32,
    phase=_u32,
    has_failed=st.booleans(),
    body=st.binary(min_size=BODY_NBYTES, max_size=BODY_NBYTES),
    payload_nbytes=st.integers(0, MAX_PAYLOAD_NBYTES),
    payload_crc32=_u32,
    payload_tag=_u32,
    secret=st.integers(0, 2**64 - 1),
)
A_FRAME = Frame(Kind.UP, operation_id("save /ckpt/3"), exchange=7, phase=phase_id("gather 'save 3: plan'"))


def _reason(data: bytes) -> str:
    with pytest.raises(FrameError) as caught:
        Frame.decode(data)
    return str(caught.value)


def _sealed(content: bytes) -> bytes:
    return content + struct.pack("<I", zlib.crc32(content))


@given(frames)
def test_a_frame_has_160_bytes_and_comes_out_as_it_went_in(frame: Frame) -> None:
    data = frame.encode()
    assert len(data) == FRAME_NBYTES == 160
    assert Frame.decode(data, frame.secret) == frame


def test_every_single_bit_is_covered() -> None:
    for bit in range(8 * FRAME_NBYTES):
        data = bytearray(A_FRAME.encode())
        data[bit // 8] ^= 1 << bit % 8
        _reason(bytes(data))


def test_the_reason_says_what_was_found() -> None:
    assert _reason(bytes(FRAME_NBYTES)) == "it is all zeros"
    assert _reason(b"XXXX" + A_FRAME.encode()[4:]) == "it begins with b'XXXX' instead of b'RDCP'"


def test_a_payload_too_large_to_be_believed_is_refused_before_it_is_allocated() -> None:
    content = bytearray(A_FRAME.encode()[:-4])
    content[132:140] = struct.pack("<Q", MAX_PAYLOAD_NBYTES + 1)
    assert f"announces {MAX_PAYLOAD_NBYTES + 1} bytes" in _reason(_sealed(bytes(content)))
