"""Calls that a monitoring system is shown: two saves, a load, and a save that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import robust_dcp

__all__ = ["save_twice_and_fail"]


def save_twice_and_fail(root: Path) -> None:
    for step in (10, 20):
        robust_dcp.save({"w": torch.full((9,), float(step))}, checkpoint_id=root / f"step_{step}")
    robust_dcp.load({"w": torch.zeros(9)}, checkpoint_id=root / "step_20")
    (root / "step_30").write_text("no directory")
    with pytest.raises(robust_dcp.StorageError):
        robust_dcp.save({"w": torch.ones(9)}, checkpoint_id=root / "step_30")
