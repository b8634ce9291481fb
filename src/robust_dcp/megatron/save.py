"""Saves of the format ``torch_dist``: ``megatron.core.dist_checkpointing.save`` and Megatron's save strategies.

Stock applies factories, writes ``common.pt`` on rank 0 and writes ``metadata.json`` and the manifest of hashes between
its collectives, where other ranks do not hear of a failure. Here these steps run inside exchanges, so a failure reaches
all ranks, and these files are committed with the shards: a process that is killed leaves no shards beside the iteration
of another save. This module owns the order of the steps.

| step | exchanges |
| --- | --- |
| prepare | ``agree``: each rank offers the signature of the shards it accesses and the digest of its common state |
| validate | none, if all ranks found this structure valid before; else a gather |
| write, commit | those of :func:`robust_dcp.save`; rank 0 commits ``common.pt``, ``metadata.json``, the manifest |

An asynchronous save returns when each rank has copied the data that it writes. It finishes in the finalizer of its
request.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from robust_dcp import api
from robust_dcp.asynchronous import async_save
from robust_dcp.comm import Channel
from robust_dcp.errors import entry_point
from robust_dcp.megatron import common_state, integrity, versions
from robust_dcp.megatron.access import agree_on_access
from robust_dcp.megatron.async_requests import BackgroundSave, end_save, request_for
from robust_dcp.megatron.failures import as_megatron_raises, meet_before_saving
from robust_dcp.megatron.options import current_options
from robust_dcp.megatron.shards import MegatronPlanner, ShardFacts
from robust_dcp.report import SaveReport
from robust_dcp.storage.committing.save import FileBeside, OnEachNode
from robust_dcp.storage.files.paths import checkpoint_name, directory_path
from robust_dcp.storage.layouts.places import separated
from robust_dcp.storage.records.kinds import NotData
from robust_dcp.storage.writer import RobustWriter
from robust_dcp.switch.patching import log_left_to_stock, log_without_effect

logger = logging.getLogger(__name__)

CheckpointDir = str | os.PathLike[str]


def _save_shards(
    save: Callable[..., Any],
    strategy: Any,
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: CheckpointDir,
    beside: Mapping[str, FileBeside] = {},
    **planning: Any,
) -> Any:
    """Save the shards of a sharded state dict, now or beside training. All ranks of the group call it together.

    Args:
        save: :func:`robust_dcp.save` or :func:`robust_dcp.async_save`.
        strategy: ours or Megatron's. With ``FullyParallelSaveStrategyWrapper`` the global plan spreads the writes over
            the ranks of its group, anew for the shards of this save: any of them may write a shard whose main replica
            is on another. The shards' replica ids are not changed.
        sharded_state_dict: nested dicts and lists of ShardedTensor and ShardedObject, after factories were applied.
        beside: the files to commit with the shards, as for :class:`RobustWriter`.
        planning: arguments of :class:`MegatronPlanner`.

    Raises:
        RobustCheckpointError: any rank failed. Every rank raises it.
    """
    group, options = getattr(strategy, "parallelization_group", None), current_options()
    peers = () if group is None else dist.get_process_group_ranks(group)
    writer = RobustWriter(checkpoint_dir, threads=options.writer_threads, parity_nodes=options.parity_nodes)
    writer.beside = beside
    separation_hint = getattr(_base_strategy_of(strategy), "separation_hint", None)
    if separation_hint:
        writer.layout = separated(separation_hint)
    if getattr(strategy, "pg_cache_create", False):
        log_without_effect(
            "--ckpt-pg-tensors-cache-create",
            "saves and loads by robust_dcp need no such cache, and none is made; a later job with stock code and "
            "--ckpt-pg-tensors-cache-path would end in FileNotFoundError: let one with --ckpt-planner default make it",
        )
    meet_before_saving()
    with as_megatron_raises():
        return save(
            sharded_state_dict,
            storage_writer=writer,
            planner=MegatronPlanner(peers=peers, **planning),
            timeout_seconds=options.exchange_timeout_seconds,
        )


class RobustSaveStrategy(TorchDistSaveShardedStrategy):
    """Saves Megatron sharded state dicts with robust_dcp; stock Megatron loads them.

    It derives from the stock strategy because Megatron requires that. Up to 0.16 Megatron refuses another class, and
    from 0.17 on it silently uses the stock strategy in its place. Only attributes are inherited. ``cached_metadata``
    and ``thread_count`` of the stock strategy have no effect here. Every save notices if the structure has changed.

        from megatron.core import dist_checkpointing
        from robust_dcp.megatron import RobustSaveStrategy

        strategy = RobustSaveStrategy()
        dist_checkpointing.save(sharded_state_dict, checkpoint_dir, strategy)
        print(strategy.last_report)

    Args:
        backend, version: what Megatron writes into ``metadata.json``. The format on disk is ``torch_dist``.

    Attributes:
        last_report: the report of this strategy's last save; ``None`` before the first. An asynchronous save sets it
            when Megatron finalizes the save.
    """

    last_report: SaveReport | None = None

    def __init__(self, backend: str = "torch_dist", version: int = 1) -> None:
        super().__init__(backend, version)

    @entry_point
    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: CheckpointDir) -> None:
        """Save and commit. ``last_report`` then has the report.

        Raises:
            RobustCheckpointError: any rank failed. Every rank raises it.
            ValueError: ``checkpoint_dir`` is a URL.
        """
        strategy_save(TorchDistSaveShardedStrategy.save, self, sharded_state_dict, checkpoint_dir)

    @entry_point
    def async_save(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: CheckpointDir,
        async_strategy: str | None = None,
    ) -> Any:
        """Start a save, and return the request whose finalizer waits for it.

        Args:
            sharded_state_dict, checkpoint_dir: as in :meth:`save`.
            async_strategy: the package that owns the queue (Megatron-Core 0.17 and newer).
        """
        return strategy_async_save(
            TorchDistSaveShardedStrategy.async_save, self, sharded_state_dict, checkpoint_dir, async_strategy
        )


@entry_point
def strategy_save(
    stock: Callable[..., Any], strategy: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: Any
) -> None:
    """``save`` of Megatron's strategy and of ``FullyParallelSaveStrategyWrapper``, for callers of these methods."""
    base = _base_strategy_of(strategy)
    if _is_written_by_ours(base):
        base.last_report = _save_shards(api.save, strategy, sharded_state_dict, checkpoint_dir)
        end_save(base.last_report)
    else:
        stock(strategy, sharded_state_dict, checkpoint_dir)


