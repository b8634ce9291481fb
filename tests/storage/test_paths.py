"""Names of data files, and paths that do not leave the checkpoint's directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.errors import UnsafeCheckpoint
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import (
    check_relative_path,
    data_file_name,
    is_data_file,
    locate,
    shard_file_name,
    writer_of,
)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(["0123456789abcdef", "f" * 16]))
def test_a_name_says_who_wrote_the_file(rank: int, number: int, mark: str) -> None:
    assert writer_of(data_file_name(rank, number, mark)) == (rank, number, mark)
    assert writer_of(shard_file_name(rank, number, number + 1, mark)) == (rank, number, mark)


def test_names_are_those_of_stock_with_the_mark_of_the_save() -> None:
    assert data_file_name(3, 1, "0123456789abcdef") == "__3_1.0123456789abcdef.distcp"
    assert writer_of("__3_1.distcp") == (3, 1, "")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp.tmp", "__0_0.0.distcp", "__a_0.distcp", "common.pt", ""])
def test_other_files_are_not_taken_for_data_files(name: str) -> None:
    assert not is_data_file(name) and writer_of(name) is None


@pytest.mark.parametrize(
    "path",
    [
        "../other/__0_0.distcp",
        "a/../../b",
        "/etc/passwd",
        "C:\\x",
        "..\\x",
        "",
        "a\0b",
        "dir/",
        ".",
        None,
        b"__0_0.distcp",
    ],
)
def test_a_path_out_of_the_directory_is_refused(path: object) -> None:
    with pytest.raises(UnsafeCheckpoint, match=r"\.metadata: relative_path"):
        check_relative_path(path, file=".metadata")


def test_a_link_is_followed_unless_it_is_a_directory(tmp_path: Path) -> None:
    directory, mount = tmp_path / "checkpoint", tmp_path / "mount"
    for each in (directory / "within", mount):
        each.mkdir(parents=True)
    (mount / "blob").write_bytes(b"")
    for link in ("__0_0.distcp", "within/model.safetensors"):
        (directory / link).symlink_to(mount / "blob")
    (directory / "out").symlink_to(mount)
    (directory / "in").symlink_to("within")
    (tmp_path / "link").symlink_to(directory)
    for home in (directory, tmp_path / "link", tmp_path / "link/within/.."):
        for name in ("__0_0.distcp", "./__0_0.distcp", "within/model.safetensors", "within/./model.safetensors"):
            assert locate(Disk(), str(home), name, file=".metadata") == os.path.join(home, name)
        for name in ("out/blob", "in/model.safetensors", "./out/blob"):
            with pytest.raises(UnsafeCheckpoint, match="lies behind a symbolic link to a directory"):
                locate(Disk(), str(home), name, file=".metadata")
