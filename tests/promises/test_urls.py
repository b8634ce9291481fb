"""save, load and RobustReader take URLs. Whatever takes directories only says so before it makes any."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint import DefaultSavePlanner

import robust_dcp
from robust_dcp import RobustCheckpointError, RobustReader, RobustWriter, StorageError
from robust_dcp.drain.delivery import staging_directory
from tests.harness.ranks import run_ranks
from torture import two_savers
from torture.trials import run

URLS: list[Any] = [
    "s3://bucket/step_1",
    "GS://bucket",
    "x://y",
    " hdfs://host/x",
    Path("s3://bucket/step_1"),
    b"az://a/b",
]

StateDict = dict[str, Any]


def state_dict() -> StateDict:
    return {"w": torch.ones(3)}


ENTRY_POINTS: dict[str, Callable[[Any], Any]] = {
    "writer": RobustWriter,
    "writer, reset": lambda url: RobustWriter("here").reset(url),
    "stock save": lambda url: dcp.save(state_dict(), checkpoint_id=url, storage_writer=RobustWriter("here")),
}


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_a_url_is_refused_where_only_a_directory_will_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in URLS:
        with pytest.raises(
            ValueError, match=r"is a URL .*mounted file systems only: robust_dcp\.save and load take it"
        ):
            ENTRY_POINTS[name](url)
        assert not RobustWriter.validate_checkpoint_id(url)  # as callers ask beforehand
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", [robust_dcp.save, robust_dcp.load])
def test_a_url_of_an_unknown_kind_is_refused_before_anything_is_made(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROBUST_DCP_STAGING", str(tmp_path))
    with pytest.raises(ValueError, match="'x://y' is a URL that cannot be used: Protocol not known: x"):
        call(state_dict(), checkpoint_id="x://y")
    with pytest.raises(RobustCheckpointError, match="Protocol not known: x"):
        robust_dcp.save(state_dict(), storage_writer=RobustWriter(tmp_path / "here", drain_to="x://y"))
    assert not RobustReader.validate_checkpoint_id("x://y") and RobustReader.validate_checkpoint_id("memory://a/b")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", [robust_dcp.save, robust_dcp.async_save])
def test_a_save_to_a_url_that_is_to_be_copied_elsewhere_too_is_refused_before_anything_is_made(
    call: Any, tmp_path: Path, staging: Path
) -> None:
    writer = RobustWriter(tmp_path / "not used", drain_to=tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"RobustWriter\(drain_to='/.*/elsewhere'\) is for saves to a directory"):
        call(state_dict(), checkpoint_id=f"memory://{tmp_path.name}/step_1", storage_writer=writer)
    assert os.listdir(tmp_path) == []
    call(state_dict(), checkpoint_id=tmp_path / "step_1", storage_writer=writer)
    robust_dcp.finish_async_saves()
    assert loaded(tmp_path / "elsewhere") == loaded(tmp_path / "step_1") == 1.0


def test_a_writer_that_has_saved_to_a_url_keeps_its_own_place(tmp_path: Path, staging: Path) -> None:
    writer, url = RobustWriter(tmp_path / "own"), f"memory://{tmp_path.name}/step_1"
    planner = DefaultSavePlanner()
    robust_dcp.save(state_dict(), checkpoint_id=url, storage_writer=writer, planner=planner)
    assert planner.metadata.state_dict_metadata.keys() == {"w"}  # read there
    assert writer.path == str(tmp_path / "own") and sorted(os.listdir(tmp_path)) == ["staging"]
    robust_dcp.save(state_dict(), storage_writer=writer)
    assert loaded(writer.path) == loaded(url) == 1.0


PLACES = [
    *("file://{path}", "FILE://{path}/", "file://localhost{path}", "file:///{path}"),
    *("a:b", "x:/y", "step=1/loss:0.3", "runs/s3://x", "c:", "://x", "1s://x", "s3:", "new/../x", "x/../y/."),
]


@pytest.mark.parametrize("place", PLACES)
def test_a_file_url_means_the_path_and_odd_names_of_directories_stay_possible(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = Path("checkpoint") if "{path}" in place else Path(place)
    place = place.format(path=tmp_path / "checkpoint")
    for checkpoint_id in (place, directory):
        assert all(storage.validate_checkpoint_id(directory) for storage in (RobustWriter, RobustReader))
        robust_dcp.save(state_dict(), checkpoint_id=checkpoint_id)
        found = {"w": torch.zeros(3)}
        robust_dcp.load(found, checkpoint_id=checkpoint_id)
        assert found["w"].tolist() == [1.0] * 3
        assert Path(directory, ".metadata").exists()
        made = {directory.parts[0], os.path.normpath(directory).partition("/")[0]}
        assert set(os.listdir(tmp_path)) == made  # `mkdir -p new/../x` makes both


@pytest.mark.parametrize("url", ["file://host/x", "file://runs/step_1", "file://.", "FILE://host"])
def test_a_file_of_another_machine_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: robust_dcp.save(state_dict(), checkpoint_id=url),
        lambda: robust_dcp.async_save(state_dict(), checkpoint_id=url),
        lambda: robust_dcp.load(state_dict(), checkpoint_id=url),
        lambda: robust_dcp.copy_checkpoint("checkpoint", url),
        lambda: RobustWriter("checkpoint", drain_to=url),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="of this machine only: write file:///"):
            call()
    assert os.listdir(tmp_path) == []
    assert not RobustReader.validate_checkpoint_id(url)


OTHER_USER = 65534


def _of_another_user(path: Path) -> None:
    path.mkdir()
    os.chown(path, OTHER_USER, OTHER_USER)


def _with_mode(mode: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        path.chmod(mode)

    return make


def _link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_of_another_user, f"it belongs to user {OTHER_USER}"),
        (_link, "it is a link, or no directory"),
        (Path.touch, "it is a link, or no directory"),
        (_with_mode(0o777), r"others may write to it \(mode 777\)"),
        (_with_mode(0o1777), r"others may write to it \(mode 1777\)"),
        (_with_mode(0o770), r"others may write to it \(mode 770\)"),
        (_with_mode(0o755), ""),
        (_with_mode(0o700), ""),
        (lambda path: None, ""),
        (None, ""),  # ROBUST_DCP_STAGING is the user's own, and may be shared: each save's directory is private
    ],
)
def test_what_is_staged_is_this_users_alone(
    make: Callable[[Path], None] | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if make is _of_another_user and os.geteuid():
        pytest.skip("only root can make what is another user's")
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url, modes = f"memory://{tmp_path.name}/step_1", dict[str, int]()
    if make is None:
        monkeypatch.setenv("ROBUST_DCP_STAGING", str(tmp_path))
    else:
        make(Path(staging_directory(url, 0)).parent)

    def look(event: Any) -> None:
        paths = [each for each in tmp_path.rglob("robust_dcp-*") if each.is_dir()]
        modes.update((each.name, each.stat().st_mode & 0o7777) for each in paths)

    umask = os.umask(0)
    try:
        with robust_dcp.on_event(look):
            if why:
                with pytest.raises(StorageError, match=f"is not private: {why}.*set ROBUST_DCP_STAGING"):
                    robust_dcp.save(state_dict(), checkpoint_id=url)
                assert not any((tmp_path / "elsewhere").glob("*"))
            else:
                robust_dcp.save(state_dict(), checkpoint_id=url)
                assert len(modes) == (1 if make is None else 2) and set(modes.values()) == {0o700}
    finally:
        os.umask(umask)


# Two jobs save to one URL: a zombie, and the job that was started in its place.


def save_to(url: str, value: float) -> Any:
    return robust_dcp.save({"w": torch.full((3,), value)}, checkpoint_id=url)


def loaded(place: Any) -> float:
    found = {"w": torch.zeros(3)}
    robust_dcp.load(found, checkpoint_id=place)
    return float(found["w"][0])


def at_phase(phase: str, call: Callable[[], object]) -> Any:
    """Call once, when a save begins the phase."""
    calls = [call]

    def listen(event: Any) -> None:
        if (event.name, event.phase) == ("phase_started", phase) and calls:
            calls.pop()()

    return robust_dcp.on_event(listen)


def _save_until_killed(url: str, phase: str) -> None:
    with at_phase(phase, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        save_to(url, 2.0)


@pytest.fixture
def staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROBUST_DCP_STAGING", str(tmp_path / "staging"))
    return tmp_path / "staging"


@pytest.mark.parametrize("phase", ["commit", "drain"])
def test_a_save_to_a_url_arrives_whoever_is_killed_meanwhile_in_a_save_to_the_same_url(
    phase: str, tmp_path: Path, staging: Path
) -> None:
    url = f"memory://{tmp_path.name}/step_1"
    with at_phase("drain", lambda: run_ranks(1, _save_until_killed, url, phase, init=False)):
        save_to(url, 1.0)
    assert loaded(url) == 1.0
    left = list(staging.iterdir())
    if phase == "commit":  # what was not committed is nobody's checkpoint
        assert left == []
    else:
        assert [loaded(each) for each in left] == [2.0]


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
def test_a_save_to_a_url_at_which_another_has_arrived_says_whose_is_there_and_where_its_own_is(
    is_async: bool, tmp_path: Path, staging: Path
) -> None:
    url, told = f"memory://{tmp_path.name}/step_1", list[None]()

    def save_first() -> None:
        if is_async:
            robust_dcp.async_save({"w": torch.ones(3)}, checkpoint_id=url, on_commit=lambda: told.append(None)).result()
        else:
            robust_dcp.save({"w": torch.ones(3)}, checkpoint_id=url, on_commit=lambda: told.append(None))

    save_to(str(tmp_path / "other"), 2.0)
    copy = partial(robust_dcp.copy_checkpoint, tmp_path / "other", url)
    with at_phase("drain", copy), pytest.raises(StorageError) as error:
        save_first()
    (left,) = staging.iterdir()
    (there,) = [each for each in _names_at(url) if each.endswith(".distcp")]
    assert f"is committed in {left}, but it has not arrived at {url}: " in error.value.message
    assert f"there is another checkpoint at {url}, of the save {there.split('.')[-2]}" in error.value.message
    assert (loaded(url), loaded(left), told) == (2.0, 1.0, [])


def test_of_two_saves_to_a_url_that_commit_at_the_same_moment_one_is_refused(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one has looked and found nothing there. Then the other one commits and returns."""
    url, writes = f"memory://{tmp_path.name}/step_1", MemoryFileSystem.pipe_file
    is_there, goes_on, puts = threading.Event(), threading.Event(), list[str]()

    @functools.wraps(writes)
    def pipe_file(self: Any, path: str, *data: Any, **more: Any) -> None:
        if path.endswith("/.metadata") and not puts:
            puts.append(path)
            is_there.set()
            assert goes_on.wait(300)
        writes(self, path, *data, **more)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(save_to, url, 1.0)
        assert is_there.wait(300)
        try:
            save_to(url, 2.0)
        finally:
            goes_on.set()
        with pytest.raises(StorageError, match=f"it has not arrived at {url}: there is another checkpoint at"):
            first.result()
    assert loaded(url) == 2.0 and [loaded(each) for each in staging.iterdir()] == [1.0]


