"""Megatron-Core's load strategy over :func:`robust_dcp.load`.

Owns what Megatron expects of a strategy: the translation of sharded state dicts and of metadata. Passed by the user as
``sharded_strategy`` to ``megatron.core.dist_checkpointing.load``; with robust_dcp as the planner ``loading`` and
``load_patches`` read Megatron's own strategy's shards through it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from robust_dcp import api
from robust_dcp.comm import Channel
from robust_dcp.errors import entry_point
from robust_dcp.megatron import versions
from robust_dcp.megatron.failures import as_megatron_raises
from robust_dcp.megatron.hooks.options import current_options
from robust_dcp.megatron.loading.load_planner import MegatronLoadPlanner
from robust_dcp.megatron.loading.removal import remove_keys
from robust_dcp.megatron.versions import ShardedObject, ShardedTensor
from robust_dcp.planner.save import checkpoint_name
from robust_dcp.report import LoadReport
from robust_dcp.storage.reader import RobustReader

__all__ = [
    "LoadedShards",
    "ReaderOfKnownMetadata",
    "RobustLoadStrategy",
    "read_for_strategy",
    "read_metadata",
    "read_sharded",
    "shapes_and_objects",
]

CheckpointDir = str | os.PathLike[str]


class ReaderOfKnownMetadata(RobustReader):
    """A reader that has been given the bytes of ``.metadata``, so that not every rank reads the file."""

    def __init__(self, path: CheckpointDir, metadata_file: bytes | None = None) -> None:
        super().__init__(path, trusted=current_options().trusted)
        self._metadata_file = metadata_file

    def metadata_bytes(self, rank: int | None = None) -> bytes:
        if self._metadata_file is None or rank is not None:
            self._metadata_file = super().metadata_bytes(rank)
        return self._metadata_file


@dataclass(frozen=True)
class LoadedShards:
    """What :func:`read_sharded` has read.

    Attributes:
        state_dict: nested as it was asked for, with tensors and objects for leaves.
        object_bytes: the bytes of the objects, by key, if they were asked for.
        metadata: of the checkpoint.
        report: of the load.
    """

    state_dict: dict[str, Any]
    object_bytes: dict[str, bytes]
    metadata: Metadata | None
    report: LoadReport


@entry_point
def read_sharded(
    sharded_state_dict: dict[str, Any],
    reader: RobustReader,
    *,
    timeout_seconds: float,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    stream_dequantize: bool | None = None,
    keep_object_bytes: bool = False,
) -> LoadedShards:
    """Read what the shards of a sharded state dict ask for, into their tensors where they have one.

    Args:
        sharded_state_dict: nested dicts and lists of ShardedTensor and ShardedObject, factories applied.
        reader: of the checkpoint.
        timeout_seconds: of each exchange.
        process_group: the ranks that load together; ``None`` for all.
        no_dist: this rank loads by itself; no other is asked or told.
        stream_dequantize: ``stream_ckpt_dequant`` of Megatron's strategy (0.19); ``None`` where it has none.
        keep_object_bytes: return the bytes of objects too.

    Raises:
        RobustCheckpointError: on every rank that loads together, whichever of them failed.
    """
    name = checkpoint_name(reader.path)
    targets: dict[str, Any] = {}
    restore: Callable[[dict[str, Any]], dict[str, Any]] = dict
    wanted: list[ShardedTensor] = []

    def translate() -> None:
        nonlocal targets, restore, wanted
        is_flat = any(getattr(shard, "flattened_range", None) is not None for shard in _tensors_in(sharded_state_dict))
        resharding = versions.Resharding(sharded_state_dict, read_metadata(reader) if is_flat else None)
        targets, restore = versions.to_dcp_targets(resharding)
        wanted = _tensors_in(resharding.sharded_state_dict)

    channel = Channel.for_group(
        process_group, operation=f"translate {name}", timeout_seconds=timeout_seconds, no_dist=no_dist
    )
    with as_megatron_raises():
        channel.barrier(f"load {name}: translate", translate)
        planner = MegatronLoadPlanner(
            name,
            trusted=current_options().trusted,
            keeps_bytes=keep_object_bytes,
            shapes_validation_sharded_tensors=[shard for shard in wanted if not shard.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={shard.key: shard for shard in wanted if shard.allow_shape_mismatch},
            **({} if stream_dequantize is None else {"stream_ckpt_dequant": stream_dequantize}),
        )
        report = api.load(
            targets,
            storage_reader=reader,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            timeout_seconds=timeout_seconds,
        )
    return LoadedShards(restore(targets), planner.object_bytes, planner.metadata, report)


def _tensors_in(sharded_state_dict: dict[str, Any]) -> list[ShardedTensor]:
    return [shard for shard in versions.nested_values(sharded_state_dict) if isinstance(shard, ShardedTensor)]


def read_metadata(reader: RobustReader) -> Metadata:
    """The metadata of a checkpoint, read by this rank alone, without running code that the file names.

    Raises:
        StorageError: there is none.
        CorruptCheckpoint, UnsafeCheckpoint: it is not what a save wrote.
    """
    return reader.decode_metadata(reader.metadata_bytes())


def shapes_and_objects(metadata: Metadata) -> dict[str, Any]:
    """The ShardedTensors (without sharding) and ShardedObjects that a checkpoint holds, by key, without data."""
    objects = {}
    for key, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, BytesStorageMetadata):
            found = ShardedObject.empty_from_unique_key(key)
            objects[found.unique_key] = found
    return {**objects, **versions.saved_shapes(metadata)}


def read_for_strategy(strategy: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: CheckpointDir) -> Any:
    """``TorchDistLoadShardedStrategy.load`` of Megatron: together with all ranks, or, as from 0.18 on, by each rank for
    itself, as the installed version does.

    Args:
        strategy: Megatron's; gets the attributes that a load sets.
    """
    read = read_sharded(
        sharded_state_dict,
        RobustReader(checkpoint_dir, trusted=current_options().trusted),
        timeout_seconds=current_options().exchange_timeout_seconds,
        no_dist=not versions.load_is_collective(),
        stream_dequantize=getattr(strategy, "stream_ckpt_dequant", None),
    )
    strategy.cached_global_metadata = read.metadata
    strategy.last_report = read.report
    return read.state_dict


class RobustLoadStrategy(versions.TorchDistLoadShardedStrategy):
    """Loads Megatron checkpoints, ours and stock's, with checksums, in parallel, and without running code from them.

        from megatron.core import dist_checkpointing
        from robust_dcp.megatron import RobustLoadStrategy

        state_dict = dist_checkpointing.load(sharded_state_dict, checkpoint_dir, RobustLoadStrategy())

    Args:
        process_group: the ranks that call ``dist_checkpointing.load`` together; all ranks by default.
        timeout_seconds: for each exchange between ranks; by default as :func:`~.options.current_options` says.
        options: those of Megatron's own class, where it has any (0.18 and newer).

    Attributes:
        cached_global_metadata: of the checkpoint that was loaded last.
        last_report: what that load did.
    """

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.process_group = process_group
        self._timeout_seconds = timeout_seconds
        self.last_report: LoadReport | None = None

    @property
    def timeout_seconds(self) -> float:
        if self._timeout_seconds is not None:
            return self._timeout_seconds
        return current_options().exchange_timeout_seconds

    @entry_point
    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: CheckpointDir, async_strategy: str | None = None
    ) -> dict[str, Any]:
        """Load the shards, on all ranks together.

        Args:
            sharded_state_dict: what to load, and where to.
            checkpoint_dir: the checkpoint's directory.
            async_strategy: taken for Megatron's sake; reading has no such choice here.

        Raises:
            RobustCheckpointError: on every rank, whichever of them failed.
        """
        loaded = read_sharded(
            sharded_state_dict,
            RobustReader(checkpoint_dir, trusted=current_options().trusted),
            timeout_seconds=self.timeout_seconds,
            process_group=self.process_group,
            stream_dequantize=getattr(self, "stream_ckpt_dequant", None),
        )
        self.cached_global_metadata = loaded.metadata
        self.last_report = loaded.report
        return loaded.state_dict

    def load_tensors_metadata(self, checkpoint_dir: CheckpointDir, metadata: Metadata | None = None) -> dict[str, Any]:
        """The tensors of a checkpoint, without data. Local to this rank."""
        return versions.saved_shapes(read_metadata(RobustReader(checkpoint_dir)) if metadata is None else metadata)

    def load_sharded_metadata(self, checkpoint_dir: CheckpointDir) -> dict[str, Any]:
        """The tensors and objects of a checkpoint, without data. Local to this rank."""
        return shapes_and_objects(read_metadata(RobustReader(checkpoint_dir)))

    def remove_sharded_tensors(self, checkpoint_dir: CheckpointDir, key_prefix: str) -> None:
        """Remove tensors whose key starts with ``key_prefix``. Local to this rank; no other may save or load now."""
        remove_keys(checkpoint_dir, key_prefix)
