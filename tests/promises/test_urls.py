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
from robust_dcp import RobustReader, RobustWriter

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
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", [robust_dcp.save, robust_dcp.load])
def test_a_url_of_an_unknown_kind_is_refused_before_anything_is_made(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROBUST_DCP_STAGING", str(tmp_path))
    with pytest.raises(ValueError, match="'x://y' is a URL that cannot be used: Protocol not known: x"):
        call(state_dict(), checkpoint_id="x://y")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["file://{path}", "FILE://{path}/", "file://localhost{path}", "file:///{path}"])
def test_a_file_url_means_the_path(kind: str, tmp_path: Path) -> None:
    robust_dcp.save(state_dict(), checkpoint_id=kind.format(path=tmp_path / "checkpoint"))
    found = {"w": torch.zeros(3)}
    robust_dcp.load(found, checkpoint_id=kind.format(path=tmp_path / "checkpoint"))
    assert found["w"].tolist() == [1.0] * 3
    assert (tmp_path / "checkpoint/.metadata").exists()


@pytest.mark.parametrize("url", ["file://host/x", "file://runs/step_1", "file://.", "FILE://host"])
@pytest.mark.parametrize(
    "call",
    [
        lambda url: robust_dcp.save(state_dict(), checkpoint_id=url),
        lambda url: robust_dcp.async_save(state_dict(), checkpoint_id=url),
        lambda url: robust_dcp.load(state_dict(), checkpoint_id=url),
        lambda url: robust_dcp.copy_checkpoint("checkpoint", url),
        lambda url: RobustWriter("checkpoint", drain_to=url),
    ],
)
def test_a_file_of_another_machine_is_refused(
    url: str, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="of this machine only: write file:///"):
        call(url)
    assert os.listdir(tmp_path) == []
    assert not RobustReader.validate_checkpoint_id(url)


@pytest.mark.parametrize("name", ["a:b", "x:/y", "step=1/loss:0.3", "runs/s3://x", "c:", "://x", "1s://x", "s3:"])
@pytest.mark.parametrize("kind", [str, Path])
def test_odd_names_of_directories_stay_possible(
    name: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    robust_dcp.save(state_dict(), checkpoint_id=kind(name))
    found = {"w": torch.zeros(3)}
    robust_dcp.load(found, checkpoint_id=kind(name))
    assert found["w"].tolist() == [1.0] * 3
    assert Path(name, ".metadata").exists()


@pytest.mark.parametrize("storage", [RobustWriter, RobustReader])
def test_callers_that_ask_beforehand_are_told_the_same(storage: Any, tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path), "checkpoint", Path("checkpoint"), "a:b", "x:/y"):
        assert storage.validate_checkpoint_id(path)
    for url in URLS:
        assert not RobustWriter.validate_checkpoint_id(url)
    assert RobustReader.validate_checkpoint_id("memory://a/b")
    assert not RobustReader.validate_checkpoint_id("x://y")
