"""Megatron's calls of ``torch.distributed.checkpoint`` for ``torch_dcp``: ours if chosen, and nobody else's."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

pytest.importorskip("megatron.core")

from robust_dcp import RobustCheckpointError
from tests.faults.disk import FaultDisk, Gate
from tests.frameworks.jobs import is_ours
from tests.megatron.torch_dist import Scenarios, chosen, plain
from tests.megatron.training_checkpointing import megatron_lm

SCENARIOS = Scenarios()
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


@SCENARIOS.add
def stock_loads_what_ours_saves_and_the_reverse_and_arguments_too(directory: Path) -> None:
    checkpointing, ours, stock = megatron_lm(), directory / "ours", directory / "stock"
    expected = plain(_state_dict(3))
    checkpointing.save_checkpoint(_state_dict(3), str(stock))
    with chosen():
        checkpointing.save_checkpoint(_state_dict(3), str(ours))
        dist.barrier()
        assert is_ours(ours) and not is_ours(stock)
        for path in (ours, stock):
            state_dict = _state_dict(1)
            checkpointing.load_checkpoint(state_dict, str(path))
            assert plain(state_dict) == expected
            loaded = checkpointing.load_args(str(path))
            assert loaded["iteration"] == 3
            assert loaded["args"] == argparse.Namespace(hidden_size=3, params_dtype=torch.bfloat16)
        partial = {"model": {"bias": torch.zeros(3), "new": torch.zeros(2)}}
        with pytest.raises(
            RobustCheckpointError,
            match=r"Missing key in checkpoint: 'model\.new'|the coordinator's error says all of it",
        ):
            checkpointing.load_fsdp_dtensor(partial, str(stock), allow_partial_load=False)
        assert [value.tolist() for value in partial["model"].values()] == [[0, 0, 0], [0, 0]]
        checkpointing.load_fsdp_dtensor(partial, str(stock), allow_partial_load=True)
        assert [value.tolist() for value in partial["model"].values()] == [[3, 3, 3], [0, 0]]
        cast = {"model": {"bias": torch.zeros(3, dtype=torch.bfloat16)}}  # other dtypes are converted, as by stock
        checkpointing.load_checkpoint(cast, str(stock))
        assert cast["model"]["bias"].tolist() == [3, 3, 3]
    state_dict = _state_dict(1)
    checkpointing.load_checkpoint(state_dict, str(ours))
    assert plain(state_dict) == expected


@SCENARIOS.add
def saves_of_others_stay_stock(directory: Path) -> None:
    """And Megatron's with another planner."""
    checkpointing, state_dict = megatron_lm(), {"weight": torch.ones(3)}
    before = (dcp.save, dcp.load, dcp.load_state_dict)
    with chosen():
        dcp.save(state_dict, storage_writer=dcp.FileSystemWriter(directory / "others"))
        checkpointing.torch.distributed.checkpoint.load(state_dict, checkpoint_id=directory / "others")
    with chosen(switch="0"):
        checkpointing.save_checkpoint(state_dict, str(directory / "default"))
    dist.barrier()
    assert not any(is_ours(directory / name) for name in ("others", "default"))
    assert before == (dcp.save, dcp.load, dcp.load_state_dict)


@SCENARIOS.add
def an_asynchronous_save_is_written_beside_training_and_finalized_when_committed(directory: Path) -> None:
    checkpointing, saved, gate = megatron_lm(), _state_dict(3), Gate()
    with pytest.MonkeyPatch.context() as patched, FaultDisk(directory, on={"create:*.distcp": gate}):
        patched.setitem(sys.modules, "megatron.training.checkpointing", checkpointing)
        with chosen():
            request = checkpointing.save_async(saved, str(directory), "mcore")
        saved["model"]["bias"].fill_(-1)
        saved["model"]["weight"].to_local().fill_(-1)
        assert not (directory / ".metadata").exists()
        gate.opened.set()
        committed: list[bool] = []
        request.add_finalize_fn(lambda: committed.append((directory / ".metadata").exists()))
        request.execute_sync()
    assert committed == [True]
    state_dict = _state_dict(1)
    checkpointing.load_checkpoint(state_dict, str(directory))
    assert plain(state_dict) == plain(_state_dict(3))


test_on_two_ranks = SCENARIOS.test()
