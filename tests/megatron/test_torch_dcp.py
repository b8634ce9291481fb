"""Megatron's calls of ``torch.distributed.checkpoint`` for ``torch_dcp``: ours if chosen, and nobody else's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

pytest.importorskip("megatron.core")

from robust_dcp import RobustCheckpointError
from tests.harness.disks import GatedDisk
from tests.harness.ranks import run_ranks, values
from tests.megatron.async_saves import written_on
from tests.megatron.torch_dist import chosen
from tests.megatron.training_checkpointing import megatron_lm

_ROWS = 7


def _state_dict(scale: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(scale * torch.arange(_ROWS * 3.0).reshape(_ROWS, 3), mesh, [Shard(0)])
    return {
        "model": {"weight": weight, "bias": scale * torch.ones(3)},
        "optimizer": {
            "state": {0: {"exp_avg": 2 * weight, "step": torch.tensor(scale)}},
            "param_groups": [{"lr": scale}],
        },
        "args": argparse.Namespace(hidden_size=int(scale), params_dtype=torch.bfloat16),
        "iteration": int(scale),
        "rng_state": [{"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.zeros(8, dtype=torch.uint8)}],
    }


def _held(state_dict: dict[str, Any]) -> Any:
    """What can be compared."""
    if isinstance(state_dict, dict):
        return {key: _held(value) for key, value in state_dict.items()}
    if isinstance(state_dict, list):
        return [_held(value) for value in state_dict]
    if isinstance(state_dict, DTensor):
        return state_dict.to_local().tolist()
    return state_dict.tolist() if isinstance(state_dict, torch.Tensor) else state_dict


def _is_by_robust_dcp(directory: Path) -> bool:
    dist.barrier()
    return (directory / ".robust_dcp.index").exists()


def _round_trips(directory: Path) -> dict[str, Any]:
    checkpointing, found = megatron_lm(), {}
    ours, stock = directory / "ours", directory / "stock"
    expected = _held(_state_dict(3))
    checkpointing.save_checkpoint(_state_dict(3), str(stock))
    with chosen():
        checkpointing.save_checkpoint(_state_dict(3), str(ours))
        found["saved by robust_dcp"] = (_is_by_robust_dcp(ours), _is_by_robust_dcp(stock))
        for name, path in (("ours", ours), ("stock", stock)):
            state_dict = _state_dict(1)
            checkpointing.load_checkpoint(state_dict, str(path))
            found[f"ours loads {name}"] = _held(state_dict) == expected
            found[f"arguments of {name}"] = checkpointing.load_args(str(path))
        found |= _partial_loads(checkpointing, str(stock))
    state_dict = _state_dict(1)
    checkpointing.load_checkpoint(state_dict, str(ours))
    found["stock loads ours"] = _held(state_dict) == expected
    return found


def _partial_loads(checkpointing: Any, path: str) -> dict[str, Any]:
    state_dict = {"model": {"bias": torch.zeros(3), "new": torch.zeros(2)}}
    with pytest.raises(RobustCheckpointError) as caught:
        checkpointing.load_fsdp_dtensor(state_dict, path, allow_partial_load=False)
    strict = _held(state_dict)
    checkpointing.load_fsdp_dtensor(state_dict, path, allow_partial_load=True)
    cast = {"model": {"bias": torch.zeros(3, dtype=torch.bfloat16)}}
    checkpointing.load_checkpoint(cast, path)
    return {"told": str(caught.value), "strict": strict, "partial": _held(state_dict), "cast": _held(cast)}


def _others(directory: Path) -> dict[str, bool]:
    """Which saves robust_dcp makes: of others, of Megatron's with another planner, and of none without the flag."""
    checkpointing, state_dict = megatron_lm(), {"weight": torch.ones(3)}
    before = (dcp.save, dcp.load, dcp.load_state_dict)
    with chosen():
        dcp.save(state_dict, storage_writer=dcp.FileSystemWriter(directory / "others"))
        checkpointing.torch.distributed.checkpoint.load(state_dict, checkpoint_id=directory / "others")
    with chosen(switch="0"):
        checkpointing.save_checkpoint(state_dict, str(directory / "default"))
    found = {name: _is_by_robust_dcp(directory / name) for name in ("others", "default")}
    found["restored"] = before == (dcp.save, dcp.load, dcp.load_state_dict)
    return found


def _asynchronous(directory: Path) -> dict[str, Any]:
    import sys

    checkpointing = megatron_lm()
    sys.modules["megatron.training.checkpointing"] = checkpointing
    try:
        with chosen():
            saved, disk = _state_dict(3), GatedDisk()
            with written_on(disk):
                request = checkpointing.save_async(saved, str(directory / "async"), "mcore")
    finally:
        del sys.modules["megatron.training.checkpointing"]
    saved["model"]["bias"].fill_(-1)
    saved["model"]["weight"].to_local().fill_(-1)
    is_early = (directory / "async" / ".metadata").exists()
    disk.gate.set()
    committed: list[bool] = []
    request.add_finalize_fn(lambda: committed.append((directory / "async" / ".metadata").exists()))
    request.execute_sync()
    state_dict = _state_dict(1)
    checkpointing.load_checkpoint(state_dict, str(directory / "async"))
    return {"committed": (is_early, committed), "saved": _held(state_dict) == _held(_state_dict(3))}


def _all(directory: Path) -> dict[str, Any]:
    return {function.__name__: function(directory) for function in (_round_trips, _others, _asynchronous)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(run_ranks(2, _all, tmp_path_factory.mktemp("torch_dcp"), timeout_seconds=150))


def test_stock_loads_what_ours_saves_and_the_reverse(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["_round_trips"]["saved by robust_dcp"] == (True, False)
        assert rank["_round_trips"]["ours loads ours"]
        assert rank["_round_trips"]["ours loads stock"]
        assert rank["_round_trips"]["stock loads ours"]


def test_arguments_are_loaded_from_a_checkpoint(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for name in ("ours", "stock"):
            loaded = rank["_round_trips"][f"arguments of {name}"]
            assert loaded["iteration"] == 3
            assert loaded["args"] == argparse.Namespace(hidden_size=3, params_dtype=torch.bfloat16)


def test_missing_keys_are_an_error_unless_a_partial_load_was_asked_for(found: list[dict[str, Any]]) -> None:
    for rank in found:
        trip = rank["_round_trips"]
        assert "Missing key in checkpoint: 'model.new'" in trip["told"]
        assert trip["strict"] == {"model": {"bias": [0, 0, 0], "new": [0, 0]}}
        assert trip["partial"] == {"model": {"bias": [3, 3, 3], "new": [0, 0]}}


def test_other_dtypes_are_converted_as_by_stock(found: list[dict[str, Any]]) -> None:
    assert all(rank["_round_trips"]["cast"] == {"model": {"bias": [3, 3, 3]}} for rank in found)


def test_saves_of_others_stay_stock(found: list[dict[str, Any]]) -> None:
    assert all(rank["_others"] == {"others": False, "default": False, "restored": True} for rank in found)


def test_an_asynchronous_save_is_written_beside_training_and_finalized_when_committed(
    found: list[dict[str, Any]],
) -> None:
    assert all(rank["_asynchronous"] == {"committed": (False, [True]), "saved": True} for rank in found)
