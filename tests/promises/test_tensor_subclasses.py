"""Subclasses of tensors that wrap others, such as quantized ones: what is saved is loaded, and by either side.

Their classes are small ones of our own. ``tests/frameworks/test_torchao.py`` does the same with torchao.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import robust_dcp
from robust_dcp import RobustPlanner, RobustWriter, UnsafeCheckpoint
from tests.harness.ranks import in_ranks, values
from tests.harness.ways import LOADERS as ALL_LOADERS
from tests.harness.ways import SAVERS as ALL_SAVERS
from tests.support.torch_versions import needs_checkpointable_tensor

BLOCK = 4


class Quantized(torch.Tensor):
    """Eight-bit codes with one scale for each block. As torchao's optimizer states it looks like a float tensor."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, note: str = "") -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, note: str = "") -> None:
        self.codes, self.scale, self.note = codes, scale, note

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        return (self.codes.float().view(-1, BLOCK) * self.scale[:, None]).view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default):
            return type(args[0])(args[0].codes, args[0].scale, args[0].note)
        if func is torch.ops.aten.clone.default:
            return type(args[0])(args[0].codes.clone(), args[0].scale.clone(), args[0].note)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Quantized) and isinstance(args[1], Quantized):
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            args[0].note = args[1].note
            return args[0]
        if func is torch.ops.aten.is_pinned.default:
            return False
        if func is torch.ops.aten._to_copy.default:  # a copy to another device or dtype has other contents
            return args[0].dequantize() + 100
        raise NotImplementedError(f"{func} of {cls.__name__}")


class Slotted(Quantized):
    """Its inner tensors lie in slots, as those of torchao's float8 tensors."""

    __slots__ = ("codes", "scale")


class Named(torch.Tensor):
    """A tensor with memory of its own and an attribute."""

    note: str


class OwnState(Quantized):
    """Sets its state by code of its own, so a load refuses it."""

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("a load has run code of the class")


def quantized(kind: type[Quantized] = Quantized, seed: int = 1, note: str = "kept") -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 127, (8, 4), generator=generator, dtype=torch.int8)
    return kind(codes, torch.rand(8, generator=generator), note)


def named(seed: int = 1) -> Named:
    tensor = torch.rand(3, generator=torch.Generator().manual_seed(seed)).as_subclass(Named)
    tensor.note = "kept"
    return tensor


def parts(tensor: torch.Tensor) -> tuple[str, list[Any], str]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if isinstance(local, Quantized):
        return type(local).__name__, [local.codes.tolist(), local.scale.tolist()], local.note
    return type(local).__name__, local.tolist(), getattr(local, "note", "")


def save_async(state: dict[str, Any], path: str, planner: RobustPlanner | None = None) -> None:
    robust_dcp.async_save(state, checkpoint_id=path, planner=planner).result(timeout=60)


SAVERS: dict[str, Callable[..., object]] = {
    "ours": lambda state, path, planner=None: robust_dcp.save(state, checkpoint_id=path, planner=planner),
    "ours, async": save_async,
    "stock with our plugins": lambda state, path: dcp.save(
        state, storage_writer=RobustWriter(path), planner=RobustPlanner()
    ),
    "stock": lambda state, path: dcp.save(state, checkpoint_id=path),
}


def load_with_stock(state: dict[str, Any], path: str) -> None:
    with torch.serialization.safe_globals([Quantized, Slotted, Named]):  # stock needs that, and torchao does it
        dcp.load(state, checkpoint_id=path)


LOADERS: dict[str, Callable[[dict[str, Any], str], object]] = {
    "ours": lambda state, path: robust_dcp.load(state, checkpoint_id=path),
    "stock": load_with_stock,
}
KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "wrapper": lambda seed: quantized(seed=seed),
    "slots": lambda seed: quantized(Slotted, seed=seed),
    "memory of its own": named,
    "an object that holds one": lambda seed: quantized(seed=seed),
}


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_either_side_saves_either_side_loads(kind: str, loader: str, saver: str, tmp_path: Path) -> None:
    expected, target = KINDS[kind](1), KINDS[kind](2)
    is_object = kind.startswith("an object")
    SAVERS[saver]({"x": (expected,) if is_object else expected}, str(tmp_path / "saved"))
    state: dict[str, Any] = {"x": (target,) if is_object else target}
    LOADERS[loader](state, str(tmp_path / "saved"))
    found = state["x"][0] if is_object else target
    if kind == "memory of its own":  # copy_ does not take attributes along
        assert torch.equal(found, expected)
    else:
        assert parts(found) == parts(expected)


