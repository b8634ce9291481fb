"""`robust-dcp diff` finds each difference of two checkpoints, whatever wrote them and however they are sharded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import robust_dcp
from robust_dcp.comparison.tensor_difference import TensorDifference, difference_of
from robust_dcp.comparison.values import compare_tensors
from tests.cli.commands import Shell
from tests.cli.commands import shell as run_command
from tests.harness.ranks import run_ranks, values


def state() -> dict[str, Any]:
    whole = torch.arange(60, dtype=torch.float32).reshape(12, 5)
    return {"model": {"w": whole, "b": whole[0].bfloat16()}, "step": 7, "names": ["a", {"b": math.nan}]}


def diff(*arguments: object) -> tuple[int, dict[str, Any]]:
    ended = run_command("diff", *arguments, "--json")
    return ended.code, ended.json


def test_equal_checkpoints_of_ours_and_stock_are_equal(tmp_path: Path) -> None:
    robust_dcp.save(state(), checkpoint_id=tmp_path / "ours")
    robust_dcp.save(
        {"model": state()["model"]}, storage_writer=robust_dcp.RobustWriter(tmp_path / "flat", layout="safetensors")
    )
    dcp.save(state(), checkpoint_id=tmp_path / "stock", no_dist=True)
    code, found = diff(tmp_path / "ours", tmp_path / "stock", "--values")
    assert (code, found["are_equal"], found["compared"]) == (0, True, 5)
    code, found = diff(tmp_path / "flat", tmp_path / "stock", "model.*", "--values")
    assert (code, found["compared"]) == (0, 2)


def test_what_only_one_has_and_what_has_changed_is_named(tmp_path: Path) -> None:
    other = state()
    other["model"]["b"] = other["model"]["b"].float()
    other["model"]["new"] = torch.ones(2)
    del other["step"]
    robust_dcp.save(state(), checkpoint_id=tmp_path / "1")
    robust_dcp.save(other, checkpoint_id=tmp_path / "2")
    code, found = diff(tmp_path / "1", tmp_path / "2")
    assert code == 1 and [each["name"] for each in found["added"]] == ["model.new"]
    assert [each["name"] for each in found["removed"]] == ["step"]
    assert found["changed"] == [{"name": "model.b", "before": "bfloat16 [5]", "after": "float32 [5]"}]


def test_values_that_differ_are_counted_and_measured(tmp_path: Path) -> None:
    other = state()
    other["model"]["w"][3, 2] += 0.5
    other["model"]["w"][4, 4] = math.nan
    other["names"] = ["a", {"b": 1.0}]
    robust_dcp.save(state(), checkpoint_id=tmp_path / "1")
    robust_dcp.save(other, checkpoint_id=tmp_path / "2")
    assert diff(tmp_path / "1", tmp_path / "2")[0] == 0  # the structure is the same
    code, found = diff(tmp_path / "1", tmp_path / "2", "--values")
    (tensor,) = found["tensors"]
    assert code == 1 and tensor["name"] == "model.w" and (tensor["differing"], tensor["numel"]) == (2, 60)
    assert tensor["nan"] == [0, 1] and tensor["infinite"] == [0, 0]
    assert [each["name"] for each in found["objects"]] == ["names.1.b"]


def test_a_tolerance_is_for_values_and_not_for_nan(tmp_path: Path) -> None:
    other = state()
    other["model"]["w"][3, 2] += 0.5
    robust_dcp.save(state(), checkpoint_id=tmp_path / "1")
    robust_dcp.save(other, checkpoint_id=tmp_path / "2")
    assert diff(tmp_path / "1", tmp_path / "2", "--values", "--tolerance", 0.5)[0] == 0
    assert diff(tmp_path / "1", tmp_path / "2", "--values", "--tolerance", 0.4)[0] == 1
    other["model"]["w"][0, 0] = math.nan
    robust_dcp.save(other, checkpoint_id=tmp_path / "2")
    assert diff(tmp_path / "1", tmp_path / "2", "--values", "--tolerance", 1e9)[0] == 1


def save_sharded(path: str, by_rows: bool) -> None:
    whole = torch.arange(60, dtype=torch.float32).reshape(12, 5)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    robust_dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0 if by_rows else 1)])}, checkpoint_id=path)


def test_tensors_that_are_sharded_otherwise_are_compared(tmp_path: Path) -> None:
    values(run_ranks(3, save_sharded, str(tmp_path / "rows"), True))
    values(run_ranks(2, save_sharded, str(tmp_path / "columns"), False))
    assert diff(tmp_path / "rows", tmp_path / "columns", "--values")[0] == 0
    code, found = diff(tmp_path / "rows", tmp_path / "columns", "--chunks")
    assert code == 1 and [each["name"] for each in found["changed"]] == ["w"]


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (self.path.touch, ())


def test_an_object_that_would_run_code_is_compared_by_its_bytes(tmp_path: Path) -> None:
    evil = Evil(tmp_path / "executed")
    for name, value in (("1", [evil]), ("2", [evil, 1])):
        dcp.save({"o": value}, checkpoint_id=tmp_path / name, no_dist=True)
    code, found = diff(tmp_path / "1", tmp_path / "2", "--values")
    assert code == 1 and found["objects"][0]["second"].endswith("other bytes")
    assert diff(tmp_path / "1", tmp_path / "1", "--values")[0] == 0
    assert not (tmp_path / "executed").exists()


def test_pieces_give_the_same_difference_as_the_whole(tmp_path: Path) -> None:
    first, second = torch.randn(37, 11, 3), torch.randn(37, 11, 3)
    robust_dcp.save({"w": first}, checkpoint_id=tmp_path / "1")
    robust_dcp.save({"w": second}, checkpoint_id=tmp_path / "2")
    paths = str(tmp_path / "1"), str(tmp_path / "2")
    seen: list[int] = []
    for memory_nbytes in (8, 1000, 1 << 20):
        ((_, found),) = compare_tensors(*paths, ["w"], buffer_nbytes=memory_nbytes, progress=seen.append)
        assert found == difference_of(first, second)
    assert seen.count(first.nbytes) == 3 and max(seen) == first.nbytes


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_each_floating_dtype_is_compared_exactly(dtype: torch.dtype) -> None:
    first = torch.tensor([1.0, 2.0, -0.0, math.nan]).to(dtype)
    second = torch.tensor([1.0, 4.0, 0.0, math.nan]).to(dtype)
    assert difference_of(first, second) == TensorDifference(4, 1, 2.0, 0.5, (1, 1), (0, 0))


def test_an_infinity_on_one_side_only_is_as_far_away_as_can_be() -> None:
    found = difference_of(torch.tensor([math.inf, math.inf, 1.0]), torch.tensor([math.inf, 1.0, 1.0]))
    assert (found.differing, found.max_absolute, found.infinite) == (1, math.inf, (2, 1))


def test_a_complex_difference_is_a_distance() -> None:
    found = difference_of(torch.tensor([3 + 4j, 1j]), torch.tensor([0j, 1j]))
    assert (found.differing, found.max_absolute) == (1, 5.0)


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2), min_size=1, max_size=9))
def test_integers_are_subtracted_as_integers(pairs: list[tuple[int, int]]) -> None:
    first, second = (torch.tensor(side, dtype=torch.int64) for side in zip(*pairs, strict=True))
    found = difference_of(first, second)
    assert found.differing == sum(one != other for one, other in pairs)
    assert found.max_absolute == float(max(abs(one - other) for one, other in pairs))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.uint16, torch.uint32, torch.uint64])
def test_small_and_unsigned_integers_are_compared(dtype: torch.dtype) -> None:
    first, second = torch.tensor([0, 1, 1]).to(dtype), torch.tensor([1, 1, 0]).to(dtype)
    assert difference_of(first, second) == TensorDifference(3, 2, 1.0, 1.0)


def test_a_checkpoint_that_is_not_there_is_no_difference(tmp_path: Path) -> None:
    robust_dcp.save(state(), checkpoint_id=tmp_path / "1")
    assert run_command("diff", tmp_path / "1", tmp_path / "2").code == 2


def test_a_pattern_that_no_item_fits_is_no_equality(tmp_path: Path, shell: Shell) -> None:
    robust_dcp.save(state(), checkpoint_id=tmp_path / "one")
    robust_dcp.save(state(), checkpoint_id=tmp_path / "two")
    ended = shell("diff", tmp_path / "one", tmp_path / "two", "modle.*", "--values", "--json")
    assert (ended.code, ended.json) == (
        2,
        {"version": 1, "error": "no item of either checkpoint has such a name: modle.*"},
    )
    assert diff(tmp_path / "one", tmp_path / "two", "modle.*", "step")[0] == 0
