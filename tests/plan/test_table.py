"""Tables hold what the write items say, in one order, and refuse one name for two things."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from robust_dcp.errors import PlanConflict
from robust_dcp.plan.structure import Form, ItemKind, reorder, table_of
from robust_dcp.plan.structure.table import Path
from tests.plan.structures import Item, chunk, obj, rank_items, table, tensor


@settings(max_examples=30)
@given(rank_items())
def test_a_table_says_of_each_item_what_its_write_item_says(drawn: tuple[list[Item], dict[str, Path]]) -> None:
    items, paths = drawn
    structure = table(*items, paths=paths)
    expected = sorted(items, key=lambda item: (item.name, item.offset))
    assert len(structure) == len(items)
    assert structure.names == tuple(sorted({item.name for item in items}))
    assert structure.paths == tuple(paths[name] for name in structure.names)
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
    structure = table()
    assert len(structure) == 0
    assert structure.names == ()
    assert structure.paths == ()


def test_offsets_are_ordered_as_numbers() -> None:
    structure = table(chunk("w", [30], [10], [20]), chunk("w", [30], [9], [1]), chunk("w", [30], [0], [9]))
    assert structure.offsets.tolist() == [0, 9, 10]


def test_the_items_of_a_real_state_dict_are_described_in_words() -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner({"m": {"w": torch.zeros(2, 3, dtype=torch.bfloat16), "g": [torch.ones(())]}, "step": 3})
    items = reorder(create_default_local_save_plan(planner.state_dict, True).items)
    structure = table_of(
        items, [Form.VARIABLE if i.tensor_data is None else Form.FIXED for i in items], planner.mappings
    )
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
        (obj("w"), obj("w"), "twice (as BYTE_IO and as BYTE_IO)"),
        (tensor("w", [4]), tensor("w", [4]), "'w' at offset [0] twice"),
        (chunk("w", [8], [4], [4]), chunk("w", [8], [4], [2]), "'w' at offset [4] twice"),
        (obj("w"), tensor("w"), "BYTE_IO and as TENSOR"),
        (tensor("w", [4]), chunk("w", [4], [2], [2]), "TENSOR and as SHARD"),
    ],
)
def test_a_name_that_stands_for_two_items_of_one_rank_is_refused(left: Item, right: Item, words: str) -> None:
    items = reorder([left.write_item(), tensor("other").write_item(), right.write_item()])
    with pytest.raises(PlanConflict) as caught:
        table_of(items, [Form.FIXED] * 3, None)
    assert caught.value.key == "w"
    assert words in str(caught.value)
