"""Whether a resume is exact can be proved: a save right after the load differs from the checkpoint in what was
forgotten. And a load takes the memory of its targets and of its buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import robust_dcp
from robust_dcp import RobustReader
from tests.cli.commands import shell


class Job:
    """A training program with all that it has to save."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(2, 4)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    @property
    def state_dict(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler")
        return {**{name: getattr(self, name) for name in names}, "rng": torch.get_rng_state()}

    def resume(self, path: Path, forgotten: str) -> None:
        state_dict = self.state_dict
        state_dict.pop(forgotten, None)
        robust_dcp.load(state_dict, checkpoint_id=path)
        if forgotten == "rng":
            return
        torch.set_rng_state(state_dict["rng"])
        if forgotten == "step of Adam":
            for state in self.optimizer.state.values():
                state["step"].zero_()


@pytest.mark.parametrize("forgotten", ["nothing", "scheduler", "step of Adam", "rng"])
def test_a_save_after_the_load_differs_in_what_the_program_forgot(forgotten: str, tmp_path: Path) -> None:
    job = Job(1)
    job.train(3)
    robust_dcp.save(job.state_dict, checkpoint_id=tmp_path / "before")
    again = Job(2)
    again.train(1)
    again.resume(tmp_path / "before", forgotten)
    robust_dcp.save(again.state_dict, checkpoint_id=tmp_path / "after")
    ended = shell("diff", tmp_path / "before", tmp_path / "after", "--values")
    assert ended.code == (forgotten != "nothing"), ended
    names = {"scheduler": "scheduler.", "step of Adam": "optimizer.state.weight.step", "rng": "rng", "nothing": ""}
    assert names[forgotten] in ended.out


def test_a_load_takes_its_targets_and_the_buffers_that_were_asked_for(tmp_path: Path) -> None:
    robust_dcp.save({"w": torch.ones(1 << 22), "columns": torch.ones(1 << 11, 1 << 11)}, checkpoint_id=tmp_path)
    for buffer_bytes in (1 << 20, 4 << 20):
        reader = RobustReader(tmp_path, buffer_bytes=buffer_bytes)
        targets = {"w": torch.zeros(1 << 22), "columns": torch.zeros(1 << 11, 1 << 11)}
        report = robust_dcp.load(targets, storage_reader=reader)
        assert report.peak_buffer_nbytes <= buffer_bytes and bool((targets["w"] == 1).all())
