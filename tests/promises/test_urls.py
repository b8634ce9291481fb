"""save, load and RobustReader take URLs. Whatever takes directories only says so before it makes any."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustCheckpointError, RobustReader, RobustWriter, StorageError
from robust_dcp.drain.drain import staging_directory

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


@pytest.mark.parametrize("is_set", [False, True], ids=["the directory for temporary files", "ROBUST_DCP_STAGING"])
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
    ],
)
def test_what_is_staged_is_this_users_alone(
    make: Callable[[Path], None], why: str, is_set: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if make is _of_another_user and os.geteuid():
        pytest.skip("only root can make what is another user's")
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if is_set:
        monkeypatch.setenv("ROBUST_DCP_STAGING", str(tmp_path))
    url, modes = f"memory://{tmp_path.name}/step_1", dict[str, int]()
    staged = Path(staging_directory(url))
    above = [each for each in (staged, *staged.parents) if tmp_path in each.parents]
    make(above[-1])

    def look(event: Any) -> None:
        modes.update((each.name, each.stat().st_mode & 0o7777) for each in above if each.exists())

    umask = os.umask(0)
    try:
        with robust_dcp.on_event(look):
            if why:
                with pytest.raises(StorageError, match=f"is not private: {why}.*set ROBUST_DCP_STAGING"):
                    robust_dcp.save(state_dict(), checkpoint_id=url)
                assert not any((tmp_path / "elsewhere").glob("*"))
            else:
                robust_dcp.save(state_dict(), checkpoint_id=url)
                assert modes and set(modes.values()) == {0o700}
    finally:
        os.umask(umask)
