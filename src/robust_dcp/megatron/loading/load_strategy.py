"""Megatron-Core's load strategy over :func:`robust_dcp.load`.

Owns what Megatron expects of a strategy: the translation of sharded state dicts and of metadata. Users pass it as
``sharded_strategy`` to ``megatron.core.dist_checkpointing.load``. With robust_dcp as the planner, ``loading`` and
``load_patches`` also read through it when the strategy is Megatron's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from robust_dcp import api
from robust_dcp.comm import Channel
from robust_dcp.errors import entry_point
from robust_dcp.megatron import translation, versions
from robust_dcp.megatron.failures import as_megatron_raises
from robust_dcp.megatron.hooks.options import current_options
from robust_dcp.megatron.loading.load_planner import load_planner_for
from robust_dcp.megatron.loading.removal import remove_keys
from robust_dcp.megatron.versions import ShardedObject, ShardedTensor
from robust_dcp.plan.checkpoint_name import checkpoint_name
from robust_dcp.report import LoadReport
from robust_dcp.storage.files.paths import directory_path
from robust_dcp.storage.index import look_up
from robust_dcp.storage.reader import RobustReader

__all__ = [
    "RobustLoadStrategy",
    "checkpoint_reader",
    "load_in_parallel",
    "read_for_strategy",
    "read_sharded",
    "shapes_and_objects",
    "stored_keys",
]

CheckpointDir = str | os.PathLike[str]

_PART = "/shard_"
"""In the name of an item, this stands between the key of a ShardedObject and the part that the item holds."""


def checkpoint_reader(checkpoint_dir: CheckpointDir, *, share_reads: bool = False) -> RobustReader:
    """A reader with the options of robust_dcp. Only ``FullyParallelLoadStrategyWrapper`` asks to share reads."""
    directory = directory_path(checkpoint_dir)  # the files of Megatron beside it are read from there, too
    return RobustReader(directory, trusted=current_options().trusted, share_reads=share_reads)


@entry_point
def read_sharded(
    sharded_state_dict: dict[str, Any],
    reader: RobustReader,
    *,
    timeout_seconds: float,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    strategy: Any = None,
) -> dict[str, Any]:
    """Read the shards of a sharded state dict. A shard that has a tensor is read into this tensor.

    Args:
        sharded_state_dict: nested dicts and lists of ShardedTensor and ShardedObject, after factories were applied.
        reader: the reader of the checkpoint.
        timeout_seconds: the timeout of each exchange.
        process_group: the ranks that load together; ``None`` for all.
        no_dist: whether this rank loads alone, without exchanges.
        strategy: Megatron's strategy. Its options are used, and the attributes that a load sets are set on it.

    Returns:
        The same nested state dict, with tensors and objects for leaves.

    Raises:
        RobustCheckpointError: any rank that takes part failed. All of them raise it.
    """
    name = checkpoint_name(reader.path)
    targets: dict[str, Any] = {}
    restore: Callable[[dict[str, Any]], dict[str, Any]] = dict
    wanted: list[ShardedTensor] = []

    def translate() -> None:
        nonlocal targets, restore, wanted
        is_flat = any(getattr(shard, "flattened_range", None) is not None for shard in _tensors_in(sharded_state_dict))
        resharding = translation.Resharding(sharded_state_dict, reader.read_metadata() if is_flat else None)
        targets, restore = translation.to_dcp_targets(resharding)
        wanted = _tensors_in(resharding.sharded_state_dict)

    channel = Channel.for_group(
        process_group, operation=f"translate {name}", timeout_seconds=timeout_seconds, no_dist=no_dist
    )
    stream_dequantize = getattr(strategy, "stream_ckpt_dequant", None)
    with as_megatron_raises():
        channel.barrier(f"load {name}: translate", translate)
        planner = load_planner_for(
            wanted,
            name,
            trusted=current_options().trusted,
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
    if isinstance(strategy, versions.TorchDistLoadShardedStrategy):
        strategy.cached_global_metadata = planner.metadata
        strategy.last_report = report
    return restore(targets)


def _tensors_in(sharded_state_dict: dict[str, Any]) -> list[ShardedTensor]:
    return [shard for shard in versions.nested_values(sharded_state_dict) if isinstance(shard, ShardedTensor)]


@entry_point
def load_in_parallel(
    wrapper: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: CheckpointDir, timeout_seconds: float
) -> dict[str, Any]:
    """Do the work of ``FullyParallelLoadStrategyWrapper.load``. All ranks of its parallelization group call it.

    If several ranks need the same bytes, one rank reads them and passes them on, as in any load with shared reads.

    Args:
        wrapper: Megatron's wrapper. Its group and its base strategy are used. Its cached distribution is not.
        sharded_state_dict: the shards to load, after factories were applied.
        checkpoint_dir: the checkpoint's directory.
        timeout_seconds: the timeout of each exchange.

    Raises:
        RobustCheckpointError: any rank of the group failed. All of them raise it.
    """
    strategy = wrapper.base_strategy
    loaded: dict[str, Any] = read_sharded(
        versions.dequantized(sharded_state_dict),
        checkpoint_reader(checkpoint_dir, share_reads=True),
        timeout_seconds=timeout_seconds,
        process_group=wrapper.parallelization_group,
        strategy=strategy,
    )
    wrapper.cached_global_metadata = getattr(strategy, "cached_global_metadata", None)
    return loaded


def stored_keys(metadata: Metadata) -> set[str]:
    """The keys of the ShardedTensors and ShardedObjects that a checkpoint holds."""
    entries = metadata.state_dict_metadata
    may_be_parts = [name for name in entries if _PART in name]
    look_up(metadata, may_be_parts)
    parts = {name for name in may_be_parts if isinstance(entries[name], BytesStorageMetadata)}
    return {name.partition(_PART)[0] if name in parts else name for name in entries}


def shapes_and_objects(metadata: Metadata) -> dict[str, Any]:
    """The ShardedTensors (each as one unsharded whole) and ShardedObjects of a checkpoint, by key and without data."""
    objects = {}
    for key, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, BytesStorageMetadata):
            found = ShardedObject.empty_from_unique_key(key)
            objects[found.unique_key] = found
    return {**objects, **versions.saved_shapes(metadata)}


def read_for_strategy(strategy: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: CheckpointDir) -> Any:
    """Do the work of Megatron's ``TorchDistLoadShardedStrategy.load``.

    All ranks load together if they do so in the installed version. From 0.18 on each rank loads by itself.

    Args:
        strategy: Megatron's strategy. The attributes that a load sets are set on it.
    """
    return read_sharded(
        sharded_state_dict,
        checkpoint_reader(checkpoint_dir),
        timeout_seconds=current_options().exchange_timeout_seconds,
        no_dist=not versions.load_is_collective(),
        strategy=strategy,
    )


class RobustLoadStrategy(versions.TorchDistLoadShardedStrategy):
    """Loads Megatron checkpoints that robust_dcp or stock has saved.

    It verifies checksums, reads in parallel, and runs no code from the checkpoint.

        from megatron.core import dist_checkpointing
        from robust_dcp.megatron import RobustLoadStrategy

        state_dict = dist_checkpointing.load(sharded_state_dict, checkpoint_dir, RobustLoadStrategy())

    Args:
        process_group: the ranks that call ``dist_checkpointing.load`` together; all ranks by default.
        timeout_seconds: the timeout of each exchange. The default comes from :func:`~.options.current_options`.
        options: the arguments of Megatron's own class, if it has any (0.18 and newer).

    Attributes:
        cached_global_metadata: the metadata of the checkpoint that was loaded last.
        last_report: the report of the last load.
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
            sharded_state_dict: the shards to load, with the tensors to load them into.
            checkpoint_dir: the checkpoint's directory.
            async_strategy: ignored. Megatron passes it, but our loads do not depend on it.

        Raises:
            RobustCheckpointError: any rank failed. Every rank raises it.
        """
        return read_sharded(
            sharded_state_dict,
            checkpoint_reader(checkpoint_dir),
            timeout_seconds=self.timeout_seconds,
            process_group=self.process_group,
            strategy=self,
        )

    def load_tensors_metadata(self, checkpoint_dir: CheckpointDir, metadata: Metadata | None = None) -> dict[str, Any]:
        """The tensors of a checkpoint, without data. Asks no other rank."""
        return versions.saved_shapes(
            checkpoint_reader(checkpoint_dir).read_metadata() if metadata is None else metadata
        )

    def load_sharded_metadata(self, checkpoint_dir: CheckpointDir) -> dict[str, Any]:
        """The tensors and objects of a checkpoint, without data. Asks no other rank."""
        return shapes_and_objects(checkpoint_reader(checkpoint_dir).read_metadata())

    def remove_sharded_tensors(self, checkpoint_dir: CheckpointDir, key_prefix: str) -> None:
        """Remove all items with keys that start with ``key_prefix``.

        Call it on one rank only, while no rank saves or loads.
        """
        remove_keys(checkpoint_dir, key_prefix)
