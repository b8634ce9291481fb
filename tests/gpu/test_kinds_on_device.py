"""Every kind of state dict is saved from a device and loaded to it, bit for bit, by several ranks on one device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp import RobustReader, RobustWriter
from robust_dcp.plan.state_dict import digest_of
from robust_dcp.staging.blocks import flat_bytes, is_plain, to_host_together
from tests.gpu.device import DEVICE, on_device
from tests.harness.fingerprints import differences
from tests.harness.ranks import run_ranks, values
from tests.harness.state_dicts import KINDS
from tests.promises.test_round_trips import laid_out

pytestmark = pytest.mark.gpu

# Quantized tensors and ShardedTensors are not moved to a device here.
MOVED = tuple(kind for kind in KINDS if kind not in ("quantized", "sharded_tensor", "stateful"))


def save_and_load(directory: str) -> list[str]:
    ways: list[tuple[Any, str]] = [("torch", "save"), ("torch", "async_save"), ("safetensors", "save")]
    moves: dict[str, Any] = {"device": on_device, "host": lambda value: value}
    problems = []
    for number, kind in enumerate(MOVED):
        for layout, how in ways if DEVICE.type == "cuda" else [ways[number % len(ways)]]:
            path = os.path.join(directory, kind, layout, how)
            expected = on_device(KINDS[kind](1))
            writer = RobustWriter(path, layout=layout)
            if how == "save":
                robust_dcp.save(expected, storage_writer=writer)
            else:
                robust_dcp.async_save(expected, storage_writer=writer).result(timeout=120)
            for where, move in moves.items():
                target = move(KINDS[kind](0))
                robust_dcp.load(target, storage_reader=RobustReader(path))
                problems += [f"{path} to the {where}: {each}" for each in differences(KINDS[kind](1), target)]
                dist.barrier()
    return problems


def test_every_kind_comes_back_to_the_device_and_to_the_host(tmp_path: Path) -> None:
    """Saved in each layout and beside training; without a device, where this says little, each kind in one way."""
    assert values(run_ranks(4, save_and_load, str(tmp_path), timeout_seconds=170)) == [[]] * 4


def save_laid_out(directory: str) -> None:
    for variant in range(7):
        robust_dcp.save(on_device(laid_out(1, variant)), checkpoint_id=f"{directory}/{variant}")


def load_laid_out(directory: str) -> list[str]:
    problems = []
    for saved in range(7):
        target = on_device(laid_out(0, (saved + 3) % 7))
        robust_dcp.load(target, checkpoint_id=f"{directory}/{saved}")
        problems += differences(laid_out(1, (saved + 3) % 7), target)
    return problems


@pytest.mark.parametrize(("saving", "loading"), [(4, 2), (2, 3)])
def test_what_some_ranks_saved_others_load_in_other_layouts(tmp_path: Path, saving: int, loading: int) -> None:
    values(run_ranks(saving, save_laid_out, str(tmp_path), timeout_seconds=120))
    assert values(run_ranks(loading, load_laid_out, str(tmp_path), timeout_seconds=120)) == [[]] * loading


def test_values_that_ranks_compare_are_the_same_copied_alone_or_together() -> None:
    tensors = [each for kind in ("all_dtypes", "shapes", "views") for each in KINDS[kind](1).values()]
    plain = [each for each in tensors if isinstance(each, torch.Tensor) and is_plain(each)]
    assert len(plain) > 20
    with torch.no_grad():
        copies = to_host_together([flat_bytes(on_device(each)) for each in plain])
        assert list(map(digest_of, copies)) == list(map(digest_of, plain))
