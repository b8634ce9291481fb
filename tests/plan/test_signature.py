"""The signature changes with everything that a plan depends on, and with nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from robust_dcp import Channel, RobustPlanner
from robust_dcp.items import Items, Path
from robust_dcp.plan.state_dict import OptionValue, StructureSignature, encode_context
from tests.plan.structures import CONTEXT, Item, chunk, rank_items, table, tensor


def _signature(
    items: list[Item], paths: dict[str, Path] | None, context: Mapping[str, OptionValue] = CONTEXT
) -> StructureSignature:
    return StructureSignature.of(table(*items, paths=paths), encode_context(context))


def _signature_of_state_dict(state_dict: dict[str, Any], *, flatten: bool = True) -> StructureSignature:
    planner = RobustPlanner(flatten_state_dict=flatten, no_dist=True)
    planner.set_up_planner(state_dict)
    return planner.describe(Channel.for_group(None, no_dist=True)).signature


def _reversed(value: Any) -> Any:
    return {key: _reversed(value[key]) for key in reversed(value)} if isinstance(value, dict) else value


_LEAVES = st.one_of(
    st.integers(),
    st.text(max_size=3),
    st.builds(
        lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        st.lists(st.integers(0, 3), max_size=2),
        st.sampled_from([torch.float32, torch.int64]),
    ),
)
_STATE_DICTS = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.recursive(
        _LEAVES, lambda inner: st.dictionaries(st.sampled_from("xyz01"), inner, min_size=1, max_size=3), max_leaves=6
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=30)
@given(_STATE_DICTS, st.booleans())
def test_the_order_of_a_nested_dict_does_not_matter(state_dict: dict[str, Any], flatten: bool) -> None:
    expected = _signature_of_state_dict(state_dict, flatten=flatten)
    assert _signature_of_state_dict(_reversed(state_dict), flatten=flatten) == expected


def test_contents_addresses_and_strides_do_not_matter() -> None:
    before = {"w": torch.zeros(4, 6), "step": 1, "text": "a"}
    after = {"w": torch.rand(6, 4).T, "step": 10**9, "text": "abc" * 100}
    assert _signature_of_state_dict(after) == _signature_of_state_dict(before)


# Fields as they are: none may be left out of what is hashed, and none that will be added.


def _draw_other(value: Any, data: st.DataObject) -> Any:
    """Another value of the same kind: one string, number, byte or part of it is changed."""
    if isinstance(value, np.ndarray):
        assume(value.size)
        changed = value.copy()
        place = data.draw(st.integers(0, value.size - 1))
        changed.reshape(-1)[place] += data.draw(st.sampled_from([1, 2, 100]))
        return changed
    if isinstance(value, tuple):
        assume(value)
        place = data.draw(st.integers(0, len(value) - 1))
        return (*value[:place], _draw_other(value[place], data), *value[place + 1 :])
    return f"{value}x" if isinstance(value, str) else value + 1


@settings(max_examples=25)
@given(rank_items(), st.data())
@pytest.mark.parametrize("field", [field for field in Items.__struct_fields__ if field != "rank"])
def test_no_field_that_a_rank_sends_is_left_out_of_its_signature(
    field: str, drawn: tuple[list[Item], dict[str, Path]], data: st.DataObject
) -> None:
    items, paths = drawn
    one = replace(table(*items, paths=paths), peers=(0, 1))  # no field is empty
    other = replace(one, **{field: _draw_other(getattr(one, field), data)})
    assert StructureSignature.of(other, b"") != StructureSignature.of(one, b"")


@pytest.mark.parametrize("option", CONTEXT)
def test_no_option_is_left_out_of_the_signature(option: str) -> None:
    assert _signature([tensor("w")], None, {**CONTEXT, option: "other"}) != _signature([tensor("w")], None)


_FEW_CHUNKS = st.lists(
    st.builds(
        lambda name, at, n, dtype: chunk(name, [8], [at], [n], dtype),
        st.sampled_from("ab"),
        st.integers(0, 2),
        st.integers(1, 2),
        st.sampled_from([torch.float32, torch.int64]),
    ),
    max_size=4,
    unique_by=lambda item: (item.name, item.offset),
)


@settings(max_examples=300)
@given(_FEW_CHUNKS, _FEW_CHUNKS)
@example(
    [chunk("a", [8], [0], [1]), chunk("a", [8], [1], [1]), chunk("b", [8], [0], [1])],
    [chunk("a", [8], [0], [1]), chunk("b", [8], [0], [1]), chunk("b", [8], [1], [1])],
)
@example(
    [chunk("a", [8], [0], [1]), chunk("a", [8], [1], [1]), chunk("b", [8], [2], [1])],
    [chunk("a", [8], [0], [1]), chunk("b", [8], [1], [1]), chunk("b", [8], [2], [1])],
)
def test_two_ranks_sign_alike_only_if_they_hold_the_same_chunks(left: list[Item], right: list[Item]) -> None:
    """Two chunks of ``a`` and one of ``b`` are not one of ``a`` and two of ``b``, with all other columns the same."""
    assert (_signature(left, None) == _signature(right, None)) == (set(left) == set(right))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"a": {"b": 1}}, {"a.b": 1}),
        ({"a": {"0": 1}}, {"a": [1]}),
        ({"a": {"b": torch.zeros(2)}}, {"a.b": torch.zeros(2)}),
        ({"x": [torch.zeros(2)]}, {"x": {"0": torch.zeros(2)}}),
    ],
)
def test_another_place_in_the_nested_dict_under_the_same_fqn_changes_the_signature(
    left: dict[str, Any], right: dict[str, Any]
) -> None:
    assert _signature_of_state_dict(left) != _signature_of_state_dict(right)


_OPTIONS = {"one": 1, "true": True, "text": "1", "none": None, "fraction": 0.5}


def test_options_are_told_apart_by_type_and_not_by_order() -> None:
    def signature(**options: Any) -> StructureSignature:
        return _signature([tensor("w")], None, options)

    assert len({signature(option=value).value for value in _OPTIONS.values()}) == len(_OPTIONS)
    assert signature(a=1, b=2) == signature(b=2, a=1)
    assert signature(a=1, b=2) != signature(a=2, b=1)


def test_a_signature_is_128_bits_and_prints_as_hex() -> None:
    signature = _signature([tensor("w")], None)
    assert len(signature.value) == 16
    assert str(signature) == signature.hex == signature.value.hex()
    with pytest.raises(ValueError, match="16 bytes, got 3"):
        StructureSignature(b"abc")
