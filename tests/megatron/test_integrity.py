"""Megatron's manifest of file hashes: what is written, what stock finds in it, and what each rank is told of damage."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

import torch
import torch.distributed as dist

import robust_dcp
from robust_dcp import CorruptCheckpoint, RobustCheckpointError, RobustWriter, StorageError
from robust_dcp.comm import Channel
from robust_dcp.megatron.integrity import MANIFEST_FILE, encode_manifest, verify_files
from robust_dcp.megatron.versions import backend_of
from tests.faults.disk import FaultDisk
from tests.harness.damage import flip_bit
from tests.megatron.torch_dist import Scenarios, failures_of

SCENARIOS = Scenarios()
OF_MEGATRON = "common.pt"


def on_rank_0(act: Callable[[], object]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


def save(directory: Path) -> None:
    """As the saves of Megatron that ask for a manifest do, which 0.16.1 does not know."""
    writer = RobustWriter(directory, report=False)
    writer.beside = {
        OF_MEGATRON: os.urandom(7),
        MANIFEST_FILE: encode_manifest,
        "metadata.json": b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}',
    }
    robust_dcp.save({f"of rank {dist.get_rank()}": torch.rand(1 << 19)}, storage_writer=writer, timeout_seconds=50)
    dist.barrier()  # no rank waits until the coordinator has tidied up


def verify(directory: Path, group: dist.ProcessGroup | None = None) -> None:
    verify_files(Channel.for_group(group, timeout_seconds=50), "load", str(directory))


@SCENARIOS.add
def the_manifest_names_each_file_with_its_sha256_but_the_index_which_has_checksums(directory: Path) -> None:
    for _ in range(2):  # the second replaces the first
        save(directory)
    manifest = json.loads((directory / MANIFEST_FILE).read_bytes())
    files = [path for path in directory.iterdir() if path.name not in (MANIFEST_FILE, ".robust_dcp.index")]
    assert manifest["algorithm"] == "sha256" and len(files) == 5
    assert manifest["files"] == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    rank_0_alone = dist.new_group([0])  # a job of another size may verify it
    if dist.get_rank() == 0:
        verify(directory, rank_0_alone)


@SCENARIOS.add
def whenever_a_save_ends_the_manifest_is_that_of_the_checkpoint(directory: Path) -> None:
    save(directory)
    with FaultDisk(directory, on={"rename:.metadata": OSError(errno.EIO, "")}):
        failures_of(lambda: save(directory))
    verify(directory)
    with FaultDisk(directory, on={f"rename:{OF_MEGATRON}": OSError(errno.EIO, "")}), pytest.raises(StorageError):
        save(directory)
    assert list(directory.glob(f"{MANIFEST_FILE}.*"))  # as after a kill, before they get their names
    verify(directory)


def name_a_file_outside(path: Path) -> None:
    manifest = json.loads(path.read_bytes())
    manifest["files"]["../elsewhere"] = "0" * 64
    path.write_text(json.dumps(manifest))


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("__1_0.*.distcp", lambda path: flip_bit(path, 1 << 20), ".distcp: expected"),
    (".metadata", lambda path: path.write_bytes(path.read_bytes() + b"."), ".metadata: expected"),
    (OF_MEGATRON, Path.unlink, f"{OF_MEGATRON}: No such file"),
    (OF_MEGATRON, lambda path: (path.unlink(), os.mkfifo(path)), f"{OF_MEGATRON}: no regular file"),
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
        on_rank_0(lambda damaged=damaged, name=name, damage=damage: damage(*damaged.glob(name)))
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
