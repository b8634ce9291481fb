"""save, load and RobustReader take URLs. Whatever takes directories only says so before it makes any."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import RobustCheckpointError, RobustReader, RobustWriter

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
