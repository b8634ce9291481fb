"""An export to Hugging Face's files by all ranks is that of one process, byte for byte, whole or not at all."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import robust_dcp
from robust_dcp import PlanConflict
from robust_dcp.conversion import Rules
from tests.harness.ranks import on_ranks, run_ranks

N_RANKS = 3

RULES = Rules(rename=(("model.*", "*"),), exclude=("step",), dtypes=(("*", "bfloat16"), ("norm", "float32")))


def live_state() -> dict[str, Any]:
    """Sharded by rows and by columns; two names of one weight; and what is no tensor."""
    mesh, generator = init_device_mesh("cpu", (dist.get_world_size(),)), torch.Generator().manual_seed(5)
    model: dict[str, Any] = {
        f"layers.{number}": distribute_tensor(torch.randn(60, 90, generator=generator), mesh, [Shard(number % 2)])
        for number in range(9)
    }
    tied = distribute_tensor(torch.randn(50, 40, generator=generator), mesh, [Shard(0)])
    small = {"norm": torch.ones(7), "scalar": torch.tensor(2), "none": torch.ones(0, 4)}
    return {"model": {**model, "embed": tied, "head": tied, **small}, "step": 3}


def files_in(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


def export(path: str) -> None:
    """Of the checkpoint by size and by a map of files, and of what is live."""
    state, everyone = live_state(), dist.group.WORLD
    robust_dcp.save(state, checkpoint_id=f"{path}/source")
    for name, source, config in (
        ("by size", f"{path}/source", None),
        ("by map", f"{path}/source", f"{path}/config"),
        ("live", state, None),
    ):
        report = robust_dcp.convert(
            source,
            f"{path}/together {name}",
            form="safetensors",
            rules=RULES,
            config=config,
            max_shard_nbytes=30_000,
            buffer_nbytes=4096,
            process_group=everyone,
        )
        assert (report.tensors, report.objects) == (14, 0)


def test_all_ranks_make_what_one_process_makes(tmp_path: Path) -> None:
    names = [*(f"layers.{number}" for number in range(9)), "embed", "head", "norm", "scalar", "none"]
    files = {name: f"part-{number % 4}.safetensors" for number, name in enumerate(names)}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{}")
    (tmp_path / "config" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    on_ranks(N_RANKS, export, str(tmp_path))
    for name, config in (("by size", None), ("by map", tmp_path / "config"), ("live", None)):
        alone = tmp_path / f"alone {name}"
        robust_dcp.convert(
            tmp_path / "source", alone, form="safetensors", rules=RULES, config=config, max_shard_nbytes=30_000
        )
        made = files_in(alone)
        assert files_in(tmp_path / f"together {name}") == made
        index = json.loads(made["model.safetensors.index.json"])["weight_map"]
        assert index == files if config else len(set(index.values())) > N_RANKS
        assert ("config.json" in made) == (config is not None)
    assert not list(tmp_path.glob("*.converting-*"))


# A rank is killed, or fails, where it calls one of these functions of the module.
PHASES = ("open_source", "_check_target", "write_model_file", "_finish_model", "_publish")


def export_until(path: str, phase: str, rank: int, how: str) -> None:
    module = importlib.import_module("robust_dcp.conversion.convert")
    stock = getattr(module, phase)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == rank and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == rank:
            raise OSError(28, "No space left on device")
        return stock(*args, **kwargs)

    setattr(module, phase, fail)
    robust_dcp.convert(
        f"{path}/source", f"{path}/target", form="safetensors", max_shard_nbytes=30_000, process_group=dist.group.WORLD
    )


def save_source(path: str) -> None:
    robust_dcp.save(live_state(), checkpoint_id=f"{path}/source")


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_is_killed_or_fails_leaves_no_target(phase: str, tmp_path: Path) -> None:
    on_ranks(N_RANKS, save_source, str(tmp_path))
    is_of_rank_0 = phase in ("_finish_model", "_publish")
    for how, rank in [("killed", 0), ("failed", 0)] if is_of_rank_0 else [("killed", 0), ("killed", 1), ("failed", 1)]:
        outcomes = run_ranks(N_RANKS, export_until, str(tmp_path), phase, rank, how)
        assert all(each.exitcode != 0 for each in outcomes), (how, rank, outcomes)
        others = [each.error for each in outcomes if each.rank != rank]
        assert all(each is not None for each in others), others
        assert [each.name for each in tmp_path.iterdir()] == ["source"], (how, rank)


def test_the_command_exports_under_torchrun_and_other_forms_are_refused(tmp_path: Path) -> None:
    robust_dcp.save({"model": {"a": torch.ones(500), "b": torch.zeros(500)}}, checkpoint_id=tmp_path / "source")
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "robust_dcp.cli", "convert")
    command = [sys.executable, *words, str(tmp_path / "source"), str(tmp_path / "target"), "--max-shard-size", "2KiB"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--to", "safetensors"], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Made ") == 1 and "2 tensors" in done.stdout
    assert len(list((tmp_path / "target").glob("*.safetensors"))) == 2
    with pytest.raises(AssertionError, match="ValueError: --to dcp is made by one process"):
        on_ranks(N_RANKS, refused, str(tmp_path))


def refused(path: str) -> None:
    live = {"model": torch.nn.Linear(2, 2)}
    for state_dict, rules, words in (
        (live, Rules(select=("none",)), "no item has a name that 'none' fits"),
        (live, Rules(rename=(("model.*", "one"),)), "would both be called 'one'"),
        (live, Rules(dtypes=(("none", "bfloat16"),)), "no item has a name that 'none' fits"),
    ):
        with pytest.raises(ValueError, match=words):  # on each rank: no other one removes what it still reads
            robust_dcp.convert(
                state_dict, f"{path}/other", form="safetensors", rules=rules, process_group=dist.group.WORLD
            )
    robust_dcp.convert(f"{path}/source", f"{path}/other", form="dcp", process_group=dist.group.WORLD)


def disagree(path: str) -> None:
    """Each is refused at once, and not at a timeout."""
    one, usual = dist.get_rank() == 1, {"form": "safetensors", "max_shard_nbytes": 90_000}
    for words, here in (
        ("'safetensors' on rank 0.*'dcp' on rank 1", {"form": "dcp"}),
        ("form='none' on rank 1", {"form": "none"}),
        ("max_shard_nbytes=90000 on rank 0, max_shard_nbytes=30000 on rank 1", {"max_shard_nbytes": 30_000}),
        ("rules=.*exclude", {"rules": Rules(exclude=("a",))}),
        ("overwrite=False on rank 0, overwrite=True on rank 1", {"overwrite": True}),
        ("config=None on rank 0, config='/none' on rank 1", {"config": "/none"}),
        ("layout='torch' on rank 0", {"layout": "safetensors"}),
        ("there/source' on rank 1", {"source": f"{path}/there/source"}),
        ("source=a state dict on rank 1", {"source": {"a": torch.ones(1)}}),
        ("target=.*elsewhere' on rank 1", {"target": f"{path}/elsewhere"}),
    ):
        options = {"source": f"{path}/source", "target": f"{path}/model", **usual, **(here if one else {})}
        with pytest.raises(PlanConflict, match=f"convert was called with .*{words}"):
            robust_dcp.convert(**options, process_group=dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patched:  # one path, and for a rank it is another directory
        patched.chdir(f"{path}/there" if one else path)
        with pytest.raises(PlanConflict, match="the ranks do not convert the same"):
            robust_dcp.convert("source", f"{path}/model", **usual, process_group=dist.group.WORLD)


def test_ranks_that_would_convert_something_else_are_refused(tmp_path: Path) -> None:
    for number, name in enumerate(("source", "there/source")):
        robust_dcp.save(dict.fromkeys("ab", torch.full((5_000,), float(number))), checkpoint_id=tmp_path / name)
    on_ranks(2, disagree, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "there"]
