"""A frame comes out as it went in, or is refused with the reason."""

from __future__ import annotations

import dataclasses
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.comm.frames import (
    FRAME_NBYTES,
    MAX_PAYLOAD_NBYTES,
    Fault,
    Frame,
    FrameError,
    Kind,
    Status,
    operation_id,
)

_u32 = st.integers(0, 2**32 - 1)
frames = st.builds(
    Frame,
    kind=st.sampled_from(Kind),
    operation=_u32,
    sequence=_u32,
    status=st.sampled_from(Status),
    flags=st.integers(0, 255),
    payload_nbytes=st.integers(0, MAX_PAYLOAD_NBYTES),
    payload_crc32=_u32,
    signature=st.binary(min_size=16, max_size=16),
    plan_id=st.binary(min_size=8, max_size=8),
    value=st.integers(0, 2**64 - 1),
)
A_FRAME = Frame(Kind.HEADER, operation_id("gather 'save 3: plan'"), 7, value=5)


def _fault_of(data: bytes) -> Fault:
    with pytest.raises(FrameError) as caught:
        Frame.decode(data)
    return caught.value.fault


def _sealed(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


@given(frames)
def test_a_frame_has_64_bytes_and_comes_out_as_it_went_in(frame: Frame) -> None:
    data = frame.encode()
    assert len(data) == FRAME_NBYTES
    assert Frame.decode(data) == frame


@given(frames, st.integers(0, 8 * FRAME_NBYTES - 1))
def test_a_flipped_bit_is_never_accepted(frame: Frame, bit: int) -> None:
    data = bytearray(frame.encode())
    data[bit // 8] ^= 1 << bit % 8
    assert _fault_of(bytes(data)) in (Fault.MAGIC, Fault.CHECKSUM)


def test_every_single_bit_is_covered() -> None:
    for bit in range(8 * FRAME_NBYTES):
        data = bytearray(A_FRAME.encode())
        data[bit // 8] ^= 1 << bit % 8
        _fault_of(bytes(data))


@given(frames, st.integers(0, FRAME_NBYTES - 1))
def test_a_truncated_frame_is_refused_for_its_length(frame: Frame, nbytes: int) -> None:
    assert _fault_of(frame.encode()[:nbytes]) is Fault.LENGTH


@given(frames, st.integers(0, FRAME_NBYTES - 1))
def test_a_frame_whose_tail_was_never_written_is_refused(frame: Frame, nbytes: int) -> None:
    data = frame.encode()
    torn = data[:nbytes] + bytes(FRAME_NBYTES - nbytes)
    if torn != data:
        assert _fault_of(torn) in (Fault.ZEROS, Fault.MAGIC, Fault.CHECKSUM)


@given(st.binary(min_size=FRAME_NBYTES, max_size=FRAME_NBYTES))
def test_random_bytes_are_refused(data: bytes) -> None:
    _fault_of(data)


def test_zeros_are_named_as_such() -> None:
    with pytest.raises(FrameError, match="all zeros") as caught:
        Frame.decode(bytes(FRAME_NBYTES))
    assert caught.value.fault is Fault.ZEROS


def test_other_bytes_at_the_start_are_shown() -> None:
    with pytest.raises(FrameError, match=r"b'XXXX' instead of b'RDCP'"):
        Frame.decode(b"XXXX" + A_FRAME.encode()[4:])


def test_another_protocol_version_is_told_from_damage() -> None:
    body = bytearray(A_FRAME.encode()[:-4])
    body[4] = 9
    with pytest.raises(FrameError, match="protocol version 9 instead of 1") as caught:
        Frame.decode(_sealed(bytes(body)))
    assert caught.value.fault is Fault.VERSION


@pytest.mark.parametrize("at", [5, 6])
def test_an_unknown_kind_or_status_is_refused(at: int) -> None:
    body = bytearray(A_FRAME.encode()[:-4])
    body[at] = 0
    assert _fault_of(_sealed(bytes(body))) is Fault.VALUES


def test_a_payload_too_large_to_be_believed_is_refused_before_it_is_allocated() -> None:
    body = bytearray(A_FRAME.encode()[:-4])
    body[16:24] = struct.pack("<Q", MAX_PAYLOAD_NBYTES + 1)
    assert _fault_of(_sealed(bytes(body))) is Fault.VALUES


@pytest.mark.parametrize(
    "change",
    [
        {"value": -1},
        {"value": 1 << 64},
        {"flags": 256},
        {"signature": b"short"},
        {"plan_id": bytes(9)},
        {"payload_nbytes": MAX_PAYLOAD_NBYTES + 1},
    ],
)
def test_a_value_that_does_not_fit_is_an_error_of_the_sender(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(A_FRAME, **change).encode()  # type: ignore[arg-type]
