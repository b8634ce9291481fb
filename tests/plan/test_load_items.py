"""What a load reads comes out as stock plans it, in the usual cases too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import robust_dcp
from robust_dcp.plan.loading.load_items import plan_reads
from robust_dcp.storage.index import stored_items_of
from robust_dcp.storage.reader import RobustReader
from tests.harness.ranks import run_ranks, values
from tests.harness.state_dicts import KINDS
from tests.plan.planner_reference import stock_planner


def _metadata_of(state_dict: dict[str, Any]) -> Metadata:
    """What a save by this rank alone leaves."""
    planner = stock_planner(state_dict)
    return planner.create_global_plan([planner.create_local_plan()])[1]


def _saved_by_all(state_dict: dict[str, Any]) -> Metadata:
    planner = stock_planner(state_dict)
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, planner.create_local_plan())
    return planner.create_global_plan(plans)[1]


def _told(items: list[ReadItem]) -> list[str]:
    return sorted(f"{item} {item.storage_index.index} {item.dest_index.index}" for item in items)


def _differs_by_index(state_dict: dict[str, Any], path: str) -> bool:
    """Whether what is found in the index there is other than what stock plans by the ``.metadata``."""
    indexed = RobustReader(path).read_metadata()
    assert stored_items_of(indexed) is not None
    expected = create_default_local_load_plan(state_dict, FileSystemReader(path).read_metadata(), strict=False)
    return _told(plan_reads(state_dict, indexed).items) != _told(expected.items)


def _differ(state_dict: dict[str, Any], metadata: Metadata) -> list[tuple[list[str], list[str]]]:
    expected = _told(create_default_local_load_plan(state_dict, metadata, strict=False).items)
    outcomes = [_told(plan_reads(state_dict, metadata).items) for _ in range(2)]
    return [(found, expected) for found in outcomes if found != expected]


def test_plain_tensors_are_planned_as_stock_does() -> None:
    state_dict = {
        "matrix": torch.zeros(3, 4),
        "alike": torch.zeros(3, 4),
        "scalar": torch.zeros(()),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.zeros(5)),
        "object": 3,
    }
    metadata = _metadata_of(state_dict)
    assert _differ(state_dict, metadata) == []
    assert plan_reads(state_dict, metadata).filled == set(state_dict) - {"object"}
    assert _told(plan_reads({**state_dict, "new": torch.zeros(2)}, metadata).items) == _told(
        plan_reads(state_dict, metadata).items
    )


def test_a_tensor_that_was_saved_in_chunks_is_left_to_stock() -> None:
    metadata = _metadata_of({"w": torch.zeros(6, 2), "v": torch.zeros(6)})
    entry: Any = metadata.state_dict_metadata["w"]
    entry.chunks = [ChunkStorageMetadata(torch.Size([n, 0]), torch.Size([2, 2])) for n in (4, 0, 2)]
    state_dict = {"w": torch.zeros(6, 2), "v": torch.zeros(6)}
    assert _differ(state_dict, metadata) == []
    assert plan_reads(state_dict, metadata).filled == {"v"}


def _kinds_that_differ(path: str) -> list[str]:
    differing = []
    for name, make in KINDS.items():
        state_dict = {k: v.state_dict() if hasattr(v, "load_state_dict") else v for k, v in make(1).items()}
        flat = stock_planner(state_dict).state_dict
        if _differ(flat, _saved_by_all(state_dict)):
            differing.append(name)
        robust_dcp.save(make(1), checkpoint_id=f"{path}/{name}")
        if _differs_by_index(flat, f"{path}/{name}"):
            differing.append(f"{name} by index")
    return differing


def test_every_kind_of_state_dict_is_planned_as_stock_does(tmp_path: Path) -> None:
    assert values(run_ranks(4, _kinds_that_differ, str(tmp_path))) == [[]] * 4


def _uneven(value: DTensor) -> DTensor:
    """As Megatron-FSDP marks a DTensor whose chunks are not those of its placements."""
    with torch.no_grad():
        local = value.to_local()
    local.__create_chunk_list__ = lambda: [ChunkStorageMetadata(torch.Size([5, 0]), torch.Size([2, 3]))]
    return value


def _resharded(path: str) -> list[str]:
    whole = init_device_mesh("cpu", (4,))
    turned = DeviceMesh("cpu", [3, 2, 1, 0])
    part = DeviceMesh("cpu", [1, 2])

    def of(mesh: DeviceMesh, local: torch.Tensor, *placements: Any) -> DTensor:
        shape = torch.Size([8, 3])
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=(3, 1))

    leaves: dict[str, Callable[[], torch.Tensor]] = {
        "rows": lambda: of(whole, torch.zeros(2, 3), Shard(0)),
        "columns": lambda: of(whole, torch.zeros(8, 1 if dist.get_rank() < 3 else 0), Shard(1)),
        "replicated": lambda: of(whole, torch.zeros(8, 3), Replicate()),
        "turned": lambda: of(turned, torch.zeros(2, 3), Shard(0)),
        "part": lambda: of(part, torch.zeros(4, 3), Shard(0)),
        "plain": lambda: torch.zeros(8, 3),
    }
    differing = []
    for saved, save in leaves.items():
        metadata = _saved_by_all({name: save() for name in leaves})
        state_dict = {name: load() for name, load in leaves.items()}
        if _differ(state_dict, metadata):
            differing.append(saved)
        robust_dcp.save({name: save() for name in leaves}, checkpoint_id=f"{path}/{saved}")
        if _differs_by_index({**state_dict, "rows": _uneven(leaves["rows"]())}, f"{path}/{saved}"):
            differing.append(f"{saved} by index")
    metadata = _saved_by_all({"rows": leaves["rows"](), "uneven": leaves["rows"]()})
    if _differ({"rows": leaves["rows"](), "uneven": _uneven(of(whole, torch.zeros(2, 3), Shard(0)))}, metadata):
        differing.append("uneven")
    return differing


def test_any_sharding_is_planned_as_stock_does_from_any_other(tmp_path: Path) -> None:
    assert values(run_ranks(4, _resharded, str(tmp_path))) == [[]] * 4
