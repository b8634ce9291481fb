"""`robust-dcp diff` finds each difference of two checkpoints, whatever wrote them and however they are sharded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import robust_dcp
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
    writer = robust_dcp.RobustWriter(tmp_path / "flat", layout="safetensors")
    robust_dcp.save({"model": state()["model"]}, storage_writer=writer)
    dcp.save(state(), checkpoint_id=tmp_path / "stock", no_dist=True)
    code, found = diff(tmp_path / "ours", tmp_path / "stock", "--values")
    assert (code, found["are_equal"], found["compared"]) == (0, True, 5)
    assert diff(tmp_path / "flat", tmp_path / "stock", "model.*", "modle.*")[0] == 2
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
    assert diff(tmp_path / "1", tmp_path / "2", "--tolerance", 1)[0] == 2  # values are not compared
    for tolerance in (0.4, 1e9):
        assert diff(tmp_path / "1", tmp_path / "2", "--values", "--tolerance", tolerance)[0] == 1  # NaN is no number
    code, found = diff(tmp_path / "1", tmp_path / "2", "--values")
    (tensor,) = found["tensors"]
    assert code == 1 and tensor["name"] == "model.w" and (tensor["differing"], tensor["numel"]) == (2, 60)
    assert tensor["nan"] == [0, 1] and tensor["infinite"] == [0, 0]
    assert [each["name"] for each in found["objects"]] == ["names.1.b"]


def test_objects_that_are_not_flattened_are_compared_by_their_values(tmp_path: Path) -> None:
    one = torch.ones(3000)
    other = one.clone()
    other[1500] = 2  # which its repr does not show
    sparse, quantized = one.to_sparse(), torch.quantize_per_tensor(one, 0.5, 0, torch.qint8)
    places, halves = torch.arange(3000).repeat(1, 2), torch.full((6000,), 0.5)
    twice = torch.sparse_coo_tensor(places, halves, (3000,), check_invariants=True)
    pairs: dict[str, tuple[Any, Any]] = {
        "equal": ({"a": (one, one), "b": math.nan}, {"a": (one, one.clone()), "b": math.nan}),
        "equal sparse": (sparse, twice),
        "equal quantized": (quantized, quantized.clone()),
        "type": ([1], (1,)),
        "layout": (one, sparse),
        "tensor": ({"a": [one, 1]}, {"a": [other, 1]}),
        "sparse": (sparse, other.to_sparse()),
        "quantized": (quantized, torch.quantize_per_tensor(other, 0.5, 0, torch.qint8)),
    }
    for side in (0, 1):
        each = {name: pair[side] for name, pair in pairs.items()}
        planner = robust_dcp.RobustPlanner(flatten_state_dict=False)
        robust_dcp.save(each, checkpoint_id=tmp_path / str(side), planner=planner)
    code, found = diff(tmp_path / "0", tmp_path / "1", "--values")
    differing = {name for name in pairs if not name.startswith("equal")}
    assert code == 1 and {each["name"] for each in found["objects"]} == differing


def save_sharded(path: str, by_rows: bool) -> None:
    whole = torch.arange(60, dtype=torch.float32).reshape(12, 5)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    robust_dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0 if by_rows else 1)])}, checkpoint_id=path)


def test_tensors_that_are_sharded_otherwise_are_compared(tmp_path: Path) -> None:
    values(run_ranks(3, save_sharded, str(tmp_path / "rows"), True))
    values(run_ranks(2, save_sharded, str(tmp_path / "columns"), False))
    assert diff(tmp_path / "rows", tmp_path / "columns", "--values")[0] == 0


def test_neighbours_of_every_dtype_differ_and_equal_values_do_not(tmp_path: Path) -> None:
    bits = torch.arange(2, dtype=torch.uint8).view(torch.bits8)
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "int64": (torch.tensor([2**53, -(2**63)]), torch.tensor([2**53 + 1, 2**63 - 1])),
        "uint64": (torch.tensor([0, 7], dtype=torch.uint64), torch.tensor([1, 7], dtype=torch.uint64)),
        "bool": (torch.tensor([True]), torch.tensor([False])),
        "tiny": (torch.tensor([5e-324], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64)),
        "huge": (torch.tensor([1e300], dtype=torch.float64), torch.tensor([-1e300], dtype=torch.float64)),
        "float8": (torch.ones(3).to(torch.float8_e4m3fn), torch.zeros(3).to(torch.float8_e4m3fn)),
        "bits": (bits[:1], bits[1:]),
        "complex": (torch.tensor([1 + 2j]), torch.tensor([1 - 2j])),
        "infinite": (torch.tensor([math.inf, math.inf]), torch.tensor([math.inf, 1.0])),
    }
    equal = {"zero": (torch.tensor([0.0]), torch.tensor([-0.0])), "nan": (torch.tensor([math.nan]),) * 2}
    for side in (0, 1):
        state = {name: pair[side] for name, pair in {**pairs, **equal}.items()}
        robust_dcp.save(state, checkpoint_id=tmp_path / str(side))
    found = {each["name"]: each for each in diff(tmp_path / "0", tmp_path / "1", "--values")[1]["tensors"]}
    assert found.keys() == {*pairs, "zero"} and found["zero"]["max_absolute"] == 0
    as_numbers = diff(tmp_path / "0", tmp_path / "1", "--values", "--tolerance", 0)[1]["tensors"]
    assert {each["name"] for each in as_numbers} == pairs.keys()
    assert (found["int64"]["differing"], found["int64"]["max_absolute"]) == (2, float(2**64 - 1))
    assert (found["uint64"]["differing"], found["complex"]["max_absolute"]) == (1, 4.0)
    assert found["huge"]["max_absolute"] == 2e300 and found["tiny"]["max_absolute"] > 0
    infinite = found["infinite"]
    assert (infinite["max_absolute"], infinite["infinite"]) == (None, [2, 1])  # JSON has no infinity
    for tolerance, differing in ((3.9, "complex"), (4.0, "huge")):
        words = ("--values", "--tolerance", tolerance, "--json")
        assert diff(tmp_path / "0", tmp_path / "1", differing, *words)[0] == 1
    assert diff(tmp_path / "0", tmp_path / "1", "complex", "--values", "--tolerance", 4.0)[0] == 0
