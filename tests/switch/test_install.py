"""One switch: unmodified programs that call ``torch.distributed.checkpoint`` save and load by robust_dcp."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import staging

import robust_dcp
from tests.frameworks.jobs import checkpoints_in, is_ours
from tests.harness.ranks import Outcome, run_alone, run_ranks, values
from tests.harness.torch_versions import HAS_SAFETENSORS, needs_use_collectives

SAVE = """
    import os, sys, torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import (
        DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter, async_save, load, save
    )
    from torch.distributed.checkpoint.metadata import Metadata

    path = sys.argv[1]
    state = {"w": torch.arange(10.0), "nested": {"step": 3}}
    empty = lambda: {"w": torch.zeros(10), "nested": {"step": 0}}

    def processes(kind):
        # Stock's own processes need a group of processes; ours do not.
        return {"async_checkpointer_type": kind} if os.environ.get("ROBUST_DCP") == "1" else {}

    def check(loaded):
        assert torch.equal(loaded["w"], torch.arange(10.0)) and loaded["nested"]["step"] == 3

    def loaded_by(load, *args, **kwargs):
        loaded = empty()
        assert load(loaded, *args, **kwargs) is None
        return loaded

    def error_of(call, *args, **kwargs):
        try:
            call(*args, **kwargs)
        except Exception as error:
            return str(error)
"""


def run(path: Path, script: str, **environment: str) -> Outcome:
    """Run a program of its own, which has :data:`SAVE` before it."""
    done = run_alone(textwrap.dedent(SAVE) + textwrap.dedent(script), path, **environment)
    assert done.exitcode == 0, done
    return done


EVERY_WAY = """
    metadata = save(state, checkpoint_id=path + "/1")
    assert isinstance(metadata, Metadata) and set(metadata.state_dict_metadata) == {"w", "nested.step"}
    dcp.save(state, storage_writer=FileSystemWriter(path + "/2", thread_count=2), planner=DefaultSavePlanner())
    future = async_save(state, checkpoint_id=path + "/3")
    state["w"] += 1
    assert isinstance(future.result(), Metadata)
    state["w"] -= 1
    kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
    dcp.async_save(state, storage_writer=FileSystemWriter(path + "/4"), **processes(kind)).result()
    for number in "1234":
        check(loaded_by(load, checkpoint_id=f"{path}/{number}"))
        reader = FileSystemReader(f"{path}/{number}")
        check(loaded_by(dcp.load, storage_reader=reader, planner=DefaultLoadPlanner()))
