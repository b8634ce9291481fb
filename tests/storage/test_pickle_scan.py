"""The walk over a pickle finds the memo indexes that pickletools finds."""

from __future__ import annotations

import contextlib
import pickle
import pickletools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from robust_dcp.storage.records.pickle_scan import check_lengths, is_inert

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=400)
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner))


def largest_memo_index(pickled: bytes) -> int:
    """By pickletools, of the opcodes before the first that it cannot read."""
    found = 0
    with contextlib.suppress(Exception):
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name == "LONG_BINPUT":
                found = max(found, int(argument or 0))
    return found


@given(values, st.sampled_from([0, 1, 2, 3, 4, 5]))
@example(["x" * 300, "y" * 70_000, b"z" * 300, 1 << 3000, ["r"] * 5000], 4)
@example(list(range(70_000)), 2)
def test_every_sound_pickle_passes(value: Any, protocol: int) -> None:
    check_lengths(pickle.dumps(value, protocol))


@given(values, st.sampled_from([0, 2, 4]), st.data())
def test_damage_that_makes_a_huge_memo_index_is_found(value: Any, protocol: int, data: st.DataObject) -> None:
    pickled = bytearray(pickle.dumps([value, "end"], protocol))
    for _ in range(data.draw(st.integers(1, 3))):
        pickled[data.draw(st.integers(0, len(pickled) - 1))] = data.draw(st.sampled_from([*b"rqjX\x8c\xff", 0, 7]))
    damaged = bytes(pickled)
    if largest_memo_index(damaged) > len(damaged):
        with pytest.raises(ValueError):  # the index, or what comes before it and is as impossible
            check_lengths(damaged)
    else:
        with contextlib.suppress(ValueError):  # not a pickle any more, or an index that is behind what nobody reads
            check_lengths(damaged)


@pytest.mark.parametrize(
    "pickled", [b"", b"\x80\x04", b"\x80\x04]\x94", b"\x80\x04\xfe.", b"\x80\x04X\xff\xff\xff\x7fab"]
)
def test_what_is_no_pickle_is_refused(pickled: bytes) -> None:
    with pytest.raises(ValueError, match=r"pickle|expected"):
        check_lengths(pickled)


def test_a_memo_index_is_refused_wherever_it_stands() -> None:
    sound = pickle.dumps(["x" * 300, *range(10_000)], 4)
    hostile = sound[:-1] + b"r\xff\xff\xff\xff."
    with pytest.raises(ValueError, match="memo index 4294967295"):
        check_lengths(hostile)


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x80\x04]p99999999999\n.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x00].",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x00.",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
        b"\x80\x04N\x852\x862\x86.",
    ],
    ids=["memo in text", "frame", "text", "number", "doubling"],
)
def test_what_announces_more_than_there_is_is_refused(hostile: bytes) -> None:
    with pytest.raises(ValueError, match=r"memo index|announces|doubles"):
        check_lengths(hostile)


@pytest.mark.parametrize("data", [b"", b"raw", b'{"json": 1}', bytes(range(256)), pickle.dumps([1, "a", (2.5, None)])])
def test_bytes_that_neither_import_nor_call_nor_hash_are_inert(data: bytes) -> None:
    assert is_inert(data)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(print),
        pickle.dumps({"a": 1}),  # hashes
        pickle.dumps(1) + pickle.dumps(print),  # torch.load reads several pickles in a row
        b"I0x10\n0cos\nsystem\n.",  # a number as Python's unpickler reads it, and other readers of pickles do not
        b"]r\xff\xff\xff\xff.",
    ],
)
def test_bytes_that_do_are_not(data: bytes) -> None:
    assert not is_inert(data)
