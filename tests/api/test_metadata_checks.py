"""What is looked for in ``.metadata`` before Python's unpickler sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp.storage.files.paths import INDEX_NAME
from robust_dcp.storage.metadata import stored_pickle
from robust_dcp.testing.ranks import run_ranks, values


def count_checks(directory: str) -> int:
    robust_dcp.save({f"rank{dist.get_rank()}": torch.ones(3)}, checkpoint_id=directory)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(directory, INDEX_NAME).unlink()  # with it nobody would decode .metadata
    dist.barrier()
    checked: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_pickle, "check_shape", checked.append)
        robust_dcp.load({f"rank{dist.get_rank()}": torch.zeros(3)}, checkpoint_id=directory)
    return len(checked)


def test_the_rank_that_reads_the_metadata_checks_its_form_for_all(tmp_path: Path) -> None:
    assert values(run_ranks(3, count_checks, str(tmp_path / "checkpoint"))) == [1, 0, 0]
