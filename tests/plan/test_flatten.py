"""Flattening gives what torch's own gives, for whatever nests."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from robust_dcp.plan.state_dict.flatten import flatten

Pair = namedtuple("Pair", ["left", "right"])


class Rows(list[Any]):
    """A list of somebody's own."""


class Subclass(torch.Tensor):
    """A tensor of somebody's own."""


class Name(str):
    """A key that says something else than it is."""

    def __str__(self) -> str:
        return f"<{super().__str__()}>"


class Proxy:
    """Stands for another object, whose class it claims to have."""

    def __init__(self, target: Any) -> None:
        object.__setattr__(self, "_target", target)

    def __getattribute__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_target"), name)

    def __iter__(self) -> Any:
        return iter(object.__getattribute__(self, "_target"))


_TENSORS = st.sampled_from([torch.zeros(2), torch.nn.Parameter(torch.ones(1)), torch.zeros(1).as_subclass(Subclass)])
_LEAVES = st.one_of(
    _TENSORS,
    st.integers(),
    st.text(max_size=2),
    st.none(),
    st.binary(max_size=2),
    st.builds(Pair, _TENSORS, st.integers()),
    st.tuples(_TENSORS, st.dictionaries(st.text(max_size=1), st.integers(), max_size=1)),
)
_KEYS = st.one_of(st.sampled_from(["a", "b", "a.b", "", "0", "1"]), st.integers(0, 2), st.just(Name("c")), st.none())


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists, dicts = st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=3)
    return st.one_of(
        *(lists, lists.map(Rows), lists.map(tuple), lists.map(Proxy)),
        *(dicts, dicts.map(OrderedDict), dicts.map(UserDict), dicts.map(types.MappingProxyType), dicts.map(Proxy)),
    )


_STATE_DICTS = st.dictionaries(_KEYS, st.recursive(_LEAVES, _containers, max_leaves=12), max_size=5)


def _outcome(function: Any, state_dict: Mapping[Any, Any]) -> Any:
    try:
        flat, mappings = function(state_dict)
    except ValueError as error:
        return str(error)
    return [(name, id(value), mappings[name], list(map(type, mappings[name]))) for name, value in flat.items()]


@given(_STATE_DICTS)
def test_names_order_paths_and_values_are_those_of_torch(state_dict: dict[Any, Any]) -> None:
    assert _outcome(flatten, state_dict) == _outcome(flatten_state_dict, state_dict)


@pytest.mark.parametrize(
    "state_dict",
    [
        {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}},
        {"a": {"b": 1}, "a.b": 2},
        {1: torch.zeros(1), "1": torch.zeros(1)},
        {"a": [torch.zeros(1)], "a.0": 1},
        {"a.0": object(), "a": [object(), torch.zeros(1)]},
    ],
)
def test_two_paths_to_one_name_are_refused_in_torchs_words(state_dict: dict[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"^duplicated flatten key ") as found:
        flatten(state_dict)
    assert str(found.value) == _outcome(flatten_state_dict, state_dict)


def test_the_state_dict_is_left_as_it_is() -> None:
    inner = {"w": torch.zeros(1)}
    state_dict = {"model": inner, "list": [inner, 1]}
    flatten(state_dict)
    assert state_dict == {"model": inner, "list": [inner, 1]} and list(inner) == ["w"]
