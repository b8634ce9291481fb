"""Tables hold what is told of the items, in one order, and refuse one name for two things."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from robust_dcp.errors import PlanConflict
from robust_dcp.plan.structure import ItemKind, Path
from tests.plan.structures import Item, chunk, obj, rank_items, table, tensor


@settings(max_examples=30)
@given(rank_items())
def test_a_table_says_of_each_item_what_was_told_of_it(drawn: tuple[list[Item], dict[str, Path]]) -> None:
    items, paths = drawn
    structure = table(*items, paths=paths)
    expected = sorted(items, key=lambda item: (item.name, item.offset))
    assert len(structure) == len(items)
    assert structure.names == tuple(sorted({item.name for item in items}))
    assert structure.paths is not None
    assert list(structure.paths) == [paths[name] for name in structure.names]
    assert [structure.paths[place] for place in range(len(structure.names))] == list(structure.paths)
    assert list(structure.dtypes) == sorted(structure.dtypes)
    for place, item in enumerate(expected):
        is_tensor = item.kind != ItemKind.BYTES
        assert structure.names[structure.name_ids[place]] == item.name
        assert structure.kinds[place] == item.kind
        assert structure.forms[place] == item.form
        assert structure.dims_of(place) == (item.shape, item.offset, item.size)
        assert structure.dtypes[structure.dtype_ids[place]] == (str(item.dtype)[6:] if is_tensor else "")
        assert structure.layouts[structure.layout_ids[place]] == (str(item.layout)[6:] if is_tensor else "")
        assert structure.requires_grad[place] == (is_tensor and item.requires_grad)


def test_an_empty_state_dict_has_an_empty_table() -> None:
    structure = table(paths={})
    assert len(structure) == 0
    assert structure.names == ()
    assert structure.paths is not None
    assert list(structure.paths) == []


def test_offsets_are_ordered_as_numbers() -> None:
    structure = table(chunk("w", [30], [10], [20]), chunk("w", [30], [9], [1]), chunk("w", [30], [0], [9]))
    assert structure.offsets.tolist() == [0, 9, 10]


def test_items_are_described_in_words() -> None:
    items = [tensor("m.w", [2, 3], torch.bfloat16), tensor("m.g.0", ()), obj("step")]
    structure = table(*items, paths={"m.w": ("m", "w"), "m.g.0": ("m", "g", 0), "step": ("step",)})
    described = [(structure.describe_item(i), structure.describe_path(i)) for i in range(len(structure))]
    assert described == [
        ("float32[]", "'m'/'g'/0"),
        ("bfloat16[2, 3]", "'m'/'w'"),
        ("object", "'step'"),
    ]


def test_a_chunk_is_described_with_its_place_and_what_is_unusual() -> None:
    item = replace(chunk("w", [8, 4], [4, 0], [4, 4]), requires_grad=True, layout=torch.sparse_coo)
    words = table(item).describe_item(0)
    assert words == "float32[8, 4] sparse_coo requires_grad chunk at [4, 0] of size [4, 4]"


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        (obj("w"), obj("w"), "twice (as BYTES and as BYTES)"),
        (tensor("w", [4]), tensor("w", [4]), "'w' at offset [0] twice"),
        (chunk("w", [8], [4], [4]), chunk("w", [8], [4], [2]), "'w' at offset [4] twice"),
        (obj("w"), tensor("w"), "BYTES and as TENSOR"),
        (tensor("w", [4]), chunk("w", [4], [2], [2]), "TENSOR and as SHARD"),
    ],
)
def test_a_name_that_stands_for_two_items_of_one_rank_is_refused(left: Item, right: Item, words: str) -> None:
    with pytest.raises(PlanConflict) as caught:
        table(left, tensor("other"), right)
    assert caught.value.key == "w"
    assert words in str(caught.value)
