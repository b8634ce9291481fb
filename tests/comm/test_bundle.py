"""Bundles: what comes out is what went in, equal values as one object; anything else names the leader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.comm import wire
from robust_dcp.comm.bundle import Bundle, Bundler, Column, Unbundler
from robust_dcp.errors import ExchangeError


class Columns(msgspec.Struct, frozen=True):
    names: tuple[str, ...]
    sizes: bytes
    count: Annotated[int, msgspec.Meta(ge=0)] = 0
    note: str | None = None


class Sparse(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, tag="sparse", forbid_unknown_fields=True):
    some_ids: list[int]
    by_name: dict[str, float] = {}
    maybe: int | msgspec.UnsetType = msgspec.UNSET


class Row(msgspec.Struct, frozen=True, array_like=True, tag=True, omit_defaults=True):
    key: bytes
    inner: Columns
    last: int = 7


class Even(msgspec.Struct, frozen=True):
    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise ValueError("it is odd")


class Nothing(msgspec.Struct, frozen=True):
    pass


# Few distinct values, so that ranks share some.
names = st.sampled_from([(), ("a",), ("a", "β"), ("w" * 300,) * 10])
sizes = st.sampled_from([b"", b"\x00", b"columns" * 400])
columns = st.builds(Columns, names=names, sizes=sizes, count=st.integers(0, 3), note=st.none() | st.text(max_size=3))
sparse = st.builds(
    Sparse,
    some_ids=st.lists(st.integers(-(1 << 63), (1 << 64) - 1), max_size=3),
    by_name=st.dictionaries(st.text(max_size=2), st.floats(allow_nan=False), max_size=2),
    maybe=st.just(msgspec.UNSET) | st.integers(0, 2),
)
rows = st.builds(Row, key=st.binary(max_size=2), inner=columns, last=st.integers(6, 8))
by_rank = {
    message_type: st.dictionaries(st.integers(0, 5000), messages, min_size=1, max_size=12)
    for message_type, messages in ((Columns, columns), (Sparse, sparse), (Row, rows), (Nothing, st.just(Nothing())))
}
of_any_type: st.SearchStrategy[tuple[type[Any], dict[int, Any]]] = st.one_of(
    [st.tuples(st.just(message_type), messages) for message_type, messages in by_rank.items()]
)

LEADER = 4
MESSAGES = {4: Columns(("a", "b"), b"12", 1), 5: Columns(("a", "b"), b"34", 2), 9: Columns(("a", "b"), b"12", 3, "n")}


def _bundle_of(message_type: type[Any], messages: dict[int, Any]) -> bytes:
    bundler = Bundler(message_type)
    for rank, message in messages.items():
        bundler.add(rank, wire.encode(message))
    return bundler.encode()


@given(of_any_type)
def test_messages_come_out_as_they_went_in(drawn: tuple[type[Any], dict[int, Any]]) -> None:
    message_type, messages = drawn
    ranks = sorted(messages)
    found = Unbundler(message_type).messages(_bundle_of(message_type, messages), ranks[0], ranks)
    assert found == messages
    assert list(found) == ranks


@given(by_rank[Columns], by_rank[Columns], by_rank[Columns])
def test_equal_values_are_the_same_object_across_bundles_and_single_messages(
    first: dict[int, Columns], second: dict[int, Columns], single: dict[int, Columns]
) -> None:
    unbundler = Unbundler(Columns)
    found = list(unbundler.messages(_bundle_of(Columns, first), 0, sorted(first)).values())
    found += [unbundler.message(wire.encode(message)) for message in single.values()]
    found += unbundler.messages(_bundle_of(Columns, second), 1, sorted(second)).values()
    for field in ("names", "sizes", "note"):
        objects: dict[Any, Any] = {}
        for message in found:
            value = getattr(message, field)
            assert objects.setdefault(value, value) is value


@given(columns | sparse | rows)
def test_a_single_message_comes_out_as_it_went_in(message: Any) -> None:
    assert Unbundler(type(message)).message(wire.encode(message)) == message


def test_a_bundle_of_replicas_is_hardly_larger_than_one_message() -> None:
    message = Columns(tuple(f"layers.{n}.weight" for n in range(5000)), bytes(range(256)) * 100)
    bundle = _bundle_of(Columns, {rank: msgspec.structs.replace(message, count=rank) for rank in range(16)})
    assert len(bundle) < 1.05 * len(wire.encode(message))


@given(columns | st.binary(max_size=50).map(lambda b: b"\x01" + b))
def test_what_is_no_message_of_the_type_is_refused_before_it_is_merged(sent: Any) -> None:
    bundler = Bundler(Even)
    with pytest.raises(ExchangeError):
        bundler.add(3, sent if isinstance(sent, bytes) else wire.encode(sent))
    bundler.add(4, wire.encode(Even(2)))
    assert Unbundler(Even).messages(bundler.encode(), 4, [4]) == {4: Even(2)}


def test_the_check_of_a_type_itself_counts() -> None:
    odd = b"\x01" + msgspec.msgpack.encode({"number": 3})
    with pytest.raises(ExchangeError, match="it is odd"):
        Bundler(Even).add(3, odd)
    with pytest.raises(ExchangeError, match="it is odd"):
        Unbundler(Even).message(odd)
    _refuses(Bundle((3,), (Column("number", (msgspec.Raw(b"\x03"),), (0,)),)), "rank 3: it is odd", Even, [3])


def _parts() -> Bundle:
    return wire.decode(_bundle_of(Columns, MESSAGES), Bundle)


def _refuses(
    bundle: Bundle | bytes, why: str = "", message_type: type[Any] = Columns, ranks: Sequence[int] = tuple(MESSAGES)
) -> None:
    payload = bundle if isinstance(bundle, bytes) else wire.encode(bundle)
    with pytest.raises(ExchangeError, match=rf"(?s)the bundle that rank 4 made for ranks \[.*{why}") as caught:
        Unbundler(message_type).messages(payload, LEADER, ranks)
    assert caught.value.ranks == [LEADER]


@given(st.integers(0, 10_000))
def test_a_truncated_bundle_names_the_leader(length: int) -> None:
    payload = _bundle_of(Columns, MESSAGES)
    _refuses(payload[: length % len(payload)])


@given(st.binary(max_size=100) | st.binary(max_size=100).map(lambda b: b"\x01" + b))
def test_garbage_names_the_leader(garbage: bytes) -> None:
    _refuses(garbage)


@given(by_rank[Columns], st.data())
def test_a_place_outside_the_values_names_the_leader(messages: dict[int, Columns], data: st.DataObject) -> None:
    bundle = wire.decode(_bundle_of(Columns, messages), Bundle)
    at = data.draw(st.integers(0, len(bundle.columns) - 1))
    column = bundle.columns[at]
    which = list(column.which)
    outside = st.integers(len(column.values), 1 << 40) | st.integers(-(1 << 40), -2)
    which[data.draw(st.integers(0, len(which) - 1))] = data.draw(outside)
    changed = list(bundle.columns)
    changed[at] = Column(column.field, column.values, tuple(which))
    _refuses(Bundle(bundle.ranks, tuple(changed)), "has a place outside its", ranks=sorted(messages))


@pytest.mark.parametrize("ranks", [(4, 5), (4, 5, 8), (4, 5, 5), (4, 5, 9, 9), (5, 4, 9), ()])
def test_other_ranks_than_expected_name_the_leader(ranks: tuple[int, ...]) -> None:
    _refuses(Bundle(ranks, _parts().columns), "it is for ranks")


def test_other_fields_than_expected_name_the_leader() -> None:
    bundle = _parts()
    _refuses(Bundle(bundle.ranks, bundle.columns[:-1]), "it has the fields")
    _refuses(Bundle(bundle.ranks, bundle.columns + bundle.columns[:1]), "it has the fields")
    _refuses(Bundle(bundle.ranks, bundle.columns[::-1]), "it has the fields")


def test_a_column_for_too_few_ranks_names_the_leader() -> None:
    first, *others = _parts().columns
    shorter = Column(first.field, first.values, first.which[:-1])
    _refuses(Bundle(tuple(MESSAGES), (shorter, *others)), "'names' is of 2 ranks, not 3")


def test_a_value_of_another_type_names_the_leader_and_the_field() -> None:
    *others, last = _parts().columns
    wrong = Column(last.field, (msgspec.Raw(b"\x93\x01\x02\x03"), *last.values[1:]), last.which)
    _refuses(Bundle(tuple(MESSAGES), (*others, wrong)), "a value of 'note': Expected `str | null`, got `array`")


def test_a_value_that_breaks_a_constraint_names_the_leader_and_the_field() -> None:
    names, sizes, count, note = _parts().columns
    negative = Column(count.field, (msgspec.Raw(b"\xff"), *count.values[1:]), count.which)
    _refuses(Bundle(tuple(MESSAGES), (names, sizes, negative, note)), "a value of 'count': Expected `int` >= 0")


def test_a_missing_field_without_default_names_the_leader() -> None:
    names, *others = _parts().columns
    absent = Column(names.field, names.values, (0, -1, 0))
    _refuses(Bundle(tuple(MESSAGES), (absent, *others)), "the message of rank 5: Missing required argument 'names'")
