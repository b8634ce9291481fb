"""A run in a bucket: a manager, ``ls``, ``prune`` and ``verify`` do there what they do in a directory."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

import robust_dcp
from robust_dcp import CheckpointManager, RobustWriter, StorageError
from robust_dcp.manager import series
from robust_dcp.storage.remote import Calls, RemoteDisk
from tests.cli.commands import shell
from tests.drain.test_stores import BUCKET, FaultyStore, running_store
from tests.harness.ranks import run_ranks, values


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyStore]:
    with running_store() as store:
        yield store


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a run in a store that holds nothing."""
    monkeypatch.setenv("ROBUST_DCP_STAGING", str(tmp_path / "staging"))
    if getattr(request, "param", "memory") == "memory":
        return f"memory://{tmp_path.name}/run"
    server = request.getfixturevalue("server")
    monkeypatch.setitem(fsspec.config.conf, "s3", server.options)
    return f"s3://{BUCKET}/{tmp_path.name}/run"


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3,), float(value))}


def loaded(root: str) -> tuple[int, float] | None:
    """What a job on a new machine goes on from: the step, and the value."""
    found = state(-1)
    latest = CheckpointManager(root).load_latest(found)
    return None if latest is None else (latest.checkpoint.step, float(found["w"][0]))


def value_at(checkpoint: Any) -> float:
    found = state(-1)
    robust_dcp.load(found, checkpoint_id=checkpoint.path)
    return float(found["w"][0])


def steps(root: str, **options: Any) -> list[int]:
    return [each.step for each in CheckpointManager(root, **options).checkpoints()]


def names(root: str) -> set[str]:
    """The names of the directories in a run, and of the files beside them."""
    filesystem, path = fsspec.url_to_fs(root)
    return {each.rpartition(path.strip("/") + "/")[2].partition("/")[0] for each in filesystem.find(path)}


@pytest.mark.parametrize("root", ["memory", "s3"], indirect=True)
def test_a_run_in_a_store_is_kept_found_and_removed_as_in_a_directory(root: str, tmp_path: Path) -> None:
    assert loaded(root) is None
    manager = CheckpointManager(root, keep_last=1, keep_best="loss")
    for step, loss in ((1, 3.0), (2, 1.0), (4, 2.5)):
        save = manager.async_save if step == 4 else manager.save
        save(step, state(step), metrics={"loss": loss})
    robust_dcp.finish_async_saves()
    assert steps(root) == [2, 4] and loaded(root) == (4, 4.0) and manager.latest() == manager.checkpoints()[-1]
    writer = RobustWriter(tmp_path / "unused", overwrite=False)
    with pytest.raises(StorageError, match="step_4 and overwrite=False"):
        manager.save(4, state(9), storage_writer=writer)
    assert not list((tmp_path / "staging").iterdir())
    filesystem, path = fsspec.url_to_fs(root)
    with filesystem.open(f"{path}/latest", "wb") as file:
        file.write(b"step_2")  # by hand: the job goes back
    assert loaded(root) == (2, 2.0)
    manager = CheckpointManager(root, keep_last=1)
    for value in (44, 45):
        manager.async_save(4, state(value))  # each takes the place of what is there by then
    robust_dcp.finish_async_saves()
    assert loaded(root) == (4, 45.0) and names(root) == {"step_4", "latest"}


def test_nothing_goes_in_a_store_that_does_not_carry_the_mark_of_the_series(root: str) -> None:
    manager, filesystem = CheckpointManager(root, keep_last=1), fsspec.url_to_fs(root)[0]
    manager.save(1, state(1))
    path = fsspec.url_to_fs(root)[1]
    ema = CheckpointManager(root, name="ema_{step}")
    ema.save(5, state(5))
    robust_dcp.save(state(7), checkpoint_id=f"{root}/step_7")  # by no manager
    for name in filesystem.find(f"{path}/ema_5"):  # somebody puts a checkpoint of another series under this name
        filesystem.copy(name, name.replace("ema_5", "step_0"))
    for name in ("step_1/notes.txt", "step_3/weights.bin", "notes.txt"):
        with filesystem.open(f"{path}/{name}", "wb") as file:
            file.write(b"mine")
    for step in (8, 9):
        manager.save(step, state(step))
    assert steps(root) == [0, 7, 9] and loaded(root) == (9, 9.0)
    found = {each.rpartition(path.strip("/") + "/")[2] for each in filesystem.find(path)}
    assert {"step_1/notes.txt", "step_3/weights.bin", "notes.txt"} <= found
    assert {each for each in found if each.startswith("step_1/")} == {"step_1/notes.txt"}
    with pytest.raises(StorageError, match="there is another checkpoint"):
        manager.save(0, state(0))  # of another series
    ended = shell("prune", root, "--keep-last", 1, "--name", "step_{step}", "--yes")
    assert ended.code == 0 and steps(root) == [0, 7, 9] and "this series has not saved it" in ended.out


