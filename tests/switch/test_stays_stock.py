"""Calls that robust_dcp cannot stand in for run as stock, each says why, and nothing that was saved is lost by it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp.storage.files.paths import INDEX_NAME
from robust_dcp.switch import dcp_calls, patching
from tests.frameworks.jobs import is_ours
from tests.harness.ranks import run_ranks, values
from tests.harness.torch_versions import needs_background_stager, needs_use_collectives
from tests.switch.programs import run


def own_part(step: float) -> dict[str, Any]:
    rank = dist.get_rank()
    return {f"rank{rank}": torch.full((3,), step + rank), "step": step}


def load_what_each_rank_saved_by_itself(path: str) -> dict[str, Any]:
    robust_dcp.install()
    dcp.save(own_part(5.0), checkpoint_id=path, use_collectives=False)
    dist.barrier()
    loaded = own_part(0.0)
    dcp.load(loaded, checkpoint_id=path)
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in loaded.items()}


@needs_use_collectives
def test_what_each_rank_saved_by_itself_is_loaded_again_by_each(tmp_path: Path) -> None:
    outcomes = run_ranks(2, load_what_each_rank_saved_by_itself, str(tmp_path / "1"))
    assert values(outcomes) == [{f"rank{rank}": [5.0 + rank] * 3, "step": 5.0} for rank in range(2)]
    assert {path.name for path in (tmp_path / "1").glob("*.metadata")} == {"__0.metadata", "__1.metadata"}
    for outcome in outcomes:
        assert "use_collectives=False: each rank would save by itself" in outcome.output
        assert "it was saved with use_collectives=False, so each rank loads by itself" in outcome.output


@needs_background_stager
def test_a_stager_of_ones_own_stages_what_is_saved(tmp_path: Path) -> None:
    script = """
        from torch.distributed.checkpoint.staging import BlockingAsyncStager
        class Doubles(BlockingAsyncStager):
            def stage(self, state_dict):
                return {"w": 2 * state_dict["w"], "nested": state_dict["nested"]}
        torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=0, world_size=1)
        async_save(state, checkpoint_id=path + "/1", async_stager=Doubles()).result()
        loaded = empty()
        load(loaded, checkpoint_id=path + "/1")
        assert torch.equal(loaded["w"], 2 * state["w"])
    """
    done = run(tmp_path, script, ROBUST_DCP="1")
    assert "Doubles stages in a way of its own" in done.output


def test_the_old_names_take_their_arguments_by_place(tmp_path: Path) -> None:
    script = """
        old_save, old_load = dcp.save_state_dict, dcp.load_state_dict
        old_save(state, FileSystemWriter(path + "/1"), None, 0, True)
        loaded = empty()
        old_load(loaded, FileSystemReader(path + "/1"))
        assert torch.equal(loaded["w"], state["w"])
        old_save(state, FileSystemWriter(path + "/2"), no_dist=True, coordinator_rank=0)
        torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=0, world_size=1)
        try:
            old_save(state, FileSystemWriter(path + "/3"), coordinator_rank=1)
        except Exception:
            pass  # stock finds no such rank
    """
    done = run(tmp_path, script, ROBUST_DCP="1")
    assert is_ours(tmp_path / "1") and is_ours(tmp_path / "2") and not is_ours(tmp_path / "3")
    assert "coordinator_rank=1: rank 0 of the group leads" in done.output


def test_our_writer_and_reader_are_taken_as_they_are_and_a_checkpoint_id_moves_them(tmp_path: Path) -> None:
    script = """
        from robust_dcp import RobustReader, RobustWriter
        writer = RobustWriter(path + "/first", threads=2)
        save(state, storage_writer=writer)
        state["w"] += 1
        save(state, checkpoint_id=path + "/second", storage_writer=writer)
        reader = RobustReader(path + "/first", threads=2)
        for place, more in ((path + "/second", 1), (path + "/first", 0)):
            loaded = empty()
            load(loaded, checkpoint_id=place, storage_reader=reader)
            assert torch.equal(loaded["w"], torch.arange(10.0) + more)
            assert str(reader.path) == place
    """
    done = run(tmp_path, script, ROBUST_DCP="1")
    assert is_ours(tmp_path / "first") and is_ours(tmp_path / "second")
    assert "stock code does this" not in done.output


def test_an_argument_that_a_later_torch_adds_is_left_to_it_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def save(state_dict: Any, *, checkpoint_id: Any = None, compression: str = "none") -> str:
        calls.append((state_dict, checkpoint_id, compression))
        return "saved by stock"

    patching._said.clear()
    state = {"w": torch.ones(2)}
    arguments = {"checkpoint_id": tmp_path / "1", "compression": "zstd"}
    assert dcp_calls.save(save, (state,), arguments) == "saved by stock"
    assert calls == [(state, tmp_path / "1", "zstd")]
    assert "robust_dcp does not know the arguments compression" in caplog.text
    dcp_calls.save(save, (state,), {"checkpoint_id": tmp_path / "1", "compression": "none"})
    assert len(calls) == 1 and INDEX_NAME in os.listdir(tmp_path / "1"), "its default changes nothing"
