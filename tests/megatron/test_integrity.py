"""Megatron's manifest of file hashes: what is written, what stock finds in it, and what each rank is told of damage."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

import torch.distributed as dist

from robust_dcp.comm import Channel
from robust_dcp.megatron.integrity import MANIFEST_FILE, save_manifest, verify_files
from tests.harness.damage import flip_bit
from tests.harness.ranks import errors, run_ranks, values

NOBODYS = "common.pt"
"""The file that no rank has written in this save."""


def checkpoint(root: Path) -> Path:
    """A directory as it is when two ranks have written a file each, and Megatron its own."""
    directory = root / "iter_0000001"
    (directory / "a_directory").mkdir(parents=True)
    (directory / "__0_0.distcp").write_bytes(os.urandom(3 << 20))
    (directory / "__1_0.distcp").write_bytes(b"")
    (directory / NOBODYS).write_bytes(b"common")
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return directory


def save(directory: str, of_rank_1: str = "__1_0.distcp") -> None:
    channel = Channel.for_group(timeout_seconds=50)
    names = ["__0_0.distcp" if dist.get_rank() == 0 else of_rank_1]
    save_manifest(channel, "save", directory, names)


def verify(directory: str) -> None:
    verify_files(Channel.for_group(timeout_seconds=50), "load", directory)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = checkpoint(tmp_path)
    values(run_ranks(2, save, str(made)))
    return made


def test_the_manifest_names_each_file_with_its_sha256(directory: Path) -> None:
    manifest = json.loads((directory / MANIFEST_FILE).read_bytes())
    files = sorted(path for path in directory.iterdir() if path.is_file() and path.name != MANIFEST_FILE)
    assert manifest["algorithm"] == "sha256"
    assert manifest["files"] == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (directory / NOBODYS).write_bytes(b"changed")
    values(run_ranks(2, save, str(directory)))  # replaces the manifest
    values(run_ranks(3, verify, str(directory)))


def test_a_file_that_a_rank_cannot_hash_fails_all_ranks_and_leaves_no_manifest(tmp_path: Path) -> None:
    made = checkpoint(tmp_path)
    for message in map(str, errors(run_ranks(2, save, str(made), "is_not_there"))):
        assert "rank 1" in message and "is_not_there" in message and "hash files" in message
    assert not (made / MANIFEST_FILE).exists()


def name_a_file_outside(path: Path) -> None:
    manifest = json.loads(path.read_bytes())
    manifest["files"]["../elsewhere"] = "0" * 64
    path.write_text(json.dumps(manifest))


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("__0_0.distcp", lambda path: flip_bit(path, 1 << 20), ".distcp: expected"),
    (NOBODYS, Path.unlink, f"{NOBODYS}: No such file"),
    (MANIFEST_FILE, Path.unlink, "only a checkpoint that was saved with --verify-integrity can be verified"),
    (MANIFEST_FILE, lambda path: path.write_text("{"), "is not a manifest of files"),
    (MANIFEST_FILE, lambda path: path.write_text('{"files": {}, "algorithm": "md5"}'), "holds hashes of 'md5'"),
    (MANIFEST_FILE, name_a_file_outside, "../elsewhere: not a file of this directory"),
    ("metadata.json", Path.unlink, "is not a distributed checkpoint"),
]


@pytest.mark.parametrize(("name", "damage", "told"), DAMAGE, ids=[each[2][:30] for each in DAMAGE])
def test_all_ranks_are_told_what_is_not_as_it_was_saved(
    directory: Path, name: str, damage: Callable[[Path], object], told: str
) -> None:
    damage(directory / name)
    for message in map(str, errors(run_ranks(2, verify, str(directory)))):
        assert told in message and "CheckpointingException" in message