def test_of_two_jobs_that_save_to_one_place_and_may_be_killed_each_that_returns_has_its_checkpoint_there() -> None:
    """A short form of the campaign: directory, S3 and memory."""
    results = run(two_savers.make_trials(9, seed=7))
    assert [result.complaints for _, result in results if result.complaints] == []


def _names_at(url: str) -> list[str]:
    filesystem, path = fsspec.url_to_fs(url)
    return sorted(os.path.basename(each) for each in filesystem.find(path))


@pytest.mark.parametrize("layout", ["torch", "safetensors"])
def test_what_a_copy_that_has_failed_has_sent_gives_way_and_what_it_has_staged_stays(
    layout: Any, tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, works = f"memory://{tmp_path.name}/step_1", MemoryFileSystem.pipe_file

    def refused(self: Any, path: str, *data: Any, **more: Any) -> None:
        if path.endswith(".metadata"):
            raise PermissionError
        works(self, path, *data, **more)

    def save(value: float) -> None:
        writer = RobustWriter("not used", layout=layout)
        robust_dcp.save({"w": torch.full((3,), value)}, checkpoint_id=url, storage_writer=writer)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refused)
    with pytest.raises(StorageError, match=f"is committed in {staging}/.*, but it has not arrived at {url}"):
        save(1.0)
    monkeypatch.undo()
    monkeypatch.setenv("ROBUST_DCP_STAGING", str(staging))
    (left,) = staging.iterdir()
    save(2.0)
    assert len([each for each in _names_at(url) if each.endswith((".distcp", ".safetensors"))]) == 1
    assert not [each for each in _names_at(url) if "copying" in each]
    assert (loaded(url), loaded(left), list(staging.iterdir())) == (2.0, 1.0, [left])


@pytest.mark.parametrize("place", ["{path}/step_1", "memory://{name}/step_1"])
@pytest.mark.parametrize("kind", [KeyError, StorageError, SystemExit])
def test_a_failed_on_commit_says_that_the_checkpoint_is_committed_and_where(
    place: str, kind: type[BaseException], tmp_path: Path, staging: Path
) -> None:
    place = place.format(path=tmp_path, name=tmp_path.name)

    def fail() -> None:
        raise kind("no such name")

    def save() -> None:
        if kind is SystemExit:
            robust_dcp.async_save(state_dict(), checkpoint_id=place, on_commit=fail).result()
        else:
            robust_dcp.save(state_dict(), checkpoint_id=place, on_commit=fail)

    with pytest.raises(RobustCheckpointError, match=f"checkpoint {place} is committed, but on_commit has failed: .*no"):
        save()
    assert loaded(place) == 1.0 and not any(staging.glob("*"))
