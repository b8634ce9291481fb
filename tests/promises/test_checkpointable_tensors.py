"""Plain tensors that say by their attributes which shards of a larger tensor they hold, as of torch 2.15."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from tests.harness.ranks import in_ranks, values
from tests.harness.ways import LOADERS, SAVERS
from tests.support.torch_versions import needs_checkpointable_tensor

pytestmark = needs_checkpointable_tensor

WHOLE = torch.arange(24.0).reshape(8, 3)


def shards(blank: bool = False) -> torch.Tensor:
    """On each of two ranks, rows of ``WHOLE`` from two places, with a row of padding between them."""
    rank = dist.get_rank()
    first, second = WHOLE[2 * rank : 2 * rank + 2], WHOLE[4 + 2 * rank : 6 + 2 * rank]
    tensor: Any = torch.cat([first, torch.full((1, 3), -1.0), second])
    if blank:
        tensor.zero_()
    tensor.global_shape = (8, 3)
    tensor.global_offsets = ((2 * rank, 0), (4 + 2 * rank, 0))
    tensor.local_offsets = ((0, 0), (3, 0))
    tensor.local_sizes = ((2, 3), (2, 3))
    found: torch.Tensor = tensor
    return found


def save_and_load(directory: str) -> list[str]:
    """What any loader makes of what any saver has written, where it is wrong."""
    wrong = []
    expected = shards()
    expected[2] = 0.0  # nobody loads the padding
    for saver, save in SAVERS.items():
        if "no_dist" in saver:
            continue
        path = f"{directory}/{saver}"
        save({"w": shards(), "whole": torch.ones(3)}, path)
        save({"w": shards(), "whole": torch.ones(3)}, f"{path}/again")
        for loader, load in LOADERS.items():
            found = {"w": shards(blank=True), "whole": torch.zeros(3)}
            load(found, path)
            if not torch.equal(found["w"], expected) or not found["whole"].all():
                wrong.append(f"{saver} > {loader}")
    robust_dcp.async_save({"w": shards()}, checkpoint_id=f"{directory}/async").result(timeout=60)
    return wrong


def test_their_shards_are_saved_and_loaded_as_stock_does(tmp_path: Path) -> None:
    assert values(in_ranks(2, save_and_load, str(tmp_path), timeout_seconds=120)) == [[], []]
    for directory in ("ours", "ours/again", "stock + both", "async"):
        for load in (robust_dcp.load, dcp.load):
            found = {"w": torch.zeros(8, 3)}
            load(found, checkpoint_id=str(tmp_path / directory))
            assert torch.equal(found["w"], WHOLE)
