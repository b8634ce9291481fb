"""A file of `torch.save` that becomes a checkpoint and a file again holds what was there, containers included."""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st

import robust_dcp
from robust_dcp.conversion.convert import Rules, convert
from robust_dcp.conversion.outline import filled, outline_of, outline_of_paths, with_items


def adam() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return (
            list(one) == list(other)
            and list(map(type, one)) == list(map(type, other))
            and all(same(one[key], other[key]) for key in one)
            and getattr(one, "_metadata", None) == getattr(other, "_metadata", None)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
def test_optimizers_and_modules_load_what_has_been_a_checkpoint_meanwhile(layout: str, tmp_path: Path) -> None:
    state = adam()
    assert list(state["optimizer"]["state"]) == [0, 1, 2, 3]
    torch.save(state, tmp_path / "file.pt")
    convert(tmp_path / "file.pt", tmp_path / "checkpoint", form="dcp", layout=layout)
    convert(tmp_path / "checkpoint", tmp_path / "again", form="dcp")
    for made in ("checkpoint", "again"):
        convert(tmp_path / made, tmp_path / "back.pt", form="torch", overwrite=True)
        assert same(torch.load(tmp_path / "back.pt"), state)
    loaded = adam()
    for load in (robust_dcp.load, dcp.load) if layout == "torch" else (robust_dcp.load,):
        load(loaded, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
        assert same(loaded["optimizer"]["state"], state["optimizer"]["state"])


KEYS = st.one_of(st.integers(-2, 3), st.text("ab.0", max_size=2), st.booleans(), st.none(), st.floats(0, 1))
VALUES = st.one_of(st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2), st.just(torch.ones(2)))
TREES = st.recursive(
    VALUES,
    lambda each: st.one_of(
        st.dictionaries(KEYS, each, max_size=3),
        st.dictionaries(KEYS, each, max_size=3).map(OrderedDict),
        st.lists(each, max_size=3),
        st.tuples(each, each),
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@example({0: 5, "0": {}})
@example({0: {"x": torch.ones(2)}, "0": 5})
@example({0: [torch.ones(2)], "0": [1, 2]})
@given(st.dictionaries(KEYS, TREES, min_size=1, max_size=3))
def test_an_outline_keeps_every_container(state: dict[Any, Any]) -> None:
    try:
        flat, paths = dcp._nested_dict.flatten_state_dict(state)
    except ValueError:  # two items with one name, which no checkpoint can hold
        return
    file = io.BytesIO()
    torch.save(outline_of(state, flat, paths), file)
    file.seek(0)
    outline = with_items(torch.load(file), set(flat), ())
    assert same(filled(outline, flat.__getitem__), state)


def test_a_stock_checkpoint_has_lists_where_its_paths_have_places(tmp_path: Path) -> None:
    state = {"list": [torch.ones(1), {"x": torch.ones(2)}], "dict": {"0": torch.ones(3), "1": 4}}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    convert(tmp_path / "stock", tmp_path / "back.pt", form="torch")
    assert same(torch.load(tmp_path / "back.pt"), state)


def test_items_that_are_taken_out_or_renamed_leave_the_rest_where_it_was(tmp_path: Path) -> None:
    torch.save(adam(), tmp_path / "file.pt")
    rules = Rules(exclude=("optimizer.state.1.*",), rename=(("model.0.*", "linear.*"),))
    convert(tmp_path / "file.pt", tmp_path / "checkpoint", form="dcp", rules=rules)
    convert(tmp_path / "checkpoint", tmp_path / "back.pt", form="torch")
    found = torch.load(tmp_path / "back.pt")
    assert list(found["optimizer"]["state"]) == [0, 2, 3]
    assert set(found) == {"model", "optimizer", "linear.weight", "linear.bias"}


def test_what_a_list_has_lost_is_seen() -> None:
    outline = outline_of_paths({"a.0": ("a", 0), "a.1": ("a", 1), "b": ("b",)})
    assert outline == {"a": ["a.0", "a.1"], "b": "b"}
    assert with_items(outline, {"a.1", "b"}, ["new"]) == {"a": {1: "a.1"}, "b": "b", "new": "new"}
    assert with_items(outline, {"b"}, []) == {"b": "b"}
