"""What commands say where they may not read or write, and of options and roots that hold nothing to do."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.cli.commands import Shell


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Paths that this user may not use. Root may use all of them, and tests may run as root."""
    paths: set[str] = set()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in paths and access(path, mode))
    return paths


def test_what_may_not_be_read_is_told_with_what_to_check(
    originals: Path, tmp_path: Path, denied: set[str], shell: Shell
) -> None:
    denied |= {str(originals / "ours"), str(tmp_path)}
    for words in (("inspect", originals / "ours"), ("ls", tmp_path), ("prune", tmp_path, "--keep-last", 1)):
        ended = shell(*words)
        assert ended.code == 2 and f"{words[1]} cannot be read: check who owns the directory" in ended.err


def test_bench_needs_a_directory_that_it_may_write_to(tmp_path: Path, denied: set[str], shell: Shell) -> None:
    (tmp_path / "file").touch()
    ended = shell("bench", tmp_path / "file/step_1")
    assert ended.code == 2 and f"{tmp_path}/file is not a directory" in ended.err
    denied.add(str(tmp_path))
    ended = shell("bench", tmp_path / "not/yet")
    assert ended.code == 2 and f"{tmp_path} cannot be written to: check who owns it" in ended.err


def test_a_copy_says_how_much_it_has_sent(originals: Path, shell: Shell) -> None:
    ended = shell("copy", originals / "ours", "memory://cli/step_1")
    assert ended.code == 0 and "0 files, 0 B were there already" in ended.out
    again = shell("copy", originals / "ours", "memory://cli/step_1")
    assert again.code == 0 and "Sent 0 files" in again.out


class _Program:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "x")


def test_a_program_in_the_place_of_a_tensor_is_executed_by_no_command(tmp_path: Path, shell: Shell) -> None:
    path, ran = tmp_path / "hostile", tmp_path / "ran"
    dcp.save({"weight": torch.ones(4)}, checkpoint_id=path, no_dist=True)
    record = io.BytesIO()
    torch.save(_Program(str(ran)), record)
    metadata = FileSystemReader(path).read_metadata()
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(record.getvalue())
        (path / info.relative_path).write_bytes(record.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert shell("convert", path, tmp_path / "file.pt", "--to", "torch").code == 2
    assert shell("convert", path, tmp_path / "model", "--to", "safetensors").code == 2
    assert shell("diff", path, path, "--values").code == 2
    assert "a load has to trust weight" in shell("verify", path).err
    assert not ran.exists()
