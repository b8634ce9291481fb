"""What any version of Megatron has saved, with stock or with us, a job of this version loads.

``saved_by/`` has a checkpoint of each version. ``make megatron-checkpoints`` made them, by the packages themselves.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from demo.megatron_truth import compare
from robust_dcp.megatron import versions
from tests.megatron.job_of_versions import SHARDING, JobOfVersion, leaves
from tests.megatron.torch_dist import Scenarios, chosen, made

SCENARIOS = Scenarios()
SAVED = sorted((Path(__file__).parent / "saved_by").glob("*.tar.xz"))


def _unpacked(packed: Path, directory: Path) -> Path:
    path = made(directory / packed.name.removesuffix(".tar.xz"))
    if dist.get_rank() == 0:
        with tarfile.open(packed) as files:
            files.extractall(path, filter="data")
    dist.barrier()
    return path


def _truth(path: Path) -> dict[str, Any]:
    """Everything that torch's own reader finds in the files."""
    found: dict[str, Any] = {}
    _load_state_dict(found, FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {key: value[0] if isinstance(value, list) else value for key, value in found.items()}


def _load(path: Path, job: JobOfVersion, sharding: str) -> Any:
    return dist_checkpointing.load(job.sharded_state_dict(sharding, is_loading=True), str(path))


@SCENARIOS.add
def every_version_s_checkpoint_is_loaded_bit_for_bit_in_the_layout_that_was_saved_and_in_another(
    directory: Path,
) -> None:
    """As stock of this version loads it, and as torch's reader does where this Megatron wants a ``common.pt``."""
    paths = [_unpacked(packed, directory) for packed in SAVED]
    assert [path.name for path in paths] == [
        *("0.10.0-stock", "0.12.1-stock", "0.14.0-stock", "0.16.1-ours", "0.16.1-stock"),
        *("0.19.2-ours", "0.19.2-stock", "main-ours", "main-stock"),
    ]
    for n_tensor_parallel in (1, 2):
        job = JobOfVersion(n_tensor_parallel, 5)
        for path in paths:
            with chosen():
                content = dist_checkpointing.load_content_metadata(str(path))
                sharding = content[SHARDING] if content else "dp_zero_gather_scatter"  # as Megatron-LM takes it
                ours = _load(path, job, sharding)
            assert (ours["iteration"], ours["args"].lr, ours["args"].params_dtype) == (3, 0.25, torch.bfloat16)
            assert ours["of each rank"] == {"rank": dist.get_rank(), "value": 3}
            if (path / "common.pt").exists() or versions.common_state_is_a_sharded_object():
                stock = dict(leaves(_load(path, job, sharding)))
                assert len(stock) > 85 and dict(leaves(ours)) == stock, path.name
            comparison = compare(job.sharded_state_dict(sharding, is_loading=True), ours, _truth(path))
            found = comparison.over_all_ranks()
            assert found["differing"] == [] and found["n_keys"] >= 26, path.name


test_on_two_ranks = SCENARIOS.test()
