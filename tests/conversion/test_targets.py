"""A target is made by one call at a time, and a call that fails leaves what was there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import robust_dcp
from robust_dcp import RobustReader
from robust_dcp.conversion.convert import convert
from robust_dcp.errors import StorageError

STATE = {"a": torch.arange(100.0), "b": torch.ones(7, 5), "c": torch.zeros(3, dtype=torch.int64)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    robust_dcp.save(dict(STATE), checkpoint_id=tmp_path / "source")
    return tmp_path / "source"


def test_a_converted_checkpoint_names_the_place_where_it_ends(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "target", form="dcp")
    meta = RobustReader(tmp_path / "target").read_metadata().storage_meta
    assert meta is not None and meta.checkpoint_id == str(tmp_path / "target")


def test_of_many_calls_at_once_one_makes_the_target_and_the_others_say_so(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"

    def call(_: int) -> str:
        try:
            convert(source, target, form="torch", overwrite=True)
        except StorageError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(6) as pool:
        said = list(pool.map(call, range(60)))
    assert "" in said
    assert all("another call makes" in each for each in said if each)
    found = torch.load(target)
    assert found.keys() == STATE.keys() and all(torch.equal(found[name], STATE[name]) for name in STATE)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}
