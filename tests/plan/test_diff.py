"""A diff names the keys that came, went and changed, and stays short however many there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_dcp.plan.structure import Form, ItemKind, StructureDiff, diff_tables, merge_diffs
from robust_dcp.plan.structure.table import Path
from tests.plan.structures import Item, chunk, obj, rank_items, table, tensor


@settings(max_examples=30)
@given(rank_items())
def test_a_structure_does_not_differ_from_itself(drawn: tuple[list[Item], dict[str, Path]]) -> None:
    items, paths = drawn
    diff = diff_tables(table(*items, paths=paths), table(*reversed(items), paths=paths))
    assert not diff
    assert str(diff) == "no change"


@settings(max_examples=30)
@given(rank_items(), st.data())
def test_keys_that_come_and_go_are_listed(drawn: tuple[list[Item], dict[str, Path]], data: st.DataObject) -> None:
    items, paths = drawn
    names = sorted(paths)
    gone = data.draw(st.sets(st.sampled_from(names)))
    full, less = table(*items, paths=paths), table(*(i for i in items if i.name not in gone), paths=paths)
    assert diff_tables(full, less) == StructureDiff(removed=tuple(sorted(gone)))
    assert diff_tables(less, full) == StructureDiff(added=tuple(sorted(gone)))


_OLD = chunk("w", [8, 4], [0, 0], [4, 4])


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (replace(_OLD, dtype=torch.bfloat16), "-> bfloat16[8, 4] chunk"),
        (replace(_OLD, shape=(16, 4)), "-> float32[16, 4]"),
        (replace(_OLD, offset=(4, 0)), "-> float32[8, 4] chunk at [4, 0]"),
        (replace(_OLD, size=(3, 4)), "of size [3, 4]"),
        (replace(_OLD, requires_grad=True), "requires_grad"),
        (replace(_OLD, layout=torch.sparse_csr), "sparse_csr"),
        (replace(_OLD, form=Form.VARIABLE), "(variable size)"),
        (replace(_OLD, kind=ItemKind.TENSOR), "float32[8, 4]"),
        (obj("w"), "-> object"),
    ],
)
def test_a_changed_key_is_told_with_what_it_was_and_what_it_is(new: Item, words: str) -> None:
    diff = diff_tables(table(_OLD, tensor("same")), table(new, tensor("same")))
    assert list(diff.changed) == ["w"]
    assert not diff.added
    assert not diff.removed
    assert diff.changed["w"].startswith("float32[8, 4] chunk at [0, 0] of size [4, 4] -> ")
    assert words in diff.changed["w"]
    assert str(diff).startswith("changed w (float32[8, 4] chunk")


@pytest.mark.parametrize("shape", [(), (4,)])
def test_a_whole_tensor_that_becomes_a_shard_is_a_change(shape: tuple[int, ...]) -> None:
    whole = tensor("w", shape)
    assert diff_tables(table(whole), table(replace(whole, kind=ItemKind.SHARD))).changed.keys() == {"w"}


def test_another_place_in_the_nested_dict_is_a_change() -> None:
    diff = diff_tables(
        table(tensor("a.0"), paths={"a.0": ("a", 0)}),
        table(tensor("a.0"), paths={"a.0": ("a", "0")}),
    )
    assert diff.changed == {"a.0": "float32[4] at 'a'/0 -> float32[4] at 'a'/'0'"}


def test_more_chunks_of_a_key_are_a_change_and_counted() -> None:
    chunks = [chunk("w", [8], [place], [1]) for place in range(4)]
    diff = diff_tables(table(chunks[0]), table(*chunks))
    assert diff.changed["w"].endswith("and 3 more")


def test_the_diffs_of_many_ranks_count_each_key_once() -> None:
    diff = StructureDiff(added=("a",), removed=("r",), changed={"c": "x -> y"})
    assert merge_diffs([diff] * 100) == diff
    assert merge_diffs([]) == StructureDiff()
    assert not merge_diffs([StructureDiff()] * 3)


def test_a_key_that_one_rank_lost_and_another_gained_has_moved() -> None:
    merged = merge_diffs([StructureDiff(added=("a", "new")), StructureDiff(removed=("a", "old"))])
    assert merged == StructureDiff(("new",), ("old",), {"a": "moved to other ranks"})


def test_a_key_that_changed_on_one_rank_is_not_also_new_or_gone() -> None:
    changed = StructureDiff(changed={"w": "x -> y"})
    assert merge_diffs([changed, StructureDiff(added=("w",))]) == changed
    assert merge_diffs([StructureDiff(removed=("w",)), changed]) == changed


def test_the_line_is_bounded_and_counts_the_rest() -> None:
    keys = [f"layers.{n:04}.weight" for n in range(1000)]
    diff = diff_tables(table(*(tensor(key) for key in keys)), table(*(tensor(f"new.{key}") for key in keys)))
    text = str(merge_diffs([diff] * 4))
    assert text.count("and 992 more") == 2
    assert len(text) < 1000
    assert text.startswith("added new.layers.0000.weight, ")
    assert "; removed layers.0000.weight" in text
    changed = diff_tables(table(*map(tensor, keys)), table(*(tensor(key, [5]) for key in keys)))
    assert len(str(changed)) < 1000
