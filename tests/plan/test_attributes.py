"""What planners add to ``Metadata`` is part of the structure: hashed, sent, compared and put together as such."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.errors import ExchangeError, PlanConflict
from robust_dcp.plan.global_plan import make_global_plan
from robust_dcp.plan.metadata import stock_metadata
from robust_dcp.plan.structure import (
    StructureMessage,
    StructureSignature,
    StructureTable,
    TableDecoder,
    attributes_of,
    diff_tables,
    encode_attributes,
)
from tests.plan.structures import chunk, context_of, table, tensor

_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.text(max_size=4)),
    lambda each: st.one_of(
        st.lists(each, max_size=3).map(tuple), st.dictionaries(st.text(max_size=3), each, max_size=3)
    ),
    max_leaves=6,
)
_attributes = st.dictionaries(
    st.text(max_size=4), st.dictionaries(st.text(max_size=4), _values, max_size=4), max_size=3
)


_DEEP = b"\x81\xa1a\x81\xa1w" + b"\x91" * 100_000 + b"\x01"


def _shape(*shape: int) -> dict[str, Any]:
    return {"mcore_data": {"w": {"shape": shape}}}


def _sent(structure: StructureTable) -> StructureMessage:
    return StructureMessage.of(structure, context_of().encode(), bytes(16))


@given(_attributes)
def test_facts_come_back_as_they_were_tuples_included(attributes: dict[str, dict[str, Any]]) -> None:
    back = attributes_of(encode_attributes(attributes))
    assert back == {attribute: facts for attribute, facts in attributes.items() if facts}


@given(st.dictionaries(st.text(max_size=4), st.integers(0, 99), min_size=2))
def test_the_order_of_names_does_not_matter(facts: dict[str, int]) -> None:
    turned = dict(reversed(facts.items()))
    assert encode_attributes({"a": facts, "b": {}}) == encode_attributes({"c": {}, "a": turned})


def test_nothing_to_tell_is_no_bytes() -> None:
    assert encode_attributes({}) == encode_attributes({"mcore_data": {}}) == table(tensor("w")).attributes == b""


def test_what_is_no_plain_value_is_refused() -> None:
    with pytest.raises(TypeError):
        encode_attributes({"a": {"w": object()}})


@pytest.mark.parametrize(
    "attribute", ["state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"]
)
def test_an_attribute_of_dcp_s_own_is_refused(attribute: str) -> None:
    with pytest.raises(ValueError, match=attribute):
        encode_attributes({"mcore_data": {"w": 1}, attribute: {}})


def test_they_travel_with_the_structure_and_are_part_of_its_signature() -> None:
    plain, told, other = (table(tensor("w"), attributes=each) for each in ({}, _shape(4, 2), _shape(2, 4)))
    assert len({StructureSignature.of(each, context_of()).value for each in (plain, told, other)}) == 3
    arrived = TableDecoder().decode(msgspec.msgpack.decode(msgspec.msgpack.encode(_sent(told)), type=StructureMessage))
    assert attributes_of(arrived.attributes) == _shape(4, 2)
    assert StructureSignature.of(arrived, context_of()) == StructureSignature.of(told, context_of())


@pytest.mark.parametrize("data", [b"\xc1", b"\x93\x01\x02\x03", msgspec.msgpack.encode({"a": 3}), _DEEP])
def test_a_message_whose_attributes_cannot_be_read_is_an_exchange_error(data: bytes) -> None:
    message = msgspec.structs.replace(_sent(table(tensor("w"))), attributes=data)
    with pytest.raises(ExchangeError, match="attributes of the metadata"):
        TableDecoder().decode(message)


def test_a_changed_fact_is_told_with_its_key() -> None:
    same = tensor("same")
    diff = diff_tables(
        table(same, tensor("w"), attributes=_shape(4, 2)), table(same, tensor("w"), attributes=_shape(8))
    )
    assert list(diff.changed) == ["w"]
    assert "with mcore_data {'shape': (4, 2)} -> " in diff.changed["w"]
    assert diff.changed["w"].endswith("with mcore_data {'shape': (8,)}")
    assert not diff_tables(table(same, attributes=_shape(8)), table(same, attributes=_shape(8)))


def test_those_of_all_ranks_come_together_in_the_metadata() -> None:
    halves = [table(chunk("w", [4], [2 * rank], [2]), tensor(f"own.{rank}"), attributes=_told(rank)) for rank in (0, 1)]
    plan = make_global_plan(halves)
    expected = {"w": {"shape": (2, 2)}, "own.0": 0, "own.1": 1}
    assert plan.attributes == {"mcore_data": expected}
    assert stock_metadata(plan).mcore_data == expected  # type: ignore[attr-defined]


def _told(rank: int) -> dict[str, Any]:
    return {"mcore_data": {"w": {"shape": (2, 2)}, f"own.{rank}": rank}}


def test_ranks_that_say_different_things_of_one_name_contradict_each_other() -> None:
    told = [_shape(4, 2), {}, _shape(2, 4), _shape(4, 2)]
    with pytest.raises(PlanConflict, match=r"mcore_data\['w'\].*\(4, 2\).* on rank 0 .*\(2, 4\).* on rank 2") as caught:
        make_global_plan([table(tensor("w"), attributes=each) for each in told])
    assert (caught.value.key, caught.value.ranks) == ("w", [0, 2])
