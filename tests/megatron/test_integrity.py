"""Megatron's manifest of file hashes: what is written, what stock finds in it, and what each rank is told of damage."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

import torch.distributed as dist

from robust_dcp import CorruptCheckpoint, RobustCheckpointError
from robust_dcp.comm import Channel
from robust_dcp.megatron.integrity import MANIFEST_FILE, save_manifest, verify_files
from robust_dcp.megatron.versions import backend_of
from tests.harness.damage import flip_bit
from tests.megatron.torch_dist import Scenarios, failures_of

SCENARIOS = Scenarios()
NOBODYS = "common.pt"
"""The file that no rank has written in this save."""


def on_rank_0(act: Callable[[], object]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def save(directory: Path, of_rank_1: str = "__1_0.distcp") -> None:
    """Hash a directory as it is when two ranks have written a file each, and Megatron its own."""

    def write() -> None:
        (directory / "a_directory").mkdir(parents=True, exist_ok=True)
        (directory / "__0_0.distcp").write_bytes(os.urandom(3 << 20))
        (directory / "__1_0.distcp").write_bytes(b"")
        (directory / NOBODYS).write_bytes(os.urandom(7))
        (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')

    on_rank_0(write)
    names = ["__0_0.distcp" if dist.get_rank() == 0 else of_rank_1]
    save_manifest(Channel.for_group(timeout_seconds=50), "save", str(directory), names)


def verify(directory: Path, group: dist.ProcessGroup | None = None) -> None:
    verify_files(Channel.for_group(group, timeout_seconds=50), "load", str(directory))


@SCENARIOS.add
def the_manifest_names_each_file_with_its_sha256(directory: Path) -> None:
    for _ in range(2):  # the second replaces the first
        save(directory)
    manifest = json.loads((directory / MANIFEST_FILE).read_bytes())
    files = sorted(path for path in directory.iterdir() if path.is_file() and path.name != MANIFEST_FILE)
    assert manifest["algorithm"] == "sha256"
    assert manifest["files"] == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    rank_0_alone = dist.new_group([0])  # a job of another size may verify it
    if dist.get_rank() == 0:
        verify(directory, rank_0_alone)


@SCENARIOS.add
def a_file_that_a_rank_cannot_hash_fails_all_ranks_and_leaves_no_manifest(directory: Path) -> None:
    error, ((rank, message),) = failures_of(lambda: save(directory, "is_not_there"))
    assert rank == 1 and "is_not_there" in message and "hash files" in str(error)
    assert not (directory / MANIFEST_FILE).exists()


def name_a_file_outside(path: Path) -> None:
    manifest = json.loads(path.read_bytes())
    manifest["files"]["../elsewhere"] = "0" * 64
    path.write_text(json.dumps(manifest))


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("__0_0.distcp", lambda path: flip_bit(path, 1 << 20), ".distcp: expected"),
    (NOBODYS, Path.unlink, f"{NOBODYS}: No such file"),
    (NOBODYS, lambda path: (path.unlink(), os.mkfifo(path)), f"{NOBODYS}: no regular file"),
    (MANIFEST_FILE, Path.unlink, "only a checkpoint that was saved with --verify-integrity can be verified"),
    (MANIFEST_FILE, lambda path: path.write_text("{"), "is not a manifest of files"),
    (MANIFEST_FILE, lambda path: path.write_text('{"x":' * 100_000), "is not a manifest of files"),
    (MANIFEST_FILE, lambda path: path.write_text('{"files": {}, "algorithm": "md5"}'), "holds hashes of 'md5'"),
    (MANIFEST_FILE, name_a_file_outside, "../elsewhere: not a file of this directory"),
    ("metadata.json", Path.unlink, "is not a distributed checkpoint"),
]


@SCENARIOS.add
def all_ranks_are_told_what_is_not_as_it_was_saved(directory: Path) -> None:
    save(directory / "whole")
    for number, (name, damage, told) in enumerate(DAMAGE):
        damaged = directory / str(number)
        on_rank_0(lambda damaged=damaged: shutil.copytree(directory / "whole", damaged))
        on_rank_0(lambda path=damaged / name, damage=damage: damage(path))
        with pytest.raises(RobustCheckpointError) as caught:
            verify(damaged)
        assert told in str(caught.value) and "CheckpointingException" in str(caught.value)


test_on_two_ranks = SCENARIOS.test()


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"x":' * 100_000, b"[" * 100_000, b"\xff", b"[1]", b'{"of": "another"}']
)
def test_a_config_that_megatron_did_not_write_is_an_error_that_names_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_bytes(content)
    with pytest.raises(
        CorruptCheckpoint, match=r"metadata\.json cannot be used: expected a JSON object with the field"
    ):
        backend_of(str(tmp_path))
