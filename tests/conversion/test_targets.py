"""A target is made by one call at a time, and a call that fails leaves what was there."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import robust_dcp
from robust_dcp import RobustReader
from robust_dcp.conversion.convert import convert
from robust_dcp.errors import StorageError
from robust_dcp.storage.files.posix_disk import PosixDisk
from tests.conversion.kills import STATE, bytes_of, is_new
from tests.support.simulated_disk import WatchedDisk


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
    assert is_new(target)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_whichever_call_fails_there_is_a_whole_target_and_the_next_conversion_works(
    form: Any, source: Path, tmp_path: Path
) -> None:
    robust_dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "older")
    number = 0
    while True:
        place = tmp_path / str(number)
        convert(tmp_path / "older", place / "target", form=form)
        old = bytes_of(place / "target")
        disk: Any = WatchedDisk(PosixDisk(), fail_at=number, code=errno.EIO)
        with suppress(StorageError):
            convert(source, place / "target", form=form, overwrite=True, disk=disk)
        assert bytes_of(place / "target") == old or is_new(place / "target")
        if number >= len(disk.calls):
            break
        convert(source, place / "target", form=form, overwrite=True)
        assert is_new(place / "target")
        assert [path.name for path in place.iterdir()] == ["target"]
        number += 1
    assert number > 15
