"""The writer gets what stock's planner would resolve, and write items only where somebody asks for them."""

from __future__ import annotations

import io
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from robust_dcp import RobustPlanner
from robust_dcp.plan.session import SaveSession
from robust_dcp.plan.share import Share
from robust_dcp.plan.state_dict.sources import StateDictSource
from robust_dcp.storage.records.torch_zip import is_fixed_size
from robust_dcp.storage.writing.emit import saved_by_torch
from robust_dcp.storage.writing.item_source import WriteItemSource
from tests.harness.ranks import run_ranks, values
from tests.harness.state_dicts import KINDS
from tests.plan.planner_reference import stock_items, stock_planner

StateDict = dict[str, Any]


def _session(planner: RobustPlanner, state_dict: StateDict, *, every: int = 1) -> SaveSession:
    """The save of every ``every``-th item of ``state_dict``, agreed on."""
    planner.set_up_planner(state_dict, is_coordinator=True)
    session = planner.open_session("checkpoint", no_dist=True)
    session.plan.local = planner.describe(session.channel)
    kept = np.arange(0, len(session.plan.local.table), every)
    session.plan.share = Share(bytes(16), kept, None)
    return session


def _bytes(data: torch.Tensor | io.BytesIO) -> bytes:
    if isinstance(data, io.BytesIO):
        return data.getvalue()
    buffer = io.BytesIO()
    torch.save(data.detach().clone(), buffer)
    return buffer.getvalue()


def _key(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    return item.index.fqn, tuple(item.index.offset or ())


_PROPERTIES = [field.name for field in fields(TensorProperties)][:5]


def _same_properties(one: WriteItem, other: WriteItem) -> bool:
    left, right = one.tensor_data, other.tensor_data
    if left is None or right is None:
        return left is right
    # The five that go into `.metadata`: torch 2.15 adds strides, which older readers refuse.
    same = [getattr(left.properties, name) == getattr(right.properties, name) for name in _PROPERTIES]
    return all(same) and (left.chunk, left.size) == (right.chunk, right.size)


def _check_against_stock(state_dict: StateDict, flags: dict[str, bool]) -> None:
    state_dict = {k: v.state_dict() if hasattr(v, "load_state_dict") else v for k, v in state_dict.items()}
    planner, stock = RobustPlanner(**flags), stock_planner(state_dict, **flags)  # type: ignore[arg-type]
    expected = sorted(stock_items(stock), key=_key)
    session = _session(planner, state_dict)
    assert planner.state_dict.keys() == stock.state_dict.keys() and planner.mappings == stock.mappings
    assert planner.is_coordinator == stock.is_coordinator

    items = planner.kept_items(session)
    assert [(item.index, item.type) for item in items] == [(item.index, item.type) for item in expected]
    assert all(map(_same_properties, items, expected))

    source = planner.source(session)
    assert isinstance(source, StateDictSource) and len(source) == len(expected)
    with torch.no_grad():
        for place, item in enumerate(expected):
            data = source.resolve(place)
            assert source.name(place) == item.index.fqn
            if item.tensor_data is None:
                assert isinstance(data, io.BytesIO) and source.expected(place) is None
            else:
                planned = item.tensor_data
                assert source.expected(place) == (planned.properties.dtype, planned.chunk.sizes)
            by_stock = stock.resolve_data(item)
            if isinstance(by_stock, torch.Tensor) and not is_fixed_size(by_stock):
                by_stock = saved_by_torch(by_stock)  # it is checked for a load, so it comes pickled
            assert _bytes(data) == _bytes(by_stock)


_FLAGS = [
    {},
    {"flatten_sharded_tensors": False},
    {"flatten_state_dict": False},
    {"flatten_state_dict": False, "flatten_sharded_tensors": False},
]


def _check_all_kinds() -> None:
    for make in KINDS.values():
        for flags in _FLAGS:
            _check_against_stock(make(1), flags)


def test_every_kind_of_state_dict_is_resolved_as_stock_does() -> None:
    run = run_ranks(4, _check_all_kinds)
    assert values(run) == [None] * 4


def test_only_the_items_of_the_plan_are_resolved() -> None:
    planner = RobustPlanner()
    state_dict = {name: torch.full((2,), place) for place, name in enumerate("fdbace")}
    session = _session(planner, state_dict, every=2)
    source = planner.source(session)
    assert [source.name(place) for place in range(len(source))] == ["a", "c", "e"]
    for place, name in enumerate("ace"):
        assert source.resolve(place) is state_dict[name]
    assert [item.index.fqn for item in planner.kept_items(session)] == ["a", "c", "e"]


def _local_tensor_is_resolved() -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False).requires_grad_()
    planner = RobustPlanner()
    source = planner.source(_session(planner, {"w": value}))
    with torch.no_grad():
        resolved = source.resolve(0)
        return resolved is value.to_local()


