"""A program of a user, which `make check` looks at: what saves return needs no cast and no check for None."""

from __future__ import annotations

import torch
from typing_extensions import assert_type

import robust_dcp


def train(model: torch.nn.Module, manager: robust_dcp.CheckpointManager) -> int:
    state: dict[str, torch.Tensor] = model.state_dict()
    nbytes = robust_dcp.save({"model": state}, checkpoint_id="checkpoints/step_1").nbytes
    nbytes += robust_dcp.async_save({"model": state}, checkpoint_id="checkpoints/step_2").result().nbytes
    nbytes += manager.save(3, {"model": state}, metrics={"loss": 0.5}).nbytes
    nbytes += manager.async_save(4, {"model": state}).result().nbytes
    nbytes += robust_dcp.load({"model": state}, checkpoint_id="checkpoints/step_1").nbytes
    with robust_dcp.async_save({"model": state}, checkpoint_id="checkpoints/step_5", staging="lazy") as saving:
        nbytes += saving.result().nbytes + saving.upload_completion.result().nbytes
    assert_type(manager.async_save(7, {"model": state}), robust_dcp.AsyncSave)
    assert_type(manager.async_save(8, {"model": state}, staging="lazy"), robust_dcp.AsyncSave)
    return nbytes
