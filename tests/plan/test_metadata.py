"""The metadata of a plan is what stock DCP makes of the same plan, and points at the places of the layout."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from robust_dcp.plan.global_plan import GlobalPlan, make_global_plan, plan_of_kept
from robust_dcp.plan.metadata import MetadataTemplate, stock_metadata
from robust_dcp.plan.share import place_items, place_items_of_all
from robust_dcp.plan.structure import ItemKind
from robust_dcp.storage.layouts.places import Placements
from robust_dcp.storage.metadata.metadata_file import decode_metadata
from robust_dcp.storage.metadata.pickled import EncodedMetadata
from robust_dcp.storage.writing.engine import WrittenFiles
from tests.plan.structures import Item, World, chunk, obj, table, tensor, worlds

_TYPES = {
    ItemKind.TENSOR: WriteItemType.TENSOR,
    ItemKind.SHARD: WriteItemType.SHARD,
    ItemKind.BYTES: WriteItemType.BYTE_IO,
}


MARK = "0123456789abcdef"


def _write_item(item: Item) -> WriteItem:
    if item.kind == ItemKind.BYTES:
        return WriteItem(index=MetadataIndex(item.name), type=_TYPES[item.kind])
    return WriteItem(
        index=MetadataIndex(item.name, torch.Size(item.offset)),
        type=_TYPES[item.kind],
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(item.offset), torch.Size(item.size)),
            properties=TensorProperties(item.dtype, item.layout, item.requires_grad),
            size=torch.Size(item.shape),
        ),
    )


def _stock_plans(world: World, plan: GlobalPlan) -> list[SavePlan]:
    """What each rank writes, as write items."""
    plans = []
    for items, kept in zip(world.ranks, plan.kept, strict=True):
        ordered = sorted(items, key=lambda item: (item.name, item.offset))
        plans.append(SavePlan([_write_item(ordered[place]) for place in kept.tolist()]))
    return plans


def _in_any_order(entry: Any) -> Any:
    if not isinstance(entry, TensorStorageMetadata):
        return entry
    return replace(entry, chunks=sorted(entry.chunks, key=lambda c: (tuple(c.offsets), tuple(c.sizes))))


def _placements(plan: GlobalPlan, files: int = 2) -> list[Placements]:
    return [place_items(t, kept, files=files) for t, kept in zip(plan.columns.tables, plan.kept, strict=True)]


def _decoded(encoded: EncodedMetadata) -> Metadata:
    return decode_metadata(b"".join(encoded.fragments), "a test")


def _written(placements: Placements, are_plain: bool = True) -> WrittenFiles:
    places = [[64 * n, 10 + n] for n in range(len(placements.variable))]
    return WrittenFiles(are_plain, np.array(places, dtype=np.int64).reshape(-1, 2), (), 0)


@settings(max_examples=40)
@given(worlds(min_ranks=1), st.booleans())
def test_it_says_what_stock_says_of_the_same_plans(world: World, flatten: bool) -> None:
    names = sorted({item.name for items in world.ranks for item in items})
    mappings = [{name: (name,) for name in names if any(i.name == name for i in items)} for items in world.ranks]
    tables = [
        table(*items, paths=mapping if flatten else None) for items, mapping in zip(world.ranks, mappings, strict=True)
    ]
    plan = make_global_plan(tables)
    placements = _placements(plan)
    ours = _decoded(MetadataTemplate(plan, placements).encode([_written(p) for p in placements], StorageMeta("id")))

    stock_plans = _stock_plans(world, plan)
    _, stock = create_default_global_save_plan(stock_plans)
    assert {k: _in_any_order(v) for k, v in ours.state_dict_metadata.items()} == {
        k: _in_any_order(v) for k, v in stock.state_dict_metadata.items()
    }
    assert (ours.planner_data or {}) == (dict(ChainMap(*mappings)) if flatten else {})
    assert set(ours.storage_data) == {item.index for stock_plan in stock_plans for item in stock_plan.items}
    assert ours.storage_meta == StorageMeta("id")
    assert all(type(key) is MetadataIndex for key in ours.storage_data)


def test_every_item_points_at_its_place_in_the_files_of_its_rank() -> None:
    ranks: list[list[Item]] = [
        [chunk("w", [8], [0], [4]), obj("a")],
        [chunk("w", [8], [4], [4]), obj("b"), obj("c")],
        [],
    ]
    plan = make_global_plan([table(*items) for items in ranks])
    placements = _placements(plan)
    written = [_written(p, plain) for p, plain in zip(placements, (True, False, True), strict=True)]
    storage = _decoded(MetadataTemplate(plan, placements).encode(written, StorageMeta(save_id=MARK))).storage_data
    found = {key.fqn + str(list(key.offset or ())): (i.relative_path, i.offset) for key, i in storage.items()}
    assert found == {
        "w[0]": ("__0_0.distcp", 0),
        "a[]": ("__0_1.distcp", 0),
        "w[4]": (f"__1_0.{MARK}.distcp", 0),
        "b[]": (f"__1_1.{MARK}.distcp", 0),
        "c[]": (f"__1_1.{MARK}.distcp", 64),
    }
    lengths = {key.fqn: info.length for key, info in storage.items() if key.fqn != "w"}
    assert lengths == {"a": 10, "b": 10, "c": 11}
    assert all(type(n) is int for info in storage.values() for n in (info.offset, info.length))


def test_saves_by_one_plan_differ_in_what_the_plan_does_not_say() -> None:
    plan = make_global_plan([table(tensor("w"), obj("o"), paths={"w": ("w",), "o": ("o",)})])
    placements = _placements(plan)
    template = MetadataTemplate(plan, placements)
    first = template.encode([_written(placements[0])], StorageMeta("1"))
    second = template.encode([_written(placements[0], are_plain=False)], StorageMeta("2", save_id=MARK))
    for encoded, names, meta in (
        (first, {"__0_0.distcp", "__0_1.distcp"}, "1"),
        (second, {f"__0_0.{MARK}.distcp", f"__0_1.{MARK}.distcp"}, "2"),
    ):
        metadata = _decoded(encoded)
        assert set(metadata.state_dict_metadata) == set(metadata.planner_data) == {"w", "o"}
        assert {info.relative_path for info in metadata.storage_data.values()} == names
        assert metadata.storage_meta.checkpoint_id == meta
    assert (placements[0].offset < 0).tolist() == [True, False]  # "o" keeps no place of an earlier save


@settings(max_examples=40)
@given(worlds(min_ranks=1))
def test_the_decisions_of_a_plan_make_the_same_plan_again(world: World) -> None:
    plan = make_global_plan(world.tables)
    again = plan_of_kept(world.tables, plan.kept)
    assert again.written.tolist() == plan.written.tolist()
    placements = place_items_of_all(again, files=2)
    for one, other in zip(placements, _placements(plan), strict=True):
        assert one.file_nbytes == other.file_nbytes
        assert one.offset.tolist() == other.offset.tolist()


def test_places_for_another_number_of_objects_are_refused() -> None:
    plan = make_global_plan([table(obj("a"), obj("b"), obj("c"))])
    template = MetadataTemplate(plan, _placements(plan))
    for rows in ([], [[0, 1]], [[0, 1]] * 4):
        places = np.array(rows, dtype=np.int64).reshape(-1, 2)
        with pytest.raises(ValueError, match="rank 0"):
            template.encode([WrittenFiles(True, places, (), 0)], StorageMeta("id"))


@settings(max_examples=20)
@given(worlds(min_ranks=1))
def test_for_another_writer_it_is_what_stock_makes(world: World) -> None:
    plan = make_global_plan(world.tables)
    _, stock = create_default_global_save_plan(_stock_plans(world, plan))
    ours = stock_metadata(plan)
    assert ours.storage_data is None
    assert {k: _in_any_order(v) for k, v in ours.state_dict_metadata.items()} == {
        k: _in_any_order(v) for k, v in stock.state_dict_metadata.items()
    }


def test_dtypes_layouts_and_requires_grad_come_back_as_torch_objects() -> None:
    item = replace(tensor("w", [2], torch.float8_e4m3fn), requires_grad=True, layout=torch.sparse_csr)
    plan = make_global_plan([table(item)])
    encoded = MetadataTemplate(plan, _placements(plan)).encode([_written(_placements(plan)[0])], StorageMeta("id"))
    entry = _decoded(encoded).state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    properties = entry.properties
    assert (properties.dtype, properties.layout, properties.requires_grad) == (
        torch.float8_e4m3fn,
        torch.sparse_csr,
        True,
    )
