"""``.metadata``: written for every stock reader, read from every stock writer, and neither trusted nor believed."""

from __future__ import annotations

import os
import pickle
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from robust_dcp.errors import CorruptCheckpoint, UnsafeCheckpoint
from robust_dcp.storage.metadata.metadata_file import StorageInfo, decode_metadata, encode_metadata, referenced_files
from tests.storage.forged import Call


def metadata_of(relative_path: Any = "__0_0.distcp", offset: Any = 0, length: Any = 1577) -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    properties = TensorProperties(torch.bfloat16, memory_format=torch.channels_last)
    metadata = Metadata(
        state_dict_metadata={
            "weight": TensorStorageMetadata(properties, torch.Size([2, 3]), [chunk]),
            "step": BytesStorageMetadata(),
        },
        planner_data={"weight": ("weight",), "step": ("step",)},
        storage_data={
            MetadataIndex("weight", [0, 0], 0): StorageInfo(relative_path, offset, length),
            MetadataIndex("step"): StorageInfo("__1_0.distcp", 0, 10, ["stream.zstd/1"]),
        },
        storage_meta=StorageMeta(checkpoint_id=PurePath("/checkpoints/1"), save_id="save"),
    )
    if hasattr(metadata, "version"):  # torch 2.9 and newer
        metadata.version = "1.0.0"
    return metadata


def test_we_read_what_we_and_what_stock_write() -> None:
    for encoded in (encode_metadata(metadata_of()), *(pickle.dumps(metadata_of(), p) for p in (2, 4, 5))):
        decoded = decode_metadata(encoded, ".metadata")
        assert decoded == metadata_of()
        weight = decoded.state_dict_metadata["weight"]
        assert isinstance(weight, TensorStorageMetadata)
        assert type(weight.properties) is TensorProperties
    assert referenced_files(metadata_of()) == {"__0_0.distcp", "__1_0.distcp"}


def test_the_empty_file_of_a_power_cut_is_explained() -> None:
    with pytest.raises(CorruptCheckpoint, match="empty file"):
        decode_metadata(b"", "/checkpoint/.metadata")


def six_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this torch pickle one value more than it does, as a later one may."""
    state: Any = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*state(self)[:5], (3, 1)))


def test_properties_are_written_with_the_values_that_every_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode_metadata(metadata_of())
    six_values(monkeypatch)
    assert encode_metadata(metadata_of()) == encoded


@dataclass
class MCoreMetadata(Metadata):
    mcore_data: dict[str, Any] = field(default_factory=dict)
    all_local_plans: Any = None


@dataclass(frozen=True)
class MCoreSavePlan(SavePlan):
    mcore_data: Any = None


def test_an_old_megatron_checkpoint_is_read_without_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "megatron.core.dist_checkpointing.strategies.torch"
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), types.ModuleType(parts[count - 1]))
    for cls in (MCoreMetadata, MCoreSavePlan):
        monkeypatch.setattr(cls, "__module__", name)
        setattr(sys.modules[name], cls.__name__, cls)
    plan = MCoreSavePlan([], mcore_data={"weight": {"nd_reformulated_orig_global_shape": (2, 3)}})
    metadata = MCoreMetadata(**vars(metadata_of()), mcore_data={"weight": {}}, all_local_plans=[plan])
    encoded = pickle.dumps(metadata)
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), None)

    decoded: Any = decode_metadata(encoded, ".metadata")
    assert type(decoded) is Metadata
    assert decoded == metadata_of()
    assert vars(decoded)["mcore_data"] == {"weight": {}}
    assert type(vars(decoded)["all_local_plans"][0]) is SavePlan
    assert decode_metadata(encode_metadata(decoded), ".metadata") == metadata_of()


def test_code_is_refused_and_not_run(tmp_path: Path) -> None:
    metadata = metadata_of()
    metadata.planner_data["evil"] = Call(os.mkdir, str(tmp_path / "ran"))
    for encoded in (pickle.dumps(metadata), encode_metadata(metadata)):
        with pytest.raises(UnsafeCheckpoint, match=r"posix\.mkdir.*add_safe_globals") as caught:
            decode_metadata(encoded, "/checkpoint/.metadata")
        assert (caught.value.file, caught.value.what) == ("/checkpoint/.metadata", "posix.mkdir")
    assert not (tmp_path / "ran").exists()


@dataclass
class PlannerExtra:
    value: int


def test_a_class_of_the_users_planner_can_be_registered() -> None:
    metadata = metadata_of()
    metadata.planner_data["extra"] = PlannerExtra(3)
    with pytest.raises(UnsafeCheckpoint, match="PlannerExtra"):
        decode_metadata(encode_metadata(metadata), ".metadata")
    with torch.serialization.safe_globals([PlannerExtra]):
        assert decode_metadata(encode_metadata(metadata), ".metadata") == metadata


def test_a_pickle_cannot_change_the_classes_that_it_names() -> None:
    class_name = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n"
    state = pickle.NONE + b"}X\x0d\x00\x00\x00relative_pathX\x02\x00\x00\x00..s" + pickle.TUPLE2
    attack = pickle.PROTO + b"\x04" + class_name + state + pickle.BUILD + pickle.STOP
    before = dict(vars(filesystem._StorageInfo))
    with pytest.raises(UnsafeCheckpoint, match=r"_StorageInfo\.relative_path"):
        decode_metadata(attack, ".metadata")
    assert dict(vars(filesystem._StorageInfo)) == before


def broken(change: str) -> Metadata:
    metadata = metadata_of()
    tensor = metadata.state_dict_metadata["weight"]
    exec(change, {"metadata": metadata, "tensor": tensor, "torch": torch})
    return metadata


@pytest.mark.parametrize(
    "change",
    [
        "metadata.state_dict_metadata = [1]",
        "metadata.state_dict_metadata[3] = tensor",
        "metadata.state_dict_metadata['weight'] = {}",
        "metadata.storage_data = ['x']",
        "metadata.storage_data['weight'] = 3",
        "tensor.properties = None",
        "tensor.properties.dtype = 'float32'",
        "tensor.size = (2, -3)",
        "tensor.chunks = None",
        "tensor.chunks[0].offsets = (0,)",
        "tensor.chunks[0].sizes = (2, 1.5)",
        "del tensor.chunks[0].sizes",
    ],
)
def test_values_that_no_reader_can_use_are_refused(change: str) -> None:
    with pytest.raises(CorruptCheckpoint):
        decode_metadata(encode_metadata(broken(change)), ".metadata")
