"""Objects that ranks hold under one name are compared by digest; an unknown digest accuses nobody."""

from __future__ import annotations

import functools
import io
import logging
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.comm import encode
from robust_dcp.errors import ExchangeError, PlanConflict
from robust_dcp.plan import replicated_objects
from robust_dcp.plan.global_plan import combined_digest, differing_objects, merge_tables, object_digest
from robust_dcp.plan.replicated_objects import ObjectDigests, report_differing
from tests.plan.structures import local_of, obj, table, tensor


def _uint64(*values: int) -> Any:
    return np.array(values, dtype=np.uint64)


@pytest.mark.parametrize("value", [0, None, "text", {"a": [1, 2.5]}, (1, 2), b"", io.BytesIO(b"abc"), io.BytesIO()])
def test_a_digest_is_64_bits_that_are_never_zero_and_always_the_same(value: Any) -> None:
    assert 0 < object_digest(value) < 2**64
    assert object_digest(value) == object_digest(value)


def test_other_contents_have_other_digests() -> None:
    values: list[Any] = [0, 1, "0", None, [0], {"a": 1}, {"a": 2}, io.BytesIO(b"a"), io.BytesIO(b"b")]
    assert len({object_digest(value) for value in values}) == len(values)


def test_a_buffer_is_read_as_a_whole_and_left_as_it_was() -> None:
    buffer = io.BytesIO(b"abcdef")
    buffer.seek(3)
    assert object_digest(buffer) == object_digest(io.BytesIO(b"abcdef"))
    assert buffer.tell() == 3
    buffer.write(b"x")  # no view is left that would forbid it


class _RefusesToPickle:
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


@pytest.mark.parametrize("value", [threading.Lock(), lambda: 0, _RefusesToPickle()])
def test_what_does_not_pickle_has_the_unknown_digest(value: Any) -> None:
    assert object_digest(value) == 0


def test_a_combined_digest_is_unknown_if_one_is() -> None:
    assert combined_digest(_uint64()) == 0
    assert combined_digest(_uint64(1, 0, 2)) == 0
    assert len({combined_digest(_uint64(*values)) for values in ((1, 2), (2, 1), (1,), (2**64 - 1, 2))}) == 4
    assert 0 < combined_digest(_uint64(1, 2)) < 2**64


def test_differing_objects_are_named_with_the_ranks_that_hold_them() -> None:
    columns = merge_tables(
        [
            table(obj("rng"), obj("step"), tensor("w")),
            table(obj("rng"), obj("step")),
            table(obj("only_here"), obj("step")),
            table(tensor("w"), obj("rng")),
        ]
    )
    assert differing_objects(columns, [_uint64(1, 5), _uint64(2, 5), _uint64(9, 5), _uint64(1)]) == {"rng": (0, 1, 3)}


@pytest.mark.parametrize(
    ("digests", "differ"),
    [
        ((7, 7, 7), False),
        ((7, 0, 7), False),
        ((0, 0, 0), False),
        ((7, 0, 8), True),
        ((2**64 - 1, 2**64 - 1, 0), False),
        ((2**64 - 1, 1, 0), True),
        ((7, 7, 8), True),
    ],
)
def test_an_unknown_digest_equals_everything(digests: tuple[int, ...], differ: bool) -> None:
    columns = merge_tables([table(obj("o"))] * 3)
    assert bool(differing_objects(columns, [_uint64(digest) for digest in digests])) == differ
    combined = functools.reduce(ObjectDigests.with_other, [ObjectDigests.of(_uint64(digest)) for digest in digests])
    assert combined.differing(["o"], 3) == ({"o": (0, 1, 2)} if differ else {})


_DIGESTS = st.one_of(st.sampled_from([0, 1, 2, 2**64 - 1]), st.integers(0, 2**64 - 1))


@given(st.integers(0, 4).flatmap(lambda n: st.lists(st.lists(_DIGESTS, min_size=n, max_size=n), min_size=1)), st.data())
def test_digests_combined_in_any_order_say_what_one_says_who_sees_all(
    of_ranks: list[list[int]], data: st.DataObject
) -> None:
    names = [f"object {place}" for place in range(len(of_ranks[0]))]
    left = [ObjectDigests.of(_uint64(*digests)) for digests in of_ranks]
    while len(left) > 1:
        left.append(left.pop(data.draw(st.integers(0, len(left) - 1))).with_other(left.pop(0)))
    known = [{digests[place] for digests in of_ranks} - {0} for place in range(len(names))]
    expected = {name: tuple(range(len(of_ranks))) for name, each in zip(names, known, strict=True) if len(each) > 1}
    assert left[0].differing(names, len(of_ranks)) == expected


def test_digests_of_many_ranks_take_no_more_room_than_those_of_one() -> None:
    one = ObjectDigests.of(_uint64(1, 2, 3))
    many = functools.reduce(ObjectDigests.with_other, [ObjectDigests.of(_uint64(n, 2, 3)) for n in range(100)], one)
    assert len(encode(many)) <= len(encode(one))


def test_without_objects_nothing_differs() -> None:
    assert differing_objects(merge_tables([table(tensor("w")), table()]), [_uint64(), _uint64()]) == {}
    assert ObjectDigests.of(_uint64()).with_other(ObjectDigests.of(_uint64())).differing([], 2) == {}


@pytest.mark.parametrize("bad", [b"", b"\1" * 7, b"\1" * 16])
def test_digests_that_are_not_one_for_each_name_are_an_exchange_error(bad: bytes) -> None:
    one = ObjectDigests.of(_uint64(1))
    for wrong in (ObjectDigests(bad, bad), ObjectDigests(one.lowest, bad), ObjectDigests(bad, one.highest)):
        with pytest.raises(ExchangeError, match="digest"):
            one.with_other(wrong)
        with pytest.raises(ExchangeError, match="digests came for 1 objects"):
            wrong.differing(["o"], 2)


def test_digests_are_found_by_the_place_of_the_object_in_the_table() -> None:
    local = local_of(table(obj("a"), tensor("b"), obj("c"), obj("d")), [1, 2, 3])
    assert local.digests_of(np.array([0, 3])).tolist() == [1, 3]
    assert local.digests_of(np.array([], dtype=np.intp)).tolist() == []


@pytest.fixture
def _nothing_reported_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated_objects, "_reported", set())


@pytest.mark.usefixtures("_nothing_reported_yet")
def test_a_difference_is_warned_of_once_and_by_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        report_differing({"rng": (0, 1, 3)}, "warn", is_reporter=False)
        assert not caplog.records
        for _ in range(3):
            report_differing({"rng": (0, 1, 3)}, "warn", is_reporter=True)
        assert len(caplog.records) == 1
        assert "'rng' (ranks 0-1, 3)" in caplog.text
        report_differing({"rng": (0, 1), "other": (0, 2)}, "warn", is_reporter=True)
        assert len(caplog.records) == 2


@pytest.mark.usefixtures("_nothing_reported_yet")
def test_a_difference_is_refused_on_every_rank_if_asked_and_passed_over_if_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for is_reporter in (True, False):
        with pytest.raises(PlanConflict, match="'rng'") as caught:
            report_differing({"rng": (0, 3)}, "error", is_reporter=is_reporter)
        assert (caught.value.key, caught.value.ranks) == ("rng", [0, 3])
        report_differing({"rng": (0, 3)}, "ignore", is_reporter=is_reporter)
        report_differing({}, "error", is_reporter=is_reporter)
    assert not caplog.records
