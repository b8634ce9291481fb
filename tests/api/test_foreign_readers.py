"""``robust_dcp.load`` with storage readers and planners of others."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner

import robust_dcp
from tests.harness.ranks import in_ranks, values


def _load_torch_save_file(path: str) -> torch.Tensor:
    state = {"w": torch.zeros(4)}
    robust_dcp.load(
        state, storage_reader=BroadcastingTorchSaveReader(), planner=DynamicMetaLoadPlanner(), checkpoint_id=path
    )
    return state["w"]


def test_a_reader_that_takes_no_more_than_the_first_torch_asked_for_is_used(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(4.0)}, tmp_path / "model.pt")
    for loaded in values(in_ranks(2, _load_torch_save_file, str(tmp_path / "model.pt"))):
        assert torch.equal(loaded, torch.arange(4.0))


def test_a_stream_of_bytes_in_the_state_dict_is_data(tmp_path: Path) -> None:
    robust_dcp.save({"extra_state": io.BytesIO(b"scales")}, checkpoint_id=tmp_path)
    state = {"extra_state": io.BytesIO()}
    robust_dcp.load(state, checkpoint_id=tmp_path)
    assert state["extra_state"].getvalue() == b"scales"
