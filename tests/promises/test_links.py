"""A checkpoint whose files are links is read as any other, and nothing is written or removed through a link."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import CheckpointManager, RobustCheckpointError, RobustReader, RobustWriter, copy_checkpoint
from robust_dcp.conversion import convert
from tests.cli.commands import shell
from tests.drain.checkpoints import KINDS, files_of, loaded, state_dict
from tests.harness.verdicts import verdict_of


def content_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def put_into_store(directory: Path, store: Path) -> None:
    """Move each file to a place that is called by a number, and leave a link in its place."""
    for path in [each for each in directory.rglob("*") if each.is_file()]:
        store.mkdir(exist_ok=True)
        blob = store / f"{len(os.listdir(store)):032x}"
        path.rename(blob)
        path.symlink_to(os.path.relpath(blob, path.parent))


@pytest.fixture(params=KINDS)
def linked(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint whose files are links, and the store that they lead to."""
    path = tmp_path / "run/step_1"
    KINDS[request.param](path)
    put_into_store(path, tmp_path / "store")
    assert len(os.listdir(tmp_path / "store")) >= 2
    return path


def test_it_is_read(linked: Path, tmp_path: Path) -> None:
    before = content_of(tmp_path / "store")
    for trusted in (False, True):
        target = state_dict(-1.0)
        robust_dcp.load(target, storage_reader=RobustReader(linked, trusted=trusted))
        assert all(bool((each == 1.0).all()) for each in target.values())
    if not list(linked.glob("*.safetensors")):
        dcp.load(target := state_dict(-1.0), checkpoint_id=linked, no_dist=True)
        assert all(bool((each == 1.0).all()) for each in target.values())
    for command in (["verify", linked], ["inspect", linked], ["diff", linked, linked], ["ls", linked.parent]):
        ended = shell(*command)
        assert ended.code == 0, (command, ended)
    copy_checkpoint(linked, tmp_path / "copied")
    shutil.rmtree(tmp_path / "run")
    assert loaded(tmp_path / "copied") == 1.0 and not any(each.is_symlink() for each in (tmp_path / "copied").iterdir())
    assert content_of(tmp_path / "store") == before


def test_a_copy_has_all_that_its_readers_look_for_and_says_what_it_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    KINDS["Megatron"](tmp_path / "source")
    before = files_of(tmp_path / "source")
    put_into_store(tmp_path / "source", tmp_path / "store")
    copy_checkpoint(tmp_path / "source", tmp_path / "target")
    assert files_of(tmp_path / "target") == before - {"note", "empty"}
    assert "2 links are not copied, as no reader of a checkpoint asks for their names: empty, note" in caplog.text


Act = Callable[[Path], object]
CHANGES: dict[str, Act] = {
    "save over": lambda path: robust_dcp.save(state_dict(2.0), checkpoint_id=path),
    "stock's save over": lambda path: dcp.save(
        state_dict(2.0), storage_writer=RobustWriter(path), planner=robust_dcp.RobustPlanner(), no_dist=True
    ),
    "retention": lambda path: [CheckpointManager(path.parent, keep_last=1).save(n, state_dict(2.0)) for n in (2, 3)],
    "prune": lambda path: [
        robust_dcp.save(state_dict(2.0), checkpoint_id=path.parent / "step_2"),
        shell("prune", path.parent, "--keep-last", "1", "--yes"),
    ],
    "convert": lambda path: convert(path, path.parent / "converted", form="safetensors"),
    "convert to it": lambda path: convert(path, path, form="dcp", overwrite=True),
    "copy to it": lambda path: [
        robust_dcp.save(state_dict(2.0), checkpoint_id=path.parent / "other"),
        copy_checkpoint(path.parent / "other", path),
    ],
    "drain": lambda path: [
        robust_dcp.save(state_dict(2.0), storage_writer=RobustWriter(path, drain_to=path.parent / "far")),
        robust_dcp.finish_async_saves(),
    ],
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_written_or_removed_through_one(change: str, tmp_path: Path) -> None:
    for number, kind in enumerate(KINDS):
        path, store = tmp_path / f"{number}/run/step_1", tmp_path / f"{number}/store"
        KINDS[kind](path)
        put_into_store(path, store)
        before = content_of(store)
        try:
            CHANGES[change](path)
        except (RobustCheckpointError, dcp.api.CheckpointException):
            assert change in ("copy to it", "save over", "stock's save over", "drain", "convert to it"), kind
        assert content_of(store) == before, kind
        if path.exists():
            assert loaded(path) in (1.0, 2.0), kind


def test_what_leads_to_no_regular_file_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    robust_dcp.save(state_dict(), checkpoint_id=tmp_path / "whole")
    for name in (".metadata", ".robust_dcp.index", *(each.name for each in (tmp_path / "whole").glob("*.distcp"))):
        for target in ("/dev/zero", "/", "/nowhere/at/all", name, "../fifo"):
            path = tmp_path / "damaged"
            shutil.copytree(tmp_path / "whole", path)
            (path / name).unlink()
            (path / name).symlink_to(target)
            verdict = verdict_of(loaded, path)
            is_done_without = name == ".robust_dcp.index" and verdict.value == 1.0
            is_named = verdict.type_name in ("StorageError", "CorruptCheckpoint") and str(path) in verdict.message
            assert is_done_without or is_named, (name, target, verdict)
            shutil.rmtree(path)


def test_a_copy_writes_through_no_link_to_a_directory(tmp_path: Path) -> None:
    KINDS["Megatron"](tmp_path / "source")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "target/modelopt_state").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RobustCheckpointError, match="lies behind a symbolic link to another directory"):
        copy_checkpoint(tmp_path / "source", tmp_path / "target")
    assert os.listdir(tmp_path / "elsewhere") == []
