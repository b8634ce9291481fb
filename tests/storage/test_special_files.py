"""What is no regular file is refused at once, and named; nobody waits for a FIFO."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import robust_dcp
from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk
from tests.harness.names import data_file


def _socket(path: str) -> None:
    here = os.getcwd()
    os.chdir(os.path.dirname(path))  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(os.path.basename(path))
    finally:
        os.chdir(here)


SPECIAL: dict[str, Callable[[str], None]] = {"FIFO": os.mkfifo, "directory": os.mkdir, "socket": _socket}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_special_file_in_place_of_a_file_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    robust_dcp.save({"w": torch.ones(3), "v": torch.ones(5)}, checkpoint_id=tmp_path, no_dist=True)
    path = data_file(tmp_path, name)
    path.unlink()
    SPECIAL[kind](str(path))
    with pytest.raises(StorageError) as caught:
        robust_dcp.load({"w": torch.zeros(3), "v": torch.zeros(5)}, checkpoint_id=tmp_path, no_dist=True)
    assert str(path) in str(caught.value)


def test_a_device_is_refused_and_a_regular_file_is_not_left_without_waiting(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="character device"):
        Disk().open_read("/dev/zero")
    (tmp_path / "file").write_bytes(b"x")
    opened = Disk().open_read(str(tmp_path / "file"))
    assert os.get_blocking(opened.fd)
    Disk().close(opened)
