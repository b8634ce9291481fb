"""What the writer's options decide, and what of them a plan depends on."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import WriteItem

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter, WriteOptions
from robust_dcp.storage.files.disk import Disk
from tests.support.simulated_disk import WatchedDisk


@pytest.mark.parametrize(
    ("options", "files"),
    [({}, 2), ({"threads": 3}, 3), ({"threads": 3, "files_per_rank": 1}, 1), ({"direct": False}, 2)],
)
def test_a_plan_depends_on_the_number_of_files_alone(options: dict[str, Any], files: int) -> None:
    assert RobustWriter("unused", **options).plan_options == {"layout": "torch", "files_per_rank": files}


@pytest.mark.parametrize("wrong", [{"layout": "parquet"}, {"files_per_rank": 0}], ids=str)
def test_what_cannot_be_is_refused_when_options_are_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"layout must be one of|at least|://"):
        WriteOptions(**wrong)


def test_a_report_says_how_files_were_written_and_what_memory_that_took(tmp_path: Path) -> None:
    writer = RobustWriter(tmp_path, direct=False, threads=1, buffer_bytes=1 << 20)
    report = robust_dcp.save({"w": torch.rand(1000, 900).t()}, storage_writer=writer)
    assert report.how == ("buffered",)
    assert 0 < report.peak_buffer_nbytes <= 1 << 20
    assert ", buffered; plan " in str(report)


class KeepsBuffers(RobustPlanner):
    """Keeps the buffers that it gives to the writer."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[io.BytesIO] = []

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
        if isinstance(data, io.BytesIO):
            self.buffers.append(data)
        return data


def test_a_planner_can_close_its_buffer_while_the_object_is_written(tmp_path: Path) -> None:
    planner = KeepsBuffers()
    disk: Any = WatchedDisk(Disk(), before=lambda _: [buffer.close() for buffer in planner.buffers])
    writer = RobustWriter(tmp_path, disk=disk, buffer_bytes=1 << 18)  # the object fills several blocks
    robust_dcp.save({"words": "a" * (1 << 20)}, storage_writer=writer, planner=planner)
    assert planner.buffers and all(buffer.closed for buffer in planner.buffers)
    found = {"words": ""}
    robust_dcp.load(found, checkpoint_id=tmp_path)
    assert found == {"words": "a" * (1 << 20)}