def test_commands_take_the_url_of_a_run(root: str) -> None:
    manager = CheckpointManager(root)
    for step in (1, 2, 3):
        manager.save(step, state(step), metrics={"loss": step / 10})
    filesystem, path = fsspec.url_to_fs(root)
    metadata = filesystem.cat_file(f"{path}/step_2/.metadata")
    filesystem.pipe_file(f"{path}/step_2/.metadata", metadata[:100])
    rows = shell("ls", root).rows
    expected = ["committed", "damaged: .metadata is cut off", "committed, latest"]
    assert [row[4] for row in rows] == expected and [row[5] for row in rows] == ["0.1", "", "0.3"]
    ended = shell("verify", root)
    assert ended.code == 1 and "3 checkpoints: 1 broken" in ended.err
    filesystem.pipe_file(f"{path}/step_2/.metadata", metadata)
    assert shell("verify", root, "--fast").code == 0
    assert shell("prune", root, "--keep-last", 1, "--yes").code == 0 and steps(root) == [3]
    for command in ("ls", "verify", "prune"):
        ended = shell(command, f"{root}_of_nobody", *(["--keep-last", 1] if command == "prune" else []))
        assert ended.code == 2 and "_of_nobody" in ended.err, ended


def test_the_copies_of_a_drain_have_a_policy_and_a_latest_of_their_own(root: str, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", keep_last=1, drain_to=root, drain_keep_last=2)
    for step in (1, 2, 3, 4):
        manager.save(step, state(step))
        robust_dcp.finish_async_saves()
    assert steps(root) == [3, 4] and loaded(root) == (4, 4.0) and "latest" in names(root)
    assert [each.step for each in manager.checkpoints()][-1:] == [4]
    with pytest.raises(ValueError, match="drain_keep_last is about the copies"):
        CheckpointManager(tmp_path / "run", drain_keep_last=2)
    with pytest.raises(ValueError, match="is in a store already"):
        CheckpointManager(root, drain_to=tmp_path / "elsewhere")


KEPT = {".metadata", *(f".robust_dcp.{name}" for name in ("index", "step.json", "report.json"))}
"""The files of a checkpoint beside its data."""


class _Killed(PermissionError):
    """Is not tried again."""


def changes_until(number: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From the change of the store with this number on no change is made, as if the process had been killed."""
    changes: list[str] = []
    for name in ("pipe_file", "rm_file"):
        real = getattr(MemoryFileSystem, name)

        def change(self: Any, path: str, *args: Any, real: Any = real, **more: Any) -> Any:
            changes.append(path)
            if len(changes) >= number:
                raise _Killed(path)
            return real(self, path, *args, **more)

        monkeypatch.setattr(MemoryFileSystem, name, change)
    return changes


def test_a_job_that_is_killed_at_any_change_of_the_store_goes_on_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a save of a new step, in one that takes the place of a step, and in the removals that follow. The times of the
    store are whole seconds, as those of S3 are."""
    in_full = RemoteDisk.modified_seconds
    monkeypatch.setattr(RemoteDisk, "modified_seconds", lambda self, path: float(int(in_full(self, path))))
    monkeypatch.setattr(series, "_OVER_AFTER_SECONDS", -1.0)  # what was begun in this second is over, too
    monkeypatch.setattr(Calls, "_within_limit", lambda self, call: call())  # 10,000 calls, none of which can hang
    begun = f"memory://{tmp_path.name}/begun"
    manager = CheckpointManager(begun)
    manager.save(3, state(3), metrics={"loss": 3})
    robust_dcp.save(state(0), checkpoint_id=f"{begun}/step_0")  # by no manager: nobody removes it
    manager.save(2, state(2), metrics={"loss": 2})  # it has gone back
    memory, path = fsspec.url_to_fs(begun)
    files = {name.removeprefix(path): memory.cat_file(name) for name in sorted(memory.find(path), reverse=True)}
    for step in (3, 4):
        outcomes = set()
        for number in itertools.count(1, step - 2):  # of a new step each second
            root = f"memory://{tmp_path.name}/{step}/{number}"
            monkeypatch.setenv("ROBUST_DCP_STAGING", str(tmp_path / f"staging_{step}_{number}"))
            for name, content in files.items():  # ``latest`` last
                memory.pipe_file(fsspec.url_to_fs(root)[1] + name, content)
            with monkeypatch.context() as patch:
                changes = changes_until(number, patch)
                with contextlib.suppress(StorageError):
                    CheckpointManager(root, keep_last=1).save(step, state(33), metrics={"loss": 33})
            outcomes.add(loaded(root))
            there = {each.step: each for each in CheckpointManager(root).checkpoints()}
            is_committed = step in there and value_at(there[step]) == 33.0
            assert loaded(root) == ((step, 33.0) if is_committed else (2, 2.0)), (step, number)
            for each in there.values():
                loss = {0: {}, 2: {"loss": 2.0}}.get(each.step)
                assert each.metrics == (loss if each.step < 3 else {"loss": value_at(each)}), (step, number, each)
            CheckpointManager(root, keep_last=1, keep_every=step).save(5, state(5))
            assert loaded(root) == (5, 5.0)
            left = memory.find(f"{fsspec.url_to_fs(root)[1]}/step_{step}")
            if left:  # it is kept, and nothing that belongs to another save
                beside = {os.path.basename(each) for each in left if os.path.basename(each).startswith(".")}
                assert len(left) - len(beside) == 1 and ".metadata" in beside <= KEPT, (step, number, left)
            CheckpointManager(root, keep_last=1).prune()
            assert steps(root) == [0, 5] and names(root) == {"latest", "step_0", "step_5"}, (step, number, names(root))
            if number > len(changes):
                break
        assert outcomes == {(2, 2.0), (step, 33.0)} and 30 > number > 15, (step, outcomes, number)


@pytest.mark.parametrize("root", ["s3"], indirect=True)
def test_of_two_saves_that_take_the_place_of_one_at_the_same_moment_one_is_refused(
    root: str, server: FaultyStore
) -> None:
    CheckpointManager(root).save(1, state(1))
    is_there, goes_on = threading.Event(), threading.Event()

    def hold_the_first(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("step_1/.metadata?") and not is_there.is_set():
            is_there.set()
            assert goes_on.wait(300)

    server.fault = hold_the_first
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(CheckpointManager(root).save, 1, state(2))
        assert is_there.wait(300)
        try:
            CheckpointManager(root).save(1, state(3))
        finally:
            goes_on.set()
        with pytest.raises(StorageError, match="there is another checkpoint at"):
            first.result()
    server.clear()
    assert loaded(root) == (1, 3.0)


def save_and_load(root: str, staging: str) -> tuple[list[int], int, list[float], list[str]]:
    rank = dist.get_rank()
    os.environ["ROBUST_DCP_STAGING"] = f"{staging}/{rank}"
    manager = CheckpointManager(root, keep_last=1)
    for step in (1, 2):
        manager.save(step, {**state(step), f"of_{rank}": torch.full((2,), float(rank))})
    found = {**state(-1), f"of_{rank}": torch.zeros(2)}
    latest = manager.load_latest(found)
    assert latest is not None
    values_of = [float(each[0]) for each in found.values()]
    return (
        [each.step for each in manager.checkpoints()],
        latest.checkpoint.step,
        values_of,
        os.listdir(f"{staging}/{rank}"),
    )


def test_ranks_stage_on_the_drives_of_their_nodes(
    server: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ACCESS_KEY_ID", "t"), ("SECRET_ACCESS_KEY", "t"), ("ENDPOINT_URL", server.endpoint)):
        monkeypatch.setenv(f"AWS_{name}", value)
    outcome = values(run_ranks(2, save_and_load, f"s3://{BUCKET}/{tmp_path.name}", str(tmp_path)))
    assert outcome == [([2], 2, [2.0, float(rank)], []) for rank in range(2)]
    assert {each.name for each in tmp_path.iterdir()} >= {"0", "1"}


def test_the_first_words_say_that_a_bucket_is_not_there_or_may_not_be_used(
    server: FaultyStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", server.options)
    monkeypatch.setenv("ROBUST_DCP_STAGING", str(tmp_path / "staging"))
    with pytest.raises(StorageError, match=r"^s3://nobody does not exist"):
        CheckpointManager("s3://nobody/run").load_latest(state(0))  # a run that begins does not train until it saves
    more: dict[str, list[object]] = {
        "ls": [],
        "prune": ["--keep-last", 1],
        "verify": [],
        "inspect": [],
        "copy": [tmp_path / "copy"],
    }
    for command, words in more.items():
        ended = shell(command, "s3://nobody/run", *words)
        assert ended.code == 2 and "s3://nobody does not exist" in ended.err, ended
    for call in (
        lambda url: robust_dcp.load(state(0), checkpoint_id=url),
        lambda url: robust_dcp.copy_checkpoint(url, tmp_path / "copy"),
        lambda url: CheckpointManager(os.path.dirname(url)).checkpoints(),
        lambda url: CheckpointManager(os.path.dirname(url)).save(1, state(1)),
    ):
        with pytest.raises(StorageError, match=r"^s3://nobody does not exist"):
            call("s3://nobody/run/step_1")
        server.fault = lambda method, path: "403"
        with pytest.raises(StorageError, match=r"^(look at|list) s3://bucket/run.*check the credentials"):
            call(f"s3://{BUCKET}/run/step_1")
        server.clear()
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        nobody = {name: value for name, value in server.options.items() if name not in ("key", "secret")}
        with monkeypatch.context() as patch:
            patch.setitem(fsspec.config.conf, "s3", nobody)
            with pytest.raises(StorageError, match=r"Unable to locate credentials.*check the credentials"):
                call(f"s3://{BUCKET}/run/step_1")
