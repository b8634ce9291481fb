"""What is saved one way is loaded every other way, bit for bit: by stock, on other ranks, cut otherwise, in parts."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import robust_dcp
from tests.harness.fingerprints import differences
from tests.harness.ranks import in_ranks, run_ranks, values
from tests.harness.state_dicts import KINDS, full_tensor
from tests.harness.ways import LOADERS, OTHER_SAVERS, SAVERS
from tests.support.torch_versions import HAS_SAFETENSORS

StateDict = dict[str, Any]

# Who writes the files and who reads them matters for each kind; who calls them only that they fit together.
READ_BY_ALL = ("ours", "stock")
READ_BY_SOME = ("ours", "stock")
READ_BY_US = ("ours", "stock no_dist + both")
CANNOT = {  # kinds that a way cannot save: no such dtypes in the layout; torch's own staging
    "safetensors": ("all_dtypes", "quantized"),
    "stock async + both": ("quantized", "views", "sharded_tensor"),
    "stock async process + both": ("quantized", "views", "sharded_tensor"),
}
WAYS = [*SAVERS, *(way for way in OTHER_SAVERS if HAS_SAFETENSORS or way != "safetensors")]


def save_and_load_all_kinds(directory: str, saver: str, loaders: tuple[str, ...]) -> list[str]:
    """Every kind through one saver and each loader; what went wrong, in words."""
    problems: list[str] = []
    save = (SAVERS | OTHER_SAVERS)[saver]
    for kind, make in KINDS.items():
        if kind in CANNOT.get(saver, ()):
            continue
        path = os.path.join(directory, kind)
        expected = make(1)
        try:
            save(expected, path)
        except Exception:
            problems.append(f"{kind}, saved by {saver}: {traceback.format_exc()}")
            continue
        for loader in loaders:
            state_dict = make(0)
            try:
                LOADERS[loader](state_dict, path)
            except Exception:
                problems.append(f"{kind}, saved by {saver}, loaded by {loader}: {traceback.format_exc()}")
                continue
            problems += [f"{kind}, {saver} to {loader}: {each}" for each in differences(expected, state_dict)]
            dist.barrier()  # so that an error of one combination is not met in the next
    return problems


@pytest.mark.parametrize("saver", WAYS)
def test_what_is_saved_one_way_is_loaded_every_other_way_bit_for_bit(saver: str, tmp_path: Path) -> None:
    loaders = READ_BY_US if saver == "safetensors" else tuple(LOADERS) if saver in READ_BY_ALL else READ_BY_SOME
    for problems in values(in_ranks(4, save_and_load_all_kinds, str(tmp_path), saver, loaders, timeout_seconds=150)):
        assert problems == []


def load_some_keys(directory: str, saver: str) -> list[str]:
    """Each half of the keys of what another job has saved, by each loader."""
    problems = []
    for loader, load in LOADERS.items():
        for half in (0, 1):
            target, expected = laid_out(0, half), laid_out(1, half)
            keys = sorted(set(target) - {"optimizer"})[half::2]
            found = {key: target[key] for key in keys}
            load(found, f"{directory}/{saver}-{half}")
            problems += [f"{loader}: {each}" for each in differences({key: expected[key] for key in keys}, found)]
    return problems


@pytest.mark.parametrize("saver", ["ours", "stock"])
def test_a_part_of_a_checkpoint_is_loaded_alone(saver: str, tmp_path: Path) -> None:
    values(in_ranks(4, save_in_all_layouts, str(tmp_path), [saver]))
    for problems in values(in_ranks(2, load_some_keys, str(tmp_path), saver)):
        assert problems == []


SHAPES = {"even": (8, 8), "uneven": (7, 5), "small": (1, 3), "cube": (5, 4, 3), "vector": (13,), "0-dim": ()}


def placements_of(ndim: int, variant: int) -> tuple[int, tuple[Placement, ...]]:
    """(dimensions of the mesh, placements) for a tensor of ``ndim`` dimensions."""
    choices: list[tuple[int, tuple[Placement, ...]]] = [(1, (Replicate(),))]
    if ndim:
        choices += [(1, (Shard(0),)), (1, (Shard(ndim - 1),)), (2, (Shard(0), Replicate()))]
        choices += [(2, (Shard(0), Shard(ndim - 1))), (2, (Replicate(), Shard(ndim - 1))), (2, (Shard(0), Shard(0)))]
    return choices[variant % len(choices)]


def laid_out(seed: int, variant: int) -> StateDict:
    """Every shape in some layout on the ranks there are; ``variant`` chooses. Plain tensors without ranks."""
    found: StateDict = {"optimizer": {"step": seed, "lr": 0.5 * seed}}
    meshes: dict[int, DeviceMesh] = {}
    world = dist.get_world_size() if dist.is_initialized() else 1
    for name, shape in SHAPES.items():
        full = full_tensor(name, shape, seed)
        if not dist.is_initialized():
            found[name] = full
            continue
        dims, placements = placements_of(len(shape), variant)
        if dims not in meshes:
            first = 2 if world % 2 == 0 else 1
            meshes[dims] = init_device_mesh("cpu", (world,) if dims == 1 else (first, world // first))
        found[name] = distribute_tensor(full, meshes[dims], placements, src_data_rank=None)
    return found


def save_in_all_layouts(directory: str, savers: list[str]) -> None:
    for saver in savers:
        for variant in range(7):
            SAVERS[saver](laid_out(1, variant), f"{directory}/{saver}-{variant}")


def load_in_other_layouts(directory: str, saver: str, loader: str, variants: tuple[int, ...]) -> list[str]:
    problems = []
    for saved in variants:
        for variant in (saved, (saved + 3) % 7):
            target = laid_out(0, variant)
            LOADERS[loader](target, f"{directory}/{saver}-{saved}")
            found = differences(laid_out(1, variant), target)
            problems += [f"{saver} {saved} to {loader} {variant}: {each}" for each in found]
    return problems


def load_on_any_number(directory: str) -> list[str]:
    all_variants = load_in_other_layouts(directory, "ours", "ours", tuple(range(7)))
    return all_variants + load_in_other_layouts(directory, "stock", "ours", (1, 4))


def load_by_stock(directory: str) -> list[str]:
    return load_in_other_layouts(directory, "ours", "stock", tuple(range(7)))


@pytest.mark.parametrize("saving_ranks", [4, 2, 3])
def test_a_checkpoint_loads_on_other_numbers_of_ranks_and_in_other_layouts(saving_ranks: int, tmp_path: Path) -> None:
    values(in_ranks(saving_ranks, save_in_all_layouts, str(tmp_path), ["ours", "stock"]))
    for loading_ranks in {4: (2, 3), 2: (4,), 3: (4,)}[saving_ranks]:
        for problems in values(in_ranks(loading_ranks, load_on_any_number, str(tmp_path))):
            assert problems == []
    # One process, without torch.distributed.
    for function in (load_on_any_number, load_by_stock):
        assert values(run_ranks(1, function, str(tmp_path), init=False)) == [[]]


def test_stock_reshards_what_we_saved(tmp_path: Path) -> None:
    values(in_ranks(4, save_in_all_layouts, str(tmp_path), ["ours"]))
    for problems in values(in_ranks(2, load_by_stock, str(tmp_path))):
        assert problems == []


def save_alone(directory: str) -> None:
    robust_dcp.save(laid_out(1, 0), checkpoint_id=f"{directory}/ours-0")


def load_in_each_layout(directory: str) -> list[str]:
    problems = []
    for variant in range(7):
        for load in (robust_dcp.load, dcp.load):
            target = laid_out(0, variant)
            load(target, checkpoint_id=f"{directory}/ours-0")
            problems += differences(laid_out(1, variant), target)
    return problems


def test_a_checkpoint_of_one_process_loads_on_four_ranks(tmp_path: Path) -> None:
    values(run_ranks(1, save_alone, str(tmp_path), init=False))
    for problems in values(in_ranks(4, load_in_each_layout, str(tmp_path))):
        assert problems == []


def save_one_rank_of_many(directory: str) -> str:
    rank = dist.get_rank()
    report = robust_dcp.save({"w": torch.full((3,), float(rank))}, checkpoint_id=f"{directory}/{rank}", no_dist=True)
    target = {"w": torch.zeros(3)}
    robust_dcp.load(target, checkpoint_id=f"{directory}/{rank}", no_dist=True)
    assert differences({"w": torch.full((3,), float(rank))}, target) == []
    return f"{report.rank} of {report.world_size}"


def test_a_rank_saves_for_itself_with_no_dist(tmp_path: Path) -> None:
    assert values(in_ranks(3, save_one_rank_of_many, str(tmp_path))) == ["0 of 1"] * 3
