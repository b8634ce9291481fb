"""One switch: unmodified programs that call ``torch.distributed.checkpoint`` save and load by robust_dcp."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.frameworks.jobs import is_ours
from tests.harness.torch_versions import needs_background_stager, needs_safetensors
from tests.switch.programs import run

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
        loaded = empty()
        assert load(loaded, checkpoint_id=f"{path}/{number}") is None
        check(loaded)
        loaded = empty()
        dcp.load(loaded, storage_reader=FileSystemReader(f"{path}/{number}"), planner=DefaultLoadPlanner())
        check(loaded)
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


def test_modules_and_optimizers_keep_the_names_that_stock_gives_them(tmp_path: Path) -> None:
    script = """
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        wrapped = torch.compile(model, backend="eager")  # stock saves "_orig_mod.0.weight"
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        metadata = dcp.save({"model": wrapped, "optimizer": optimizer, "step": 3}, checkpoint_id=path + "/1")
        assert {"model._orig_mod.0.weight", "optimizer.state.0.exp_avg"} <= set(metadata.state_dict_metadata)
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
    """
    run(tmp_path, script, ROBUST_DCP="1")
    assert is_ours(tmp_path / "1") and is_ours(tmp_path / "2")


def test_what_robust_dcp_cannot_stand_in_for_is_stock_and_each_reason_is_said_once(tmp_path: Path) -> None:
    script = """
        from torch.distributed.checkpoint._extension import ZStandard

        class Planner(DefaultSavePlanner):
            pass

        class Writer(FileSystemWriter):
            pass

        for number in range(2):
            save(state, checkpoint_id=f"{path}/planner{number}", planner=Planner())
        save(state, storage_writer=Writer(path + "/writer"))
        save(state, storage_writer=FileSystemWriter(path + "/transformed", _extensions=[ZStandard()]))
        for name in ("planner0", "planner1", "writer", "transformed"):
            loaded = empty()
            load(loaded, checkpoint_id=f"{path}/{name}")
            check(loaded)
    """
    done = run(tmp_path, script, ROBUST_DCP="1")
    assert not any(is_ours(path) for path in tmp_path.iterdir())
    said = [line for line in done.output.splitlines() if "stock code does this" in line]
    assert len(said) == 3, "one line for each reason"
    assert "Planner plans otherwise than DefaultSavePlanner" in said[0]
    assert "Writer writes otherwise than FileSystemWriter" in said[1]
    assert "FileSystemWriter with extensions transforms what it writes" in said[2]


@needs_safetensors
def test_stocks_own_safetensors_are_stock_and_ours_are_named(tmp_path: Path) -> None:
    script = """
        from torch.distributed.checkpoint import filesystem
        dcp.save({"w": state["w"]}, storage_writer=dcp.HuggingFaceStorageWriter(path + "/hf"))
        loaded = {"w": torch.zeros(10)}
        load(loaded, storage_reader=dcp.HuggingFaceStorageReader(path + "/hf"))
        assert torch.equal(loaded["w"], state["w"])
        kind = getattr(filesystem, "SerializationFormat", None)
        if kind is not None:
            writer = FileSystemWriter(path + "/1", serialization_format=kind.SAFETENSORS)
            save({"w": state["w"]}, storage_writer=writer)
        print("told" if kind is None else "to be told")
    """
    done = run(tmp_path, script, ROBUST_DCP="1")
    assert not any(is_ours(path) for path in tmp_path.iterdir())
    assert "HuggingFaceStorageWriter writes otherwise than FileSystemWriter" in done.output
    named = 'robust_dcp writes safetensors by RobustWriter(layout="safetensors")' in done.output
    assert named or done.output.endswith("told\n")


@needs_background_stager
def test_a_stager_that_copies_in_the_background_gets_the_response_that_stock_gives(tmp_path: Path) -> None:
    script = """
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
        loaded = empty()
        load(loaded, checkpoint_id=path + "/1")
        check(loaded)
        stager.close()
    """
    run(tmp_path, script, ROBUST_DCP="1")
    assert is_ours(tmp_path / "1")


def test_objects_of_any_class_load_only_where_the_environment_trusts_them(tmp_path: Path) -> None:
    script = """
        class Own:
            value = 1

            def __init__(self):
                self.value = 7

        save({"f": Own()}, checkpoint_id=path + "/1")
        loaded = {"f": Own}
        try:
            load(loaded, checkpoint_id=path + "/1")
        except Exception as error:
            print(type(error).__name__)
        print("it is", loaded["f"].value)
    """
    refused = run(tmp_path, script, ROBUST_DCP="1")
    assert "UnsafeCheckpoint" in refused.output and "it is 1" in refused.output
    assert "it is 7" in run(tmp_path, script, ROBUST_DCP="1", ROBUST_DCP_TRUSTED="1").output


def test_writers_and_readers_of_fsspec_are_taken_over_for_directories_and_stay_stock_for_urls(tmp_path: Path) -> None:
    """TorchTNT uses them for every path."""
    script = """
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        for place in (path + "/plain", "file://" + path + "/url", "file://" + path + "/url2"):
            dcp.save(state, storage_writer=FsspecWriter(place, thread_count=2))
            loaded = empty()
            load(loaded, storage_reader=FsspecReader(place))
            check(loaded)
    """
    done = run(tmp_path, script, ROBUST_DCP="1")
    assert is_ours(tmp_path / "plain") and not is_ours(tmp_path / "url")
    for what in ("saves by torch.distributed.checkpoint.save", "loads by torch.distributed.checkpoint.load"):
        assert done.output.count(f"{what} (file:// is no mounted file system") == 1


def test_the_loader_of_sharded_optimizers_is_taken_over(tmp_path: Path) -> None:
    """Lightning loads the optimizer of FSDP by it. A changed byte tells who reads: stock does not see it."""
    script = """
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
        try:
            moments()
        except Exception as error:
            print("refused:", error)
        dist.destroy_process_group()
    """
    assert "refused:" in run(tmp_path, script, ROBUST_DCP="1").output


def test_private_loaders_that_tools_use_read_what_robust_dcp_has_written(tmp_path: Path) -> None:
    """They stay stock. Lightning, Accelerate and ``dcp_to_torch_save`` make whole files of a checkpoint by them."""
    script = """
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
    """
    run(tmp_path, script, ROBUST_DCP="1")
    assert is_ours(tmp_path / "1")


AS_STOCK = {
    "a load planner of ones own is asked for each item": """
        class Planner(DefaultLoadPlanner):
            seen = []
            def commit_tensor(self, read_item, tensor):
                self.seen.append(read_item.dest_index.fqn)

        save(state, checkpoint_id=path + "/1")
        loaded = empty()
        load(loaded, checkpoint_id=path + "/1", planner=Planner())
        check(loaded)
        assert Planner.seen == ["w"]
    """,
    "a writer or reader as the second argument is taken as stock takes it": """
        save(state, FileSystemWriter(path + "/1"))
        loaded = empty()
        load(loaded, FileSystemReader(path + "/1"))
        check(loaded)
        try:
            save(state, checkpoint_id=path + "/2", overwrite=True)
        except TypeError as error:
            assert "save() got an unexpected keyword argument 'overwrite'" in str(error)
        else:
            raise SystemExit("stock has no such argument")
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
            loaded = empty()
            load(loaded, checkpoint_id=place, storage_reader=reader)
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