def test_a_dtensor_is_resolved_without_a_copy() -> None:
    assert values(run_ranks(2, _local_tensor_is_resolved)) == [True, True]


class LooksUpItself(RobustPlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(index) + 1


class ResolvesItself(RobustPlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        return super().resolve_data(write_item) + 1


class TransformsItself(RobustPlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object + 1


@pytest.mark.parametrize("planner_class", [LooksUpItself, ResolvesItself, TransformsItself])
def test_a_planner_that_resolves_tensors_its_own_way_is_asked(planner_class: type[RobustPlanner]) -> None:
    planner = planner_class()
    source = planner.source(_session(planner, {"w": torch.zeros(2)}))
    assert isinstance(source, WriteItemSource)
    resolved = source.resolve(0)
    assert isinstance(resolved, torch.Tensor) and resolved.tolist() == [1, 1]


def test_a_hook_that_is_set_on_the_planner_itself_is_asked() -> None:
    planner = RobustPlanner()
    planner.resolve_data = lambda write_item: torch.ones(2)  # type: ignore[method-assign]
    source = planner.source(_session(planner, {"w": torch.zeros(2)}))
    resolved = source.resolve(0)
    assert isinstance(resolved, torch.Tensor) and resolved.tolist() == [1, 1]


class SerializesItself(RobustPlanner):
    def object_data(self, write_item: WriteItem, value: Any) -> io.BytesIO:
        return io.BytesIO(f"{write_item.index.fqn} {value}".encode())


def test_a_planner_may_serialize_objects_its_own_way_and_tensors_stay_as_they_are() -> None:
    planner = SerializesItself()
    state_dict = {"step": 7, "w": torch.zeros(2)}
    session = _session(planner, state_dict)
    source = planner.source(session)
    step = source.resolve(0)
    assert isinstance(source, StateDictSource) and source.resolve(1) is state_dict["w"]
    assert isinstance(step, io.BytesIO) and step.getvalue() == b"step 7"
    stock_way = planner.resolve_data(planner.kept_items(session)[0])
    assert isinstance(stock_way, io.BytesIO) and stock_way.getvalue() == b"step 7"


class Casts(RobustPlanner):
    """Changes the flattened state dict after it was taken in, as planners of recipes do."""

    def set_up_planner(
        self, state_dict: StateDict, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {
            name: value.half() if isinstance(value, torch.Tensor) else value
            for name, value in self.state_dict.items()
            if name != "model.dropped"
        }


def test_what_a_subclass_makes_of_the_flat_state_dict_is_what_is_saved() -> None:
    planner = Casts()
    session = _session(planner, {"model": {"w": torch.zeros(2), "dropped": torch.zeros(1)}, "step": 1})
    source = planner.source(session)
    assert [source.name(place) for place in range(len(source))] == ["model.w", "step"]
    assert source.expected(0) == (torch.float16, torch.Size([2])) and source.expected(1) is None
    resolved = source.resolve(0)
    assert isinstance(resolved, torch.Tensor) and resolved.dtype == torch.float16


def test_a_write_item_of_an_object_says_no_more_than_its_name() -> None:
    planner = RobustPlanner()
    session = _session(planner, {"step": 1})
    assert planner.kept_items(session) == [WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO)]
