"""Frames, messages and their bundles come out as they went in; anything else is refused, in bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib

from robust_dcp.comm import Channel, Offer
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
from robust_dcp.comm.messages import Bundle, decode, encode
from robust_dcp.errors import ExchangeError, RobustCheckpointError
from tests.comm.messages import Note
from tests.harness.network import SimulatedNetwork, run_channels

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
    assert f"announces {MAX_PAYLOAD_NBYTES + 1} bytes" in _reason(content + struct.pack("<I", zlib.crc32(content)))


class Structure(msgspec.Struct, frozen=True):
    names: tuple[str, ...]
    sizes: bytes
    note: str | None = None


class Numbers(msgspec.Struct, frozen=True):
    values: list[int]


messages = st.builds(
    Structure,
    names=st.lists(st.text(), max_size=50).map(tuple),
    sizes=st.binary(max_size=5000),
    note=st.none() | st.text(),
)
LARGE = Structure(tuple(f"decoder.layers.{i}.mlp.experts.linear_fc1.weight" for i in range(5000)), bytes(80_000))


@given(messages)
def test_a_message_comes_out_as_it_went_in(message: Structure) -> None:
    assert decode(encode(message), Structure) == message


@given(messages, st.data())
def test_a_truncated_message_is_refused(message: Structure, data: st.DataObject) -> None:
    payload = encode(message)
    with pytest.raises(ExchangeError):
        decode(payload[: data.draw(st.integers(0, len(payload) - 1))], Structure)


@given(messages, st.binary(min_size=1, max_size=20))
def test_trailing_bytes_are_refused(message: Structure, tail: bytes) -> None:
    with pytest.raises(ExchangeError):
        decode(encode(message) + tail, Structure)


@given(
    st.binary(max_size=200) | st.binary(max_size=200).map(lambda b: b"\x01" + b) | st.binary().map(lambda b: b"\2" + b)
)
def test_garbage_is_an_exchange_error_and_nothing_else(garbage: bytes) -> None:
    with pytest.raises(ExchangeError):
        decode(garbage, Numbers)


def test_a_size_above_the_bound_is_refused_before_inflating() -> None:
    with pytest.raises(ExchangeError, match=r"announce \d+ bytes once inflated, more than 1000"):
        Bundle.of(Structure, {0: LARGE}).open(Structure, max_nbytes=1000)
    with pytest.raises(ExchangeError, match="more than 10"):
        Bundle.of(Structure, {0: Structure(("a long name",), b"")}).open(Structure, max_nbytes=10)


def test_a_bomb_that_lies_about_its_size_is_refused_before_inflating() -> None:
    bomb = isal_zlib.compress(bytes(1 << 28), 3)
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    with pytest.raises(ExchangeError, match="the prefix announces 100 bytes, and that is not what there is"):
        decode(struct.pack("<BQ", 2, 100) + bomb, Numbers)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


@pytest.mark.parametrize(
    "head", [b"\xdd\xff\xff\xff\xff", b"\x81\xa6values\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"]
)
def test_a_length_that_no_bytes_follow_allocates_nothing(head: bytes) -> None:
    with pytest.raises(ExchangeError):
        decode(b"\x01" + head, Numbers)


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(ExchangeError):
        decode(b"\x01" + b"\x91" * 100_000, Numbers)


class NoteOfAnotherVersion(msgspec.Struct, frozen=True):
    """As :class:`Note`, but its ``rank`` is a text."""

    rank: str
    data: bytes = b""


def test_a_field_of_another_type_names_the_rank_that_sent_it_on_all_ranks() -> None:
    def gather(channel: Channel) -> str:
        note: Any = NoteOfAnotherVersion("two") if channel.rank == 2 else Note(channel.rank)
        with pytest.raises(RobustCheckpointError) as caught:
            channel.gather("plan", lambda: note, Note)
        assert channel.agree("next", Offer)[1].n_ranks == channel.size, "the ranks are still in step"
        return caught.value.message

    (message,) = set(run_channels(SimulatedNetwork(4), gather))
    assert "what rank 2 sent is no Note: 'rank': Expected `int`, got `str`" in message