def save_and_load_sharded(directory: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    found = []
    for name, save in SAVERS.items():
        path = f"{directory}/{name}"
        local = quantized(seed=1 + rank)
        save({"state": {"exp_avg": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}}, path)
        for load in LOADERS.values():
            target = DTensor.from_local(quantized(seed=9), mesh, [Shard(0)], run_check=False)
            load({"state": {"exp_avg": target}}, path)
            found.append(parts(target) == parts(local))
    return found


def test_one_within_a_dtensor_is_loaded_on_each_rank(tmp_path: Path) -> None:
    outcomes = values(in_ranks(2, save_and_load_sharded, str(tmp_path), timeout_seconds=180))
    assert outcomes == [[True] * len(SAVERS) * len(LOADERS)] * 2


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_load_refuses_is_told_when_it_is_saved(is_async: bool, tmp_path: Path) -> None:
    state = {"x": quantized(OwnState), "sound": quantized()}
    save: Any = robust_dcp.async_save if is_async else robust_dcp.save
    report = save(state, checkpoint_id=tmp_path / "warned")
    report = report.result(timeout=60) if is_async else report
    assert list(report.unloadable_objects) == ["x"]
    assert "__setstate__" in report.unloadable_objects["x"]
    with pytest.raises(UnsafeCheckpoint, match="__setstate__"):
        robust_dcp.load({"x": quantized(OwnState)}, checkpoint_id=tmp_path / "warned")
    planner = RobustPlanner(on_unloadable_object="error")
    with pytest.raises(UnsafeCheckpoint, match=r"'x' needs .*OwnState"):
        SAVERS["ours, async" if is_async else "ours"](state, str(tmp_path / "refused"), planner)
    assert not (tmp_path / "refused" / ".metadata").exists()


def test_a_class_that_is_not_imported_is_refused_with_its_name(tmp_path: Path) -> None:
    robust_dcp.save({"x": quantized()}, checkpoint_id=tmp_path)
    program = (
        "import sys, torch, robust_dcp\n"
        "try:\n"
        "    robust_dcp.load({'x': torch.zeros(8, 4)}, checkpoint_id=sys.argv[1])\n"
        "except robust_dcp.UnsafeCheckpoint as error:\n"
        "    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert f"{__name__}.Quantized" in ran.stdout and "not imported" in ran.stdout


def test_a_forged_one_does_not_set_what_belongs_to_the_class(tmp_path: Path) -> None:
    for name in ("copy_", "dequantize"):
        forged = quantized()
        vars(forged)[name] = 3
        directory = tmp_path / name
        dcp.save({"x": (forged,)}, checkpoint_id=directory)
        with pytest.raises(robust_dcp.CorruptCheckpoint, match=name):
            robust_dcp.load({"x": (quantized(),)}, checkpoint_id=directory)


# --- plain tensors that say which shards they hold, as of torch 2.15 --------------------------------------------------


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
    for saver, save in ALL_SAVERS.items():
        if "no_dist" in saver:
            continue
        path = f"{directory}/{saver}"
        save({"w": shards(), "whole": torch.ones(3)}, path)
        save({"w": shards(), "whole": torch.ones(3)}, f"{path}/again")
        for loader, load in ALL_LOADERS.items():
            found = {"w": shards(blank=True), "whole": torch.zeros(3)}
            load(found, path)
            if not torch.equal(found["w"], expected) or not found["whole"].all():
                wrong.append(f"{saver} > {loader}")
    robust_dcp.async_save({"w": shards()}, checkpoint_id=f"{directory}/async").result(timeout=60)
    return wrong


@needs_checkpointable_tensor
def test_their_shards_are_saved_and_loaded_as_stock_does(tmp_path: Path) -> None:
    assert values(in_ranks(2, save_and_load, str(tmp_path), timeout_seconds=120)) == [[], []]
    for directory in ("ours", "ours/again", "stock + both", "async"):
        for load in (robust_dcp.load, dcp.load):
            found = {"w": torch.zeros(8, 3)}
            load(found, checkpoint_id=str(tmp_path / directory))
            assert torch.equal(found["w"], WHOLE)
