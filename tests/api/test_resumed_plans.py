"""A job that loads a checkpoint saves by the plan that lies in it, if every rank still holds what it says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import robust_dcp
from robust_dcp.plan.cache import LOADED, PLANS
from robust_dcp.storage.files.paths import INDEX_NAME
from tests.harness.ranks import in_ranks, values


def _state_dict(rank: int, value: float, extra: int = 0) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = {
        f"layer.{n}.weight": distribute_tensor(torch.full((8, 4), value + n), mesh, [Shard(0)])
        for n in range(3 + extra)
    }
    return {"model": weights, "step": int(value), f"rng.{rank}": torch.full((5,), float(rank))}


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _fingerprint(state_dict: dict[str, Any]) -> dict[str, Any]:
    flat = {**state_dict["model"], **{key: value for key, value in state_dict.items() if key != "model"}}
    return {key: _local(v).tolist() if isinstance(_local(v), torch.Tensor) else v for key, v in flat.items()}


def _resume(path: str, *, extra_on: int | None = None, forget: int | None = None) -> Any:
    """Save, start over as a new process would, load, save again; what the second save said, and what it saved."""
    rank = dist.get_rank()
    robust_dcp.save(_state_dict(rank, 1.0), checkpoint_id=f"{path}/1")
    PLANS.clear()
    state_dict = _state_dict(rank, 0.0)
    robust_dcp.load(state_dict, checkpoint_id=f"{path}/1")
    if forget == rank:
        LOADED.clear()
    if extra_on == rank:
        state_dict[f"new.{rank}"] = torch.ones(3)
    report = robust_dcp.save(state_dict, checkpoint_id=f"{path}/2")
    back = _state_dict(rank, 7.0)
    dcp.load(back, checkpoint_id=f"{path}/2")
    structures = sum(phase.payload_nbytes for phase in report.phases if phase.name == "plan")
    return report.plan, report.reason, structures, _fingerprint(back) == _fingerprint(_state_dict(rank, 1.0))


def resume(path: str) -> Any:
    return _resume(path)


def resume_with_a_new_tensor_on_rank_1(path: str) -> Any:
    return _resume(path, extra_on=1)


def resume_without_the_plan_on_rank_1(path: str) -> Any:
    return _resume(path, forget=1)


def resume_without_the_plan_on_the_coordinator(path: str) -> Any:
    return _resume(path, forget=0)


def test_the_first_save_after_a_load_reuses_the_plan_of_the_checkpoint(tmp_path: Path) -> None:
    found = values(in_ranks(2, resume, os.fspath(tmp_path)))
    assert [(plan, nbytes, same) for plan, _, nbytes, same in found] == [("reused", 0, True)] * 2
    assert all(reason.endswith(f"since {tmp_path}/1") for _, reason, _, _ in found)
    assert (tmp_path / "2" / INDEX_NAME).exists()


@pytest.mark.parametrize(
    ("resumed", "outcome"),
    [
        (resume_with_a_new_tensor_on_rank_1, "rebuilt"),
        (resume_without_the_plan_on_rank_1, "reused"),
        (resume_without_the_plan_on_the_coordinator, "built"),
    ],
)
def test_a_plan_that_is_not_everywhere_or_no_longer_holds_is_made_again(
    tmp_path: Path, resumed: Any, outcome: str
) -> None:
    found = values(in_ranks(2, resumed, os.fspath(tmp_path)))
    assert [(plan, same) for plan, _, _, same in found] == [(outcome, True)] * 2


def damaged(path: str) -> Any:
    rank = dist.get_rank()
    robust_dcp.save(_state_dict(rank, 1.0), checkpoint_id=f"{path}/1")
    PLANS.clear()
    dist.barrier()
    if rank == 0:
        file = Path(path) / "1" / INDEX_NAME
        data = bytearray(file.read_bytes())
        entry = data.index(b"signatures".ljust(16, b"\0"))  # in the directory of sections
        data[int.from_bytes(data[entry + 24 : entry + 32], "little")] ^= 0xFF
        file.write_bytes(data)
    dist.barrier()
    state_dict = _state_dict(rank, 0.0)
    robust_dcp.load(state_dict, checkpoint_id=f"{path}/1")
    return robust_dcp.save(state_dict, checkpoint_id=f"{path}/2").plan


def test_a_damaged_plan_costs_a_plan_and_nothing_else(tmp_path: Path) -> None:
    found = values(in_ranks(2, damaged, os.fspath(tmp_path)))
    assert found[0] == found[1]
    assert found[0] in ("built", "rebuilt")


def test_a_checkpoint_without_its_plan_loads_in_stock_and_ours(tmp_path: Path) -> None:
    robust_dcp.save({"w": torch.arange(4)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / INDEX_NAME).unlink()
    for load in (dcp.load, robust_dcp.load):
        state_dict = {"w": torch.zeros(4, dtype=torch.int64)}
        load(state_dict, checkpoint_id=tmp_path, no_dist=True)
        assert state_dict["w"].tolist() == [0, 1, 2, 3]
