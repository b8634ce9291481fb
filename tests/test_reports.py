"""What a report of a save says on its own, and what is refused where it makes no sense."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustCheckpointError


def test_a_report_that_was_sent_to_another_process_has_all_but_the_metadata(tmp_path: Path) -> None:
    report = robust_dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "saved")
    sent = pickle.loads(pickle.dumps(report))
    assert set(report.metadata.state_dict_metadata) == {"w"}
    assert sent.nbytes == report.nbytes and str(sent) == str(report)
    with pytest.raises(ValueError, match="made without access to the checkpoint's metadata"):
        _ = sent.metadata


def test_a_load_from_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="pass checkpoint_id, the directory to load from, or storage_reader"):
        robust_dcp.load({"w": torch.ones(3)})


class _Broken(dcp.FileSystemReader):
    def read_data(self, plan: Any, planner: Any) -> Any:
        raise OSError(5, "Input/output error")


def test_the_error_of_a_reader_of_ones_own_is_raised_as_it_is(tmp_path: Path) -> None:
    robust_dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "saved")
    with pytest.raises((RobustCheckpointError, OSError), match="Input/output error"):
        robust_dcp.load({"w": torch.zeros(3)}, storage_reader=_Broken(tmp_path / "saved"))