@entry_point
def strategy_async_save(
    stock: Callable[..., Any],
    strategy: Any,
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: Any,
    async_strategy: str | None = None,
    **options: Any,
) -> Any:
    """``async_save`` of the same two."""
    base = _base_strategy_of(strategy)
    if not _is_written_by_ours(base):
        given = {} if async_strategy is None else {"async_strategy": async_strategy}
        return stock(strategy, sharded_state_dict, checkpoint_dir, **given, **options)
    request_class = versions.async_request_class(async_strategy)  # first: it raises if the queue is not installed
    background = BackgroundSave(_save_shards(async_save, strategy, sharded_state_dict, checkpoint_dir))
    return request_for(request_class, background, lambda report: setattr(base, "last_report", report))


def _base_strategy_of(strategy: Any) -> Any:
    """The strategy inside ``FullyParallelSaveStrategyWrapper``, which is not needed: our plan spreads the writes."""
    while hasattr(strategy, "base_strategy"):
        strategy = strategy.base_strategy
    return strategy


def _is_written_by_ours(strategy: Any) -> bool:
    """Whether a strategy writes ``torch_dist`` in Megatron's own way, or is ours. If not, log that stock saves."""
    if isinstance(strategy, tuple):
        name = str(strategy[0])
        is_ours = name == "torch_dist"
    else:
        is_ours = strategy is None or isinstance(strategy, RobustSaveStrategy) or versions.writes_torch_dist(strategy)
        name = type(strategy).__name__
    if not is_ours:
        log_left_to_stock(f"saves by {name}", "only torch_dist, saved in Megatron's own way, is taken over")
    return is_ours


class _Prepared(msgspec.Struct, eq=False):
    """What one rank has prepared from its state dict."""

    sharded: dict[str, Any] = msgspec.field(default_factory=dict)
    facts: ShardFacts = msgspec.field(default_factory=lambda: ShardFacts([]))
    beside: dict[str, FileBeside] = msgspec.field(default_factory=dict)
    refused: dict[str, NotData] = msgspec.field(default_factory=dict)
    digests: common_state.LeafDigests = msgspec.field(default_factory=lambda: common_state.LeafDigests({}))


