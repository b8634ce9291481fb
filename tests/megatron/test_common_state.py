"""Digests of the common state: equal for equal states, and when they differ they say where."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from robust_dcp.comm import wire
from robust_dcp.megatron.checks.common_state import LeafDigests, leaf_digests

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), max_size=3).map(torch.tensor),
    st.dictionaries(st.sampled_from("xyz"), st.integers()).map(lambda values: argparse.Namespace(**values)),
)
_STATES = st.recursive(
    _LEAVES, lambda child: st.one_of(st.lists(child, max_size=3), st.dictionaries(st.sampled_from("abcd"), child))
)


def _in_other_order(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_other_order(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [_in_other_order(each) for each in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


@given(state=_STATES)
def test_equal_states_have_equal_digests_whatever_the_order_of_their_keys(state: Any) -> None:
    digests = leaf_digests({"state": state})
    again = leaf_digests({"state": _in_other_order(state)})
    assert digests.digests == again.digests
    assert digests.whole() == again.whole() < 1 << 64
    assert wire.decode(wire.encode(digests), LeafDigests) == digests


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"a": {"lr": 0.2}, "b": [1, torch.ones(2)]}, {"a.lr"}),
        ({"a": {"lr": 0.1}, "b": [1, torch.ones(2, dtype=torch.float64)]}, {"b.1"}),
        ({"a": {"lr": 0.1}, "b": [True, torch.ones(2)]}, {"b.0"}),
        ({"a": {"lr": 0.1}, "b": [1]}, {"b#", "b.1"}),
        ({"a": {}, "b": [1, torch.ones(2)]}, {"a#", "a.lr"}),
    ],
)
def test_what_differs_is_found_by_its_path(changed: dict[str, Any], where: set[str]) -> None:
    first = leaf_digests({"a": {"lr": 0.1}, "b": [1, torch.ones(2)]}).digests
    other = leaf_digests(changed).digests
    assert {path for path in first.keys() | other.keys() if first.get(path) != other.get(path)} == where


def test_a_value_that_does_not_pickle_is_compared_by_its_class() -> None:
    assert leaf_digests({"f": lambda: 1}).whole() == leaf_digests({"f": lambda: 2}).whole()
