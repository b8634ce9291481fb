"""Digests of the common state: equal for equal states, and when they differ they say where."""

from __future__ import annotations

import argparse
import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import numpy as np
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


class _Schedule(enum.Enum):
    COSINE = 1


@dataclasses.dataclass
class _Settings:
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: _Schedule = _Schedule.COSINE


def test_of_settings_in_a_dataclass_the_field_that_differs_is_named() -> None:
    first, other = leaf_digests({"s": _Settings(0.1)}).digests, leaf_digests({"s": _Settings(0.1, (0.9, 0.99))}).digests
    assert {path for path in first if first[path] != other[path]} == {"s.betas.1"}


@pytest.mark.parametrize(
    "other",
    [np.zeros(4, np.float64), np.zeros((2, 2), np.float32), np.ones(4, np.float32), [0.0] * 4],
    ids=["dtype", "shape", "values", "list"],
)
def test_arrays_differ_by_their_dtype_shape_and_values(other: Any) -> None:
    array = np.zeros(4, np.float32)
    assert leaf_digests({"a": array}).whole() == leaf_digests({"a": array.copy()}).whole()
    assert leaf_digests({"a": array}).whole() != leaf_digests({"a": other}).whole()


_ODD_TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda dense: dense.to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "conjugate": lambda dense: torch.complex(dense, 2 * dense).conj(),
    "negative": lambda dense: torch.complex(dense, 2 * dense).conj().imag,
    "nested": lambda dense: torch.nested.nested_tensor([dense[0], dense[:2].reshape(-1)]),
    "transposed": lambda dense: (dense + torch.arange(3.0)).T,
    "scalar": lambda dense: dense[0, 0].clone(),
}
"""Kinds of tensors whose bytes are not simply there to be read. Stock puts all of them into ``common.pt``."""


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says of some kinds that they are new
@pytest.mark.parametrize("kind", _ODD_TENSORS)
def test_tensors_of_every_kind_are_compared_by_what_they_hold(kind: str) -> None:
    found = [leaf_digests({kind: _ODD_TENSORS[kind](value * torch.eye(3))}).whole() for value in (1.0, 1.0, 2.0)]
    assert found[0] == found[1] != found[2]


def test_a_tensor_without_data_stops_no_save() -> None:
    assert leaf_digests({"m": torch.ones(2, device="meta")}).whole()
