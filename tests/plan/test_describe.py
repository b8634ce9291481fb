"""What an item is comes out as stock's planner says it, the first time and from the memo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from robust_dcp import PlanConflict, RobustCheckpointError
from robust_dcp.plan.state_dict.describe import DescribedItems, describe_items
from robust_dcp.plan.structure import Form, ItemStructure
from robust_dcp.structure_cache import CACHE
from tests.harness.ranks import run_ranks, values
from tests.harness.state_dicts import DTYPES, KINDS
from tests.plan.planner_reference import stock_planner, stock_structures

Described = list[tuple[str, ItemStructure]]


def _described(planner: DefaultSavePlanner) -> Described:
    items = describe_items(planner.state_dict, planner.lookup_object, is_coordinator=True)
    return list(zip(items.names, items.structures, strict=True))


def _of(state_dict: dict[str, Any]) -> DescribedItems:
    return describe_items(state_dict, stock_planner(state_dict).lookup_object)


class Subclass(torch.Tensor):
    """A tensor of somebody's own."""


class InHalves:
    """An object that describes itself as the two halves of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        half = len(self.tensor) // 2
        return [
            WriteItem(
                index=MetadataIndex(f"{fqn} half {n}"),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size([half * n]), torch.Size([half])),
                    properties=TensorProperties.create_from_tensor(self.tensor),
                    size=self.tensor.shape,
                ),
            )
            for n in range(2)
        ]


def _variants(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield tensor
    yield tensor.t() if tensor.ndim == 2 else tensor
    yield tensor[..., :0] if tensor.ndim else tensor
    yield tensor.to("meta")
    yield tensor.as_subclass(Subclass)
    if tensor.is_complex():
        yield tensor.conj()
        yield tensor.conj().imag
    if tensor.is_floating_point() or tensor.is_complex():
        yield tensor.detach().requires_grad_()
        yield torch.nn.Parameter(tensor)
        yield torch.nn.Parameter(tensor, requires_grad=False)
    if tensor.dtype == torch.float32:
        yield tensor.to_sparse()
        yield torch.quantize_per_tensor(tensor, 0.5, 3, torch.quint8)


_TENSORS = st.builds(
    lambda shape, dtype: list(_variants(torch.zeros(shape, dtype=torch.uint8).to(dtype))),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.complex64, torch.int64, torch.bfloat16, torch.bool]),
)


@given(st.lists(_TENSORS, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_tensors_of_all_kinds_are_described_as_stock_does(drawn: list[list[torch.Tensor]], random: Any) -> None:
    tensors = [tensor for variants in drawn for tensor in variants] * 2
    random.shuffle(tensors)
    planner = stock_planner({f"{place}": tensor for place, tensor in enumerate(tensors)})
    assert _described(planner) == stock_structures(planner)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_described_as_stock_does(dtype: torch.dtype) -> None:
    planner = stock_planner({"two": torch.empty(3, 5, dtype=dtype), "none": torch.empty((), dtype=dtype)})
    assert _described(planner) == stock_structures(planner) == _described(planner)


def test_objects_and_values_that_describe_themselves() -> None:
    plain = torch.zeros(4)
    with_items = torch.zeros(4)
    with_items.__create_write_items__ = lambda fqn, value: []  # type: ignore[attr-defined]
    with_shard = torch.zeros(4)
    with_shard.__get_tensor_shard__ = lambda index: plain.to_sparse()  # type: ignore[attr-defined]
    planner = stock_planner({"int": 1, "list": [1], "items": with_items, "shard": with_shard, "plain": plain})
    described = _described(planner)
    assert described == stock_structures(planner)
    assert [name for name, _ in described] == ["int", "list", "shard", "plain"]
    assert dict(described)["shard"].form == Form.VARIABLE and dict(described)["plain"].form == Form.FIXED


def test_a_value_may_be_several_items_with_names_of_their_own() -> None:
    halves = InHalves(torch.arange(6.0))
    items = describe_items({"x": halves}, lambda index: halves.tensor)
    assert items.names == ["x half 0", "x half 1"]
    assert [structure.offsets for structure in items.structures] == [(0,), (3,)]


def test_what_is_planned_by_lookup_is_what_lookup_gives() -> None:
    state_dict = {"w": torch.zeros(4)}
    items = describe_items(state_dict, lambda index: torch.zeros(4).to_sparse(), by_lookup=True)
    assert items.structures[0].form == Form.VARIABLE and items.data == [MetadataIndex("w", [0])]
    assert _of(state_dict).structures[0].form == Form.FIXED


def test_an_item_that_cannot_be_described_is_named() -> None:
    class Broken:
        def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
            raise ValueError("no idea")

    with pytest.raises(RobustCheckpointError, match="cannot plan 'odd': ValueError: no idea"):
        _of({"w": torch.zeros(1), "odd": Broken()})


def test_structures_of_earlier_saves_are_described_as_at_first() -> None:
    state_dict = {str(n): torch.zeros(n) for n in range(35)}
    planner = stock_planner(state_dict)
    CACHE.clear()
    for _ in range(2):
        assert _described(planner) == stock_structures(planner)
        assert CACHE.nbytes["items"] > 0


# On ranks: DTensors, ShardedTensors, models.


def _kinds_that_differ() -> list[str]:
    differing = []
    for name, make in KINDS.items():
        for flags in ({}, {"flatten_sharded_tensors": False}):
            state_dict = make(1)
            state_dict = {k: v.state_dict() if hasattr(v, "load_state_dict") else v for k, v in state_dict.items()}
            planner = stock_planner(state_dict, **flags)
            expected = stock_structures(planner)
            for mode in (torch.no_grad, torch.enable_grad, torch.enable_grad):
                with mode():
                    found = _described(planner)
                if found != expected:
                    differing.append(f"{name}: {list(zip(found, expected, strict=False))}")
    return differing


def test_every_kind_of_state_dict_is_described_as_stock_does() -> None:
    assert values(run_ranks(4, _kinds_that_differ)) == [[]] * 4


def _row(mesh: DeviceMesh, local: torch.Tensor, *placements: Placement) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False)


def _uneven(value: DTensor) -> DTensor:
    """As Megatron-FSDP marks a DTensor whose chunks are not those of its placements."""
    with torch.no_grad():
        local = value.to_local()
    local.__create_write_items__ = lambda fqn, value: [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size([5, 0])),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size([5, 0]), torch.Size([2, 3])),
                properties=TensorProperties.create_from_tensor(value.to_local()),
                size=value.size(),
            ),
        )
    ]
    return value


def _dtensors_of_other_kinds() -> dict[str, tuple[Described, Described]]:
    """(found, expected) of state dicts that share shapes and placements and differ in all else."""
    whole = init_device_mesh("cpu", (4,))
    turned = DeviceMesh("cpu", [3, 2, 1, 0])
    part = DeviceMesh("cpu", [1, 2])
    other_part = DeviceMesh("cpu", [0, 2, 3])
    local = torch.zeros(2, 3)
    leaves: dict[str, Callable[[], DTensor]] = {
        "rows": lambda: _row(whole, local, Shard(0)),
        "columns": lambda: _row(whole, local, Shard(1)),
        "replicated": lambda: _row(whole, local, Replicate()),
        "turned": lambda: _row(turned, local, Shard(0)),
        "part": lambda: _row(part, local, Shard(0)),
        "other part": lambda: _row(other_part, local, Shard(0)),
        "half": lambda: _row(whole, local.half(), Shard(0)),
        "longer": lambda: _row(whole, torch.zeros(3, 3), Shard(0)),
        "requires grad": lambda: _row(whole, local, Shard(0)).requires_grad_(),
        "parameter": lambda: torch.nn.Parameter(_row(whole, local, Shard(0))),
        "frozen": lambda: torch.nn.Parameter(_row(whole, local, Shard(0)), requires_grad=False),
        "conjugate": lambda: _row(whole, torch.zeros(2, 3, dtype=torch.complex64).conj(), Shard(0)),
        "subclass": lambda: _row(whole, local.as_subclass(Subclass), Shard(0)),
        "uneven": lambda: _uneven(_row(whole, local, Shard(0))),
    }
    found = {}
    for name in (*leaves, *reversed(leaves)):
        planner = stock_planner({name: leaves[name]()})
        with torch.no_grad():
            described = _described(planner)
        found[f"{name} {name in found}"] = (described, stock_structures(planner))
    return found


def test_dtensors_that_differ_in_one_thing_are_told_apart() -> None:
    for rank, outcome in enumerate(values(run_ranks(4, _dtensors_of_other_kinds))):
        assert {name: found for name, (found, _) in outcome.items()} == {
            name: expected for name, (_, expected) in outcome.items()
        }
        assert bool(outcome["part False"][0]) == (rank in (1, 2))
        assert outcome["requires grad False"][0][0][1].requires_grad
        assert outcome["uneven False"][0][0][1].offsets == (5, 0)


def _partial() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    messages = []
    for _ in range(2):
        value = _row(mesh, torch.zeros(3), Partial())
        try:
            _of({"a": _row(mesh, torch.zeros(3), Shard(0)), "gradient": value})
        except PlanConflict as error:
            messages.append(f"{error.key}: {error}")
    return messages


def test_a_pending_reduction_is_refused_every_time() -> None:
    for messages in values(run_ranks(2, _partial)):
        assert len(messages) == 2
        assert all(message.startswith("gradient: ") and "Partial placement" in message for message in messages)


class Rows(Shard):
    """A placement of somebody's own that equals another which places differently."""

    def __init__(self, dim: int, offset: int) -> None:
        super().__init__(dim)
        object.__setattr__(self, "offset", offset)  # placements are frozen

    def local_shard_size_and_offset(self, *args: Any, **kwargs: Any) -> Any:
        return 1, vars(self)["offset"]

    _local_shard_size_and_offset = local_shard_size_and_offset
    _local_shard_size_on_dim = local_shard_size_and_offset  # torch 2.7


def _own_placements() -> list[tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (2,))
    first, second = (_row(mesh, torch.zeros(1), Shard(0)) for _ in range(2))
    offsets = []
    for value, offset in ((first, 0), (second, 1)):
        value._spec.placements = (Rows(0, offset),)
        (structure,) = _of({"w": value}).structures
        offsets.append(structure.offsets)
    return offsets


def test_placements_of_other_classes_than_torchs_are_not_remembered() -> None:
    assert values(run_ranks(2, _own_placements)) == [[(0,), (1,)]] * 2
