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
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from robust_dcp.plan.global_plan import GlobalPlan, make_global_plan
from robust_dcp.plan.metadata import MetadataTemplate
from robust_dcp.plan.rank_plan import place_items
from robust_dcp.storage.engine import WrittenFiles
from robust_dcp.storage.layout import Placements
from tests.plan.structures import Item, World, chunk, obj, table, tensor, worlds


def _stock_plans(world: World, plan: GlobalPlan) -> list[SavePlan]:
    """What each rank writes, as write items."""
    plans = []
    for items, kept in zip(world.ranks, plan.kept, strict=True):
        ordered = sorted(items, key=lambda item: (item.name, item.offset))
        plans.append(SavePlan([ordered[place].write_item() for place in kept.tolist()]))
    return plans


def _in_any_order(entry: Any) -> Any:
    if not isinstance(entry, TensorStorageMetadata):
        return entry
    return replace(entry, chunks=sorted(entry.chunks, key=lambda c: (tuple(c.offsets), tuple(c.sizes))))


def _placements(plan: GlobalPlan, files: int = 2) -> list[Placements]:
    return [place_items(t, kept, files=files) for t, kept in zip(plan.columns.tables, plan.kept, strict=True)]


def _written(placements: Placements, generation: int = 0) -> WrittenFiles:
    places = [[64 * n, 10 + n] for n in range(len(placements.variable))]
    return WrittenFiles(generation, np.array(places, dtype=np.int64).reshape(-1, 2), (), 0)


@settings(max_examples=40)
@given(worlds(min_ranks=1), st.booleans())
def test_it_says_what_stock_says_of_the_same_plans(world: World, flatten: bool) -> None:
    names = sorted({item.name for items in world.ranks for item in items})
    mappings = [
        {name: ("model", name) for name in names if any(i.name == name for i in items)} for items in world.ranks
    ]
    tables = [
        table(*items, paths=mapping if flatten else None) for items, mapping in zip(world.ranks, mappings, strict=True)
    ]
    plan = make_global_plan(tables)
    placements = _placements(plan)
    ours = MetadataTemplate(plan, placements).with_storage([_written(p) for p in placements], StorageMeta("id"))

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
    written = [_written(p, generation) for p, generation in zip(placements, (0, 3, 0), strict=True)]
    storage = MetadataTemplate(plan, placements).with_storage(written, StorageMeta("id")).storage_data
    found = {key.fqn + str(list(key.offset or ())): (i.relative_path, i.offset) for key, i in storage.items()}
    assert found == {
        "w[0]": ("__0_0.distcp", 0),
        "a[]": ("__0_1.distcp", 0),
        "w[4]": ("__1_0.3.distcp", 0),
        "b[]": ("__1_1.3.distcp", 0),
        "c[]": ("__1_1.3.distcp", 64),
    }
    lengths = {key.fqn: info.length for key, info in storage.items() if key.fqn != "w"}
    assert lengths == {"a": 10, "b": 10, "c": 11}
    assert all(type(n) is int for info in storage.values() for n in (info.offset, info.length))


def test_a_template_gives_each_save_metadata_of_its_own() -> None:
    plan = make_global_plan([table(tensor("w"), obj("o"), paths={"w": ("w",), "o": ("o",)})])
    placements = _placements(plan)
    template = MetadataTemplate(plan, placements)
    first = template.with_storage([_written(placements[0], 0)], StorageMeta("1"))
    first.state_dict_metadata.clear()
    first.storage_data.clear()
    first.planner_data.clear()
    second = template.with_storage([_written(placements[0], 1)], StorageMeta("2"))
    assert set(second.state_dict_metadata) == set(second.planner_data) == {"w", "o"}
    assert {info.relative_path for info in second.storage_data.values()} == {"__0_0.1.distcp", "__0_1.1.distcp"}
    assert (placements[0].offset < 0).tolist() == [True, False]  # "o" keeps no place of an earlier save


def test_places_for_another_number_of_objects_are_refused() -> None:
    plan = make_global_plan([table(obj("a"), obj("b"), obj("c"))])
    template = MetadataTemplate(plan, _placements(plan))
    for rows in ([], [[0, 1]], [[0, 1]] * 4):
        places = np.array(rows, dtype=np.int64).reshape(-1, 2)
        with pytest.raises(ValueError, match="rank 0"):
            template.with_storage([WrittenFiles(0, places, (), 0)], StorageMeta("id"))


def test_a_plan_for_another_writer_leaves_the_places_to_it() -> None:
    plan = make_global_plan([table(tensor("w"))])
    template = MetadataTemplate(plan, None)
    assert template.without_storage().storage_data is None
    with pytest.raises(ValueError, match="another writer"):
        template.with_storage([_written(_placements(plan)[0])], StorageMeta("id"))


def test_dtypes_layouts_and_requires_grad_come_back_as_torch_objects() -> None:
    item = replace(tensor("w", [2], torch.float8_e4m3fn), requires_grad=True, layout=torch.sparse_csr)
    entry = MetadataTemplate(make_global_plan([table(item)]), None).without_storage().state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    properties = entry.properties
    assert (properties.dtype, properties.layout, properties.requires_grad) == (
        torch.float8_e4m3fn,
        torch.sparse_csr,
        True,
    )