@entry_point
def save(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``dist_checkpointing.save``. ``metadata.json`` exists only if the checkpoint is complete.

    Returns:
        ``None``, or a request for an asynchronous save. The request's finalizer waits until the checkpoint is
        committed.

    Raises:
        ValueError: ``checkpoint_dir`` is a URL.
        InvalidAccess: the ranks do not access each shard exactly once.
        RobustCheckpointError: something failed on any rank. All ranks raise the same error.
    """
    bound = inspect.signature(stock).bind(*args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    strategy = _base_strategy_of(call["sharded_strategy"])
    if not _is_written_by_ours(strategy):
        return stock(*args, **kwargs)
    directory = directory_path(call["checkpoint_dir"])
    phase, timeout_seconds = f"save {checkpoint_name(directory)}", current_options().exchange_timeout_seconds
    channel = Channel.for_group(None, operation=f"Megatron: {phase}", timeout_seconds=timeout_seconds)
    is_async = call["async_sharded_save"]
    request_class = versions.async_request_class(call.get("async_strategy")) if is_async else None
    meet_before_saving()
    with as_megatron_raises():
        prepared = _prepare_and_validate(call, directory, strategy, channel, phase)

    def save_shards(save: Callable[..., Any]) -> Any:
        planning = {"facts": prepared.facts, "refused": prepared.refused}
        return _save_shards(save, call["sharded_strategy"], prepared.sharded, directory, prepared.beside, **planning)

    def finish(report: SaveReport) -> None:
        if strategy is not None and not isinstance(strategy, tuple):
            strategy.last_report = report

    if is_async:
        return request_for(request_class, BackgroundSave(save_shards(async_save)), finish)
    report = save_shards(api.save)
    end_save(report)
    finish(report)
    return None


def _prepare_and_validate(
    call: Mapping[str, Any], directory: str, strategy: Any, channel: Channel, phase: str
) -> _Prepared:
    prepared = _Prepared()
    if call.get("verify_integrity", False):
        prepared.beside[integrity.MANIFEST_FILE] = integrity.encode_manifest  # each rank hashes what it writes
    validates = call["validate_access_integrity"]

    def prepare() -> ShardFacts:
        if channel.is_coordinator and os.path.isdir(directory) and os.listdir(directory):
            # Stock warns too and does not raise: queued jobs have nobody to remove it.
            logger.warning("Overwriting old incomplete / corrupted checkpoint...")
        prepared.sharded, common = versions.prepare_to_save(call["sharded_state_dict"], call.get("content_metadata"))
        if validates:
            preprocess = call["preprocess_common_before_consistancy_check"]
            prepared.digests = common_state.leaf_digests(preprocess(common) if preprocess else common)
        if versions.common_state_is_a_sharded_object():
            replica_id = 0 if channel.is_coordinator else 1 + channel.rank
            common_object = ShardedObject(versions.COMMON_STATE_KEY, common, (1,), (0,), replica_id)
            prepared.sharded[versions.COMMON_STATE_KEY] = common_object
            if channel.is_coordinator:  # each rank of a job that goes on reads it by itself, before it has shards
                prepared.beside[common_state.COMMON_FILE] = OnEachNode(common_state.encode_common(common))
        elif channel.is_coordinator:
            prepared.beside[common_state.COMMON_FILE] = common_file = common_state.encode_common(common)
            prepared.refused = common_state.refused_in(common, common_file)
        if channel.is_coordinator:
            # The last one gets its name last, because it says that the checkpoint is complete. What an earlier
            # checkpoint had, and this one has not, goes: a common state of before, and the hashes of its files.
            prepared.beside.setdefault(common_state.COMMON_FILE, None)
            prepared.beside.setdefault(integrity.MANIFEST_FILE, None)
            prepared.beside[common_state.CONFIG_FILE] = versions.checkpoint_config(strategy)
        prepared.facts = ShardFacts(nested_values(prepared.sharded))
        return prepared.facts

    check = agree_on_access(
        channel, f"{phase}: prepare", prepare, value=lambda: prepared.digests.whole() if validates else 0
    )
    if not check.agreement.same_value:
        common_state.report_differences(channel, f"{phase}: common state", prepared.digests)
    # The user promises a constant structure by this option. It is validated all the same if it has changed.
    is_wanted = validates or getattr(strategy, "use_cached_ckpt_structure", False)
    if is_wanted and not check.is_known:
        check.run(f"{phase}: validate")
    return prepared
