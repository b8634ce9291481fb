"""A structure survives its journey, and no message, however broken, gives anything but a table or ExchangeError."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_dcp.errors import ExchangeError, PlanConflict
from robust_dcp.items import Items, ItemsDecoder, ItemsMessage, Path
from robust_dcp.plan.global_plan import make_global_plan
from robust_dcp.plan.state_dict import StructureSignature, encode_context
from tests.plan.structures import CONTEXT, Item, chunk, obj, rank_items, table, tensor


def _message(drawn: tuple[list[Item], dict[str, Path]], *, nested: bool = True) -> ItemsMessage:
    structure = table(*drawn[0], paths=drawn[1] if nested else None)
    return ItemsMessage.of(structure, encode_context(CONTEXT), bytes(16))


def _names(*names: object) -> tuple[bytes, ...]:
    return (msgspec.msgpack.encode(names),)


@settings(max_examples=30)
@given(rank_items(), st.booleans())
def test_a_table_comes_back_column_for_column(drawn: tuple[list[Item], dict[str, Path]], nested: bool) -> None:
    sent = table(*drawn[0], paths=drawn[1] if nested else None)
    message = ItemsMessage.of(sent, encode_context(CONTEXT), bytes(16))
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ItemsMessage)
    received = ItemsDecoder().decode(arrived)
    for field in Items.__struct_fields__:
        ours, theirs = getattr(sent, field), getattr(received, field)
        if field != "paths":
            assert ours == theirs if isinstance(ours, tuple) else np.array_equal(ours, theirs), field
    # A list index and the key of the same digits are not equal, for they have other types.
    assert received.paths == sent.paths
    assert StructureSignature.of(received, encode_context(CONTEXT)) == StructureSignature.of(
        sent, encode_context(CONTEXT)
    )


def test_an_empty_table_comes_back_empty() -> None:
    assert len(ItemsDecoder().decode(_message(([], {})))) == 0


_COLUMNS = [field.name for field in msgspec.structs.fields(ItemsMessage) if field.type is bytes]


@settings(max_examples=30)
@given(st.data())
@pytest.mark.parametrize("column", _COLUMNS)
def test_a_column_of_any_bytes_gives_a_table_or_an_exchange_error(column: str, data: st.DataObject) -> None:
    good = _message(data.draw(rank_items()), nested=data.draw(st.booleans()))
    original: bytes = getattr(good, column)
    mutated = data.draw(
        st.one_of(
            st.binary(max_size=2 * len(original) + 9),
            st.just(b""),
            st.integers(0, len(original)).map(lambda end: original[:end]),
            st.just(original + original),
            st.binary(min_size=len(original), max_size=len(original)),
        )
    )
    _use(msgspec.structs.replace(good, **{column: mutated}))


@settings(max_examples=30)
@given(st.data())
def test_names_and_paths_of_anything_give_a_table_or_an_exchange_error(data: st.DataObject) -> None:
    good = _message(data.draw(rank_items()), nested=data.draw(st.booleans()))
    part = st.one_of(st.text(), st.integers(-9, 9))
    names = data.draw(st.lists(st.one_of(part, st.lists(part))))
    _use(msgspec.structs.replace(good, names=(*good.names[:-1], msgspec.msgpack.encode(names))))


def _use(message: ItemsMessage) -> None:
    """Do with a message what the coordinator does; only our own errors may come of it."""
    with contextlib.suppress(ExchangeError, PlanConflict):
        make_global_plan([ItemsDecoder().decode(message), table(tensor("another"))])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"names": _names(("o",), "w")}, "half of the paths"),
        ({"names": _names(("o",), (1.5,))}, "no list of strings or paths"),
        ({"names": _names(("w",), ("o",))}, "not sorted"),
        ({"names": (*_names(("w",)), *_names(("o",)))}, "not sorted"),
        ({"names": (*_names("o"), *_names(("w",)))}, "half of the paths"),
        ({"name": b"\0\0\0"}, "a column of int32 has 3 bytes"),
        ({"kind": b"\3"}, "different lengths"),
        ({"kind": b"\3\7"}, "unknown kind"),
        ({"kind": b"\3\0"}, "unknown kind"),
        ({"offset": np.array([0, 9], "<i4").tobytes()}, "outside its table"),
        ({"name": np.array([0, 2], "<i4").tobytes()}, "outside its table"),
        ({"name": np.array([1, 1], "<i4").tobytes()}, "a name without items"),
        ({"size": np.array([0, 0], "<i4").tobytes()}, "a chunk with others than its tensor"),
        ({"properties": (("", "", False), ("float31", "strided", False))}, "'float31'"),
        ({"properties": (("", "", False), ("float32", "float32", False))}, "'float32'"),
        ({"name": np.array([1, 0], dtype="<i4").tobytes()}, "not sorted by name"),
        ({"properties": (("", "", False), ("", "strided", False))}, "without dtype"),
        ({"kind": b"\1\1"}, "without dtype"),
        ({"sizes": ((1,), (0,), (4,))}, "an object with dimensions"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_message_is_said(changes: dict[str, Any], words: str) -> None:
    structure = table(chunk("w", [4], [0], [4]), obj("o"), paths={"w": ("w",), "o": ("o",)})
    good = ItemsMessage.of(structure, encode_context(CONTEXT), bytes(16))
    with pytest.raises(ExchangeError) as caught:
        ItemsDecoder().decode(msgspec.structs.replace(good, **changes))
    assert words in str(caught.value)
    assert "same robust_dcp version" in str(caught.value)


def test_tables_of_replicas_share_their_columns() -> None:
    structure = table(chunk("w", [4], [0], [4]), obj("o"), paths={"w": ("w",), "o": ("o",)})
    sent = msgspec.msgpack.encode(ItemsMessage.of(structure, encode_context(CONTEXT), bytes(16)))
    decoder = ItemsDecoder()
    one, other = (decoder.decode(msgspec.msgpack.decode(sent, type=ItemsMessage)) for _ in range(2))
    assert one.names is other.names
    assert one.paths is other.paths
    assert all(left is right for left, right in zip(one.columns, other.columns, strict=True))
