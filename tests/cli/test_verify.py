"""``robust-dcp verify`` says that whole checkpoints are whole, and names what is not.

``tests/promises/test_damage`` verifies checkpoints with damage of each kind.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import robust_dcp
from tests.cli.checkpoints import KINDS, OURS
from tests.cli.commands import shell
from tests.faults.disk import FaultDisk
from tests.harness.damage import data_files, flip_bit

CopyOf = Callable[[str], Path]


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_checkpoint_is_whole_and_all_of_its_data_has_checksums(kind: str, originals: Path) -> None:
    ended = shell("verify", originals / kind, "--json")
    assert ended.code == 0, ended
    assert ended.json["is_whole"] and ended.json["problems"] == [] and ended.json["unverified_nbytes"] == 0
    verified = ended.json["verified_nbytes"]
    items = shell("inspect", originals / kind, "--json").json["items"]
    assert verified >= sum(each["nbytes"] for each in items if each["kind"] == "tensor") > 0


def test_a_leftover_beside_a_checkpoint_is_noted_and_is_no_damage(copy_of: CopyOf) -> None:
    path = copy_of("ours")
    (path / "__77_0.distcp").write_bytes(b"left")
    ended = shell("verify", path)
    assert ended.code == 0 and "__77_0.distcp does not belong" in ended.err


def test_what_each_rank_has_saved_for_itself_is_listed_inspected_and_verified(originals: Path, copy_of: CopyOf) -> None:
    if not (originals / "by_ranks").exists():
        pytest.skip("this torch always saves together")
    path = copy_of("by_ranks")
    stock = shell("inspect", originals / "stock", "--json").json
    found = shell("inspect", path, "--json").json
    assert [each["name"] for each in found["items"]] == [each["name"] for each in stock["items"]]
    assert [each["name"] for each in found["data_files"]] == ["__0_0.distcp", "__1_0.distcp"]
    assert shell("verify", path).code == 0
    flip_bit(path / "__1_0.distcp", (path / "__1_0.distcp").stat().st_size // 2)  # most of it is one tensor
    ended = shell("verify", path)
    assert ended.code == 1 and {row[0] for row in ended.rows} == {"__1_0.distcp"}
    path.rename(path.parent / "step_7")
    (row,) = shell("ls", path.parent, "--json").json["checkpoints"]
    assert (row["step"], row["state"], row["is_latest"]) == (7, "committed", True)
    for name in ("__0.metadata", "__1.metadata"):
        metadata = path.parent / "step_7" / name
        whole = metadata.read_bytes()
        metadata.write_bytes(whole[:-9])
        (row,) = shell("ls", path.parent, "--json").json["checkpoints"]
        assert row["state"] == f"damaged: {name} is cut off"
        metadata.write_bytes(whole)


def test_all_checkpoints_of_a_run_are_verified_and_the_broken_one_is_named(originals: Path, tmp_path: Path) -> None:
    for number, kind in enumerate(("ours", "stock", "safetensors")):
        shutil.copytree(originals / kind, tmp_path / f"step_{number}")
    assert shell("verify", tmp_path).code == 0
    os.truncate(max(data_files(tmp_path / "step_1"), key=os.path.getsize), 100)
    ended = shell("verify", tmp_path, "--json")
    assert ended.code == 1 and [each["is_whole"] for each in ended.json["checkpoints"]] == [True, False, True]
    assert "3 checkpoints: 1 broken" in shell("verify", tmp_path).err
    path = tmp_path / "step_1"
    changes: list[tuple[str, Any, int, str]] = [
        ("open:.metadata", OSError(errno.EACCES, ""), 2, "step_1/.metadata: Permission denied"),
        ("open:__*#1", lambda call: robust_dcp.save({"w": torch.ones(1)}, checkpoint_id=path), 2, "run verify again"),
        ("open:__*#1", lambda call: shutil.rmtree(path), 0, "step_1 was removed meanwhile"),
    ]
    for call, change, code, said in changes:
        with FaultDisk(path, on={call: change}):
            ended = shell("verify", tmp_path)
        assert ended.code == code and said in ended.err and ended.err.count("whole: ") == 2
        assert ("3 checkpoints: 0 broken, and 1 could not be verified" in ended.err) is (code == 2)


@pytest.mark.parametrize("kind", OURS)
def test_a_checkpoint_in_a_store_is_inspected_and_verified(kind: str, originals: Path) -> None:
    url = f"memory://verified/{kind}"
    assert shell("copy", originals / kind, url).code == 0
    here, there = (shell("inspect", each, "--json").json for each in (originals / kind, url))
    assert (here["items"], here["data_files"]) == (there["items"], there["data_files"])
    ended = shell("verify", url, "--json")
    assert ended.code == 0 and ended.json["is_whole"] and ended.json["verified_nbytes"] > 0
    name = max(here["data_files"], key=lambda each: each["nbytes"])["name"]
    store = fsspec.filesystem("memory")
    data = bytearray(store.cat(f"/verified/{kind}/{name}"))
    data[len(data) // 2] ^= 1
    store.pipe(f"/verified/{kind}/{name}", bytes(data))
    ended = shell("verify", url)
    assert ended.code == 1 and [row[0] for row in ended.rows] == [name]


def test_all_damaged_items_are_named_up_to_twenty_of_a_file(tmp_path: Path) -> None:
    writer = robust_dcp.RobustWriter(tmp_path, files_per_rank=1)
    robust_dcp.save({f"l.{n}": torch.ones(5000) for n in range(100)}, storage_writer=writer)
    chunks = [(each["name"], each["chunks"][0]) for each in shell("inspect", tmp_path, "--json").json["items"]]
    for _, chunk in chunks[10:13]:
        flip_bit(tmp_path / chunk["file"], chunk["start"] + chunk["stored_nbytes"] // 2)
    assert [row[1] for row in shell("verify", tmp_path).rows] == [name for name, _ in chunks[10:13]]
    for _, chunk in chunks[13:]:
        flip_bit(tmp_path / chunk["file"], chunk["start"] + chunk["stored_nbytes"] // 2)
    assert len(shell("verify", tmp_path).rows) == 20


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([((0, 0), (5, 6))], "chunks within [4, 6]"),
        ([((0, 0, 0), (4, 6, 1))], "chunks within [4, 6]"),
        ([((0, 0), (3, 6)), ((2, 0), (1, 6))], "chunks that do not overlap"),
        ([((0, 0), (2, 6)), ((0, 0), (2, 6))], "chunks that do not overlap"),
        ([((0, 0), (3, 6))], "chunks with all 24 elements"),
        ([((0, 0), (4, 6))], "a file for its chunk at [0, 0]"),
    ],
)
def test_chunks_that_do_not_make_the_tensor_are_found(chunks: list[Any], expected: str, tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(24.0).reshape(4, 6)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks
    ]
    (place,) = metadata.storage_data.values()
    metadata.storage_data = {MetadataIndex("w", offsets): place for offsets, _ in chunks if "a file" not in expected}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    ended = shell("verify", tmp_path)
    assert ended.code == 1 and expected in str(ended.rows), ended


class Own(torch.Tensor):
    """A tensor of a class that copies in a way of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs)


def test_a_tensor_whose_class_refuses_to_be_copied_is_verified_by_its_bytes(tmp_path: Path) -> None:
    robust_dcp.save({"own": torch.ones(9).as_subclass(Own), "w": torch.ones(9)}, checkpoint_id=tmp_path)
    ended = shell("verify", tmp_path, "--json")
    assert ended.code == 0 and ended.json["unverified_nbytes"] == 0 and ended.json["verified_nbytes"] == 72