"""


def test_with_the_variable_every_call_of_an_unmodified_program_is_taken_over(tmp_path: Path) -> None:
    done = run(tmp_path, EVERY_WAY, ROBUST_DCP="1")
    assert all(is_ours(tmp_path / number) for number in "1234")
    assert done.output.count("takes over save, load and async_save of torch.distributed.checkpoint") == 1


def test_a_process_that_the_program_spawns_is_switched_on_and_says_so_no_second_time(tmp_path: Path) -> None:
    script = """
        import multiprocessing
        given = {"checkpoint_id": path}
        child = multiprocessing.get_context("spawn").Process(target=dcp.save, args=({"step": 3},), kwargs=given)
        child.start()
        child.join()
        assert child.exitcode == 0
    """
    done = run(tmp_path, script, ROBUST_DCP="1")
    assert is_ours(tmp_path)
    assert done.output.count("takes over save, load and async_save of torch.distributed.checkpoint") == 1


def test_install_takes_over_names_that_were_bound_before_and_uninstall_puts_all_back(tmp_path: Path) -> None:
    script = """
        before = (save, load, async_save, dcp.save, dcp.load, dcp.async_save, dcp.state_dict_saver.save)
        import robust_dcp
        robust_dcp.install()
        robust_dcp.install()
        save(state, checkpoint_id=path + "/ours")
        robust_dcp.uninstall()
        robust_dcp.uninstall()
        after = (save, load, async_save, dcp.save, dcp.load, dcp.async_save, dcp.state_dict_saver.save)
        assert all(one is other for one, other in zip(before, after))
        save(state, checkpoint_id=path + "/stock")
    """
    run(tmp_path, script)
    assert is_ours(tmp_path / "ours") and not is_ours(tmp_path / "stock")


def test_objects_of_any_class_load_only_where_the_environment_trusts_them(tmp_path: Path) -> None:
    script = """
        class Own:
            value = 1

            def __init__(self):
                self.value = 7

        save({"f": Own()}, checkpoint_id=path + "/1")
        loaded = {"f": Own}
        print(error_of(load, loaded, checkpoint_id=path + "/1"))
        print("it is", loaded["f"].value)
    """
    refused = run(tmp_path, script, ROBUST_DCP="1")
    assert "and is refused" in refused.output and "it is 1" in refused.output
    assert "it is 7" in run(tmp_path, script, ROBUST_DCP="1", ROBUST_DCP_TRUSTED="1").output


needs_background_stager = pytest.mark.skipif(
    not hasattr(staging, "DefaultStager"), reason="this torch has no DefaultStager, which copies in the background"
)

CALLS = [
    pytest.param(
        """
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        wrapped = torch.compile(model, backend="eager")  # stock saves "_orig_mod.0.weight"
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        saved = {"model": wrapped, "optimizer": optimizer, "step": 3, "pickled": [model, model]}
        metadata = dcp.save(saved, checkpoint_id=path + "/1")
        assert {"model._orig_mod.0.weight", "optimizer.state.0.exp_avg", "pickled"} <= set(metadata.state_dict_metadata)
        before = model[0].weight.detach().clone()
        with torch.no_grad():
            model[0].weight.zero_()
        loaded = {"model": wrapped, "optimizer": optimizer, "step": 0}
        dcp.load(loaded, checkpoint_id=path + "/1")
        assert torch.equal(model[0].weight, before) and loaded["step"] == 3 and loaded["model"] is wrapped
        dcp.async_save(loaded, checkpoint_id=path + "/2").result()
        other = {"model": wrapped, "optimizer": optimizer, "step": 0}
        dcp.load(other, checkpoint_id=path + "/2")
        assert other["step"] == 3
        """,
        [],
        id="modules and optimizers keep the names that stock gives them",
    ),
    pytest.param(
        """
        import robust_dcp
        from torch.distributed.checkpoint._extension import ZStandard

        hooks = {"finish_plan": lambda own, plan: robust_dcp.RobustPlanner.finish_plan(own, plan)}
        kinds = [type("Planner", (DefaultSavePlanner,), {})] * 2 + [type("Own", (robust_dcp.RobustPlanner,), hooks)]
        for number, kind in enumerate(kinds):
            save(state, checkpoint_id=f"{path}/stock{number}", planner=kind())
        save(state, storage_writer=type("Writer", (FileSystemWriter,), {})(path + "/stock3"))
        save(state, storage_writer=FileSystemWriter(path + "/stock4", _extensions=[ZStandard()]))
        reads = type("Reads", (DefaultLoadPlanner,), {"create_global_plan": lambda own, plans: plans})
        for number, kind in enumerate([DefaultLoadPlanner] * 4 + [reads]):
            check(loaded_by(load, checkpoint_id=f"{path}/stock{number}", planner=kind()))
        """,
        [
            "Planner plans otherwise than DefaultSavePlanner",
            "Own overrides finish_plan",
            "Writer writes otherwise than FileSystemWriter",
            "FileSystemWriter with extensions transforms what it writes",
            "Reads overrides create_global_plan, which gets the plans of all ranks",
        ],
        id="planners, writers and transformations of others",
    ),
    pytest.param(
        """
        dcp.save({"w": state["w"]}, storage_writer=dcp.HuggingFaceStorageWriter(path + "/stock1"))
        loaded = {"w": torch.zeros(10)}
        load(loaded, storage_reader=dcp.HuggingFaceStorageReader(path + "/stock1"))
        assert torch.equal(loaded["w"], state["w"])
        kind = getattr(dcp.filesystem, "SerializationFormat", None)
        if kind is not None:
            writer = FileSystemWriter(path + "/stock2", serialization_format=kind.SAFETENSORS)
            save({"w": state["w"]}, storage_writer=writer)
        """,
        [
            "HuggingFaceStorageWriter writes otherwise than FileSystemWriter",
            "HuggingFaceStorageReader reads otherwise than FileSystemReader",
            *['by RobustWriter(layout="safetensors")'] * hasattr(dcp.filesystem, "SerializationFormat"),
        ],
        id="safetensors of stock",
        marks=pytest.mark.skipif(not HAS_SAFETENSORS, reason="this torch has no HuggingFaceStorageReader"),
    ),
    pytest.param(
        """
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
        stager = DefaultStager(StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=False
        ))
        response = async_save(state, checkpoint_id=path + "/1", async_stager=stager)
        assert isinstance(response, AsyncSaveResponse)
        response.staging_completion.result()
        state["w"] += 1
        assert isinstance(response.upload_completion.result(), Metadata)
        check(loaded_by(load, checkpoint_id=path + "/1"))
        stager.close()
        """,
        [],
        id="a stager that copies in the background gets the response that stock gives",
        marks=needs_background_stager,
    ),
    pytest.param(
        """
        from torch.distributed.checkpoint.staging import BlockingAsyncStager
        class Doubles(BlockingAsyncStager):
            def stage(self, state_dict):
                return {"w": 2 * state_dict["w"], "nested": state_dict["nested"]}
        torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=0, world_size=1)
        async_save(state, checkpoint_id=path + "/1", async_stager=Doubles()).result()
        assert torch.equal(loaded_by(load, checkpoint_id=path + "/1")["w"], 2 * state["w"])
        """,
        ["Doubles stages in a way of its own"],
        id="a stager of one's own stages what is saved",
        marks=needs_background_stager,
    ),
    pytest.param(
        """
        old_save, old_load = dcp.save_state_dict, dcp.load_state_dict
        old_save(state, FileSystemWriter(path + "/1"), None, 0, True)
        check(loaded_by(old_load, FileSystemReader(path + "/1")))
        old_save(state, FileSystemWriter(path + "/2"), no_dist=True, coordinator_rank=0)
        torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=0, world_size=1)
        assert error_of(old_save, state, FileSystemWriter(path + "/stock"), coordinator_rank=1)  # there is no such rank
        """,
        ["coordinator_rank=1: rank 0 of the group leads"],
        id="the old names take their arguments by place",
    ),
    pytest.param(
        """
        from robust_dcp import RobustReader, RobustWriter
        writer = RobustWriter(path + "/first", threads=2)
        save(state, storage_writer=writer)
        state["w"] += 1
        save(state, checkpoint_id=path + "/second", storage_writer=writer)
        reader = RobustReader(path + "/first", threads=2)
        for place, more in ((path + "/second", 1), (path + "/first", 0)):
            loaded = loaded_by(load, checkpoint_id=place, storage_reader=reader)
            assert torch.equal(loaded["w"], torch.arange(10.0) + more)
            assert str(reader.path) == place
        """,
        [],
        id="our writer and reader are taken as they are, and a checkpoint id moves them",
    ),
    pytest.param(
        """
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        for place in (path + "/plain", f"file://{path}/stock1", f"file://{path}/stock2"):
            dcp.save(state, storage_writer=FsspecWriter(place, thread_count=2))
            check(loaded_by(load, storage_reader=FsspecReader(place)))
        """,
        [
            "saves by torch.distributed.checkpoint.save (file:// is no mounted file system",
            "loads by torch.distributed.checkpoint.load (file:// is no mounted file system",
        ],
        id="writers and readers of fsspec, which TorchTNT uses for every path",
    ),
    pytest.param(
        """
        import pathlib
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=0, world_size=1)
        moment = torch.arange(10.0) + 0.5
        dcp.save({"model": {"w": state["w"]}, "optimizer": {"state": {"w": {"exp_avg": moment}}}}, checkpoint_id=path)

        def moments():
            reader = FileSystemReader(path)
            loaded = dcp.load_sharded_optimizer_state_dict({"w": state["w"]}, "optimizer", reader)
            return loaded["optimizer"]["state"]["w"]["exp_avg"].local_tensor()

        assert torch.equal(moments(), moment)
        for file in pathlib.Path(path).glob("*.distcp"):
            file.write_bytes(file.read_bytes().replace(moment.numpy().tobytes(), (moment + 1).numpy().tobytes()))
        assert "expected" in error_of(moments)  # a changed byte, which stock does not see
        dist.destroy_process_group()
        """,
        [],
        id="the loader of sharded optimizers, by which Lightning loads those of FSDP",
    ),
    pytest.param(
        """
        from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner, dcp_to_torch_save
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, _load_state_dict_from_keys

        save(state, checkpoint_id=path + "/1")
        loaded = {}
        reader = FileSystemReader(path + "/1")
        _load_state_dict(loaded, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        check(loaded)
        check(_load_state_dict_from_keys({"w", "nested"}, checkpoint_id=path + "/1"))
        # Without keys torch 2.7 loads nothing, and later ones load everything: from ours what they load from stock's.
        dcp.save(state, checkpoint_id=path + "/stock", planner=type("Planner", (DefaultSavePlanner,), {})())
        ours, stock = (_load_state_dict_from_keys(checkpoint_id=f"{path}/{name}") for name in ("1", "stock"))
        assert sorted(ours) == sorted(stock)
        if ours:
            check(ours)
        assert torch.equal(_load_state_dict_from_keys("w", checkpoint_id=path + "/1")["w"], state["w"])
        dcp_to_torch_save(path + "/1", path + "/whole.pt")
        check(torch.load(path + "/whole.pt"))
        """,
        ["Planner plans otherwise than DefaultSavePlanner"],
        id="private loaders, by which Lightning and Accelerate make whole files, read ours and stay stock",
    ),
]


@pytest.mark.parametrize(("script", "reasons"), CALLS)
def test_each_call_is_ours_or_stock_and_what_is_stock_says_why_once(
    script: str, reasons: list[str], tmp_path: Path
) -> None:
    """A directory that is called "stock" holds what stock has saved."""
    done = run(tmp_path, script, ROBUST_DCP="1")
    for path in checkpoints_in(tmp_path):
        assert is_ours(path) is not path.name.startswith("stock"), path
    said = [line for line in done.output.splitlines() if "stock code does this" in line]
    assert len(said) == len(reasons) and all(reason in done.output for reason in reasons), said


AS_STOCK = {
    "a load planner of ones own is asked for each item": """
        class Planner(DefaultLoadPlanner):
            seen = []
            def commit_tensor(self, read_item, tensor):
                self.seen.append(read_item.dest_index.fqn)
                self.original_state_dict["its own"] = 1

        save(state, checkpoint_id=path + "/1")
        loaded = loaded_by(load, checkpoint_id=path + "/1", planner=Planner())
        check(loaded)
        assert Planner.seen == ["w"] and set(loaded) == set(state)
    """,
    "a writer or reader as the second argument is taken as stock takes it": """
        save(state, FileSystemWriter(path + "/1"))
        check(loaded_by(load, FileSystemReader(path + "/1")))
        words = "save() got an unexpected keyword argument 'overwrite'"
        assert words in error_of(save, state, checkpoint_id=path + "/2", overwrite=True)
    """,
    "a checkpoint id moves stocks writer and reader for the calls after it": """
        writer, reader = FileSystemWriter(path + "/first"), FileSystemReader(path + "/first")
        save(state, checkpoint_id=path + "/second", storage_writer=writer)
        state["w"] += 1
        save(state, storage_writer=writer)
        assert str(writer.path) == path + "/second" and not os.path.exists(path + "/first")
        state["w"] -= 1
        save(state, checkpoint_id=path + "/first")
        for place in (path + "/second", None):
            loaded = loaded_by(load, checkpoint_id=place, storage_reader=reader)
            assert torch.equal(loaded["w"], torch.arange(10.0) + 1), loaded
        assert str(reader.path) == path + "/second"
    """,
    "a saved object takes the place of a tensor": """
        save({"lr": 0.5, "w": torch.ones(2)}, checkpoint_id=path + "/1")
        loaded = {"lr": torch.tensor(0.0), "w": torch.zeros(2)}
        load(loaded, checkpoint_id=path + "/1")
        assert loaded["lr"] == 0.5 and isinstance(loaded["lr"], float) and loaded["w"].sum() == 2
    """,
    "the writer has the id of the save that is in the metadata": """
        writer = FileSystemWriter(path)
        for save_again in (save, lambda *args, **kwargs: async_save(*args, **kwargs).result()):
            save_again(state, storage_writer=writer)
            found = FileSystemReader(path).read_metadata().storage_meta
            assert writer.save_id == found.save_id, (writer.save_id, found)
            assert str(found.checkpoint_id) == path
    """,
}


@pytest.mark.parametrize("environment", [{}, {"ROBUST_DCP": "1"}], ids=["stock", "ours"])
def test_what_programs_take_for_granted_is_so_with_stock_and_with_ours(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """In one process, each in a directory of its own."""
    begin = "print({0!r}, flush=True)\npath = os.path.join(sys.argv[1], {0!r})\nos.mkdir(path)\n"
    run(
        tmp_path,
        "".join(begin.format(what) + textwrap.dedent(script) for what, script in AS_STOCK.items()),
        **environment,
    )
    assert {path.parent for path in tmp_path.rglob(".robust_dcp.index")} == (
        {path.parent for path in tmp_path.rglob(".metadata")} if environment else set()
    )


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


def test_an_argument_that_a_later_torch_adds_is_left_to_it_and_named(tmp_path: Path) -> None:
    script = """
        import robust_dcp
        calls = []

        def later_save(state_dict, *, checkpoint_id=None, compression="none"):
            calls.append((checkpoint_id, compression))
            return "saved by stock"

        later_save.__module__ = dcp.state_dict_saver.__name__
        dcp.save = dcp.state_dict_saver.save = later_save
        robust_dcp.install()
        assert dcp.save(state, checkpoint_id=path, compression="zstd") == "saved by stock"
        dcp.save(state, checkpoint_id=path, compression="none")  # its default changes nothing
        assert calls == [(path, "zstd")]
    """
    assert "robust_dcp does not know the arguments compression" in run(tmp_path, script).output
    assert is_ours(tmp_path)
