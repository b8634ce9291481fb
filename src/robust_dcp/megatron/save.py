"""Saves of the format ``torch_dist``: ``megatron.core.dist_checkpointing.save`` and Megatron's save strategies.

Stock applies factories, writes ``common.pt`` on rank 0 and writes ``metadata.json`` between its collectives, where
other ranks do not hear of a failure. Here these steps run inside exchanges, so a failure reaches all ranks. This module
owns the order of the steps.

| step | exchanges |
| --- | --- |
| prepare | ``agree``: each rank offers the signature of the shards it accesses and the digest of its common state |
| validate | none, if all ranks found this structure valid before; else a gather and a broadcast |
| write, commit | those of :func:`robust_dcp.save` |
| finish | a barrier, in which rank 0 writes ``common.pt`` and ``metadata.json`` |
| manifest | a gather of the files' hashes and a barrier; only with ``verify_integrity`` |

An asynchronous save returns when each rank has copied the data that it writes. It finishes in the finalizer of its
request.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch.distributed as dist

from robust_dcp import api
from robust_dcp.asynchronous import async_save
from robust_dcp.comm import Channel
from robust_dcp.errors import RobustCheckpointError, entry_point
from robust_dcp.megatron import common_state, integrity, versions
from robust_dcp.megatron.access import agree_on_access
from robust_dcp.megatron.async_requests import BackgroundSave, log_report, request_for
from robust_dcp.megatron.failures import as_megatron_raises, meet_before_saving
from robust_dcp.megatron.options import MegatronOptions, current_options
from robust_dcp.megatron.shards import MegatronPlanner, ShardFacts
from robust_dcp.plan.checkpoint_name import checkpoint_name
from robust_dcp.plan.clean_up import clean_up, failed_in_step
from robust_dcp.report import SaveReport
from robust_dcp.storage import RobustWriter
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import directory_path
from robust_dcp.storage.records.kinds import NotData
from robust_dcp.switch.patching import log_left_to_stock

__all__ = ["RobustSaveStrategy"]

logger = logging.getLogger(__name__)

CheckpointDir = str | os.PathLike[str]


def _save_shards(
    save: Callable[..., Any],
    strategy: Any,
    sharded_state_dict: dict[str, Any],
    writer: RobustWriter,
    timeout_seconds: float,
    process_group: dist.ProcessGroup | None,
    **known: Any,
) -> Any:
    """Save the shards of a sharded state dict, now or beside training. All ranks of the group call it together.

    Args:
        save: :func:`robust_dcp.save` or :func:`robust_dcp.async_save`.
        strategy: of Megatron. With ``FullyParallelSaveStrategyWrapper`` the global plan spreads the writes over the
            ranks of its group, anew for the shards of this save: any of them may write a shard whose main replica is
            on another. The shards' replica ids are not changed.
        sharded_state_dict: nested dicts and lists of ShardedTensor and ShardedObject, after factories were applied.
        known: arguments of :class:`MegatronPlanner`.

    Raises:
        RobustCheckpointError: any rank failed. Every rank raises it.
    """
    group = getattr(strategy, "parallelization_group", None)
    peers = () if group is None else dist.get_process_group_ranks(group)
    meet_before_saving()
    with as_megatron_raises():
        return save(
            sharded_state_dict,
            storage_writer=writer,
            planner=MegatronPlanner(peers=peers, **known),
            process_group=process_group,
            timeout_seconds=timeout_seconds,
        )


def _save_by(
    save: Callable[..., Any], strategy: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: CheckpointDir
) -> Any:
    """Save the shards as a strategy, ours or Megatron's, is asked to."""
    options, group = _options_of(_base_strategy_of(strategy))
    writer = RobustWriter(checkpoint_dir, threads=options.writer_threads)
    return _save_shards(save, strategy, sharded_state_dict, writer, options.exchange_timeout_seconds, group)


class RobustSaveStrategy(versions.TorchDistSaveShardedStrategy):
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
        process_group: the ranks that call ``dist_checkpointing.save`` together; all ranks by default.
        timeout_seconds: the timeout of each exchange between ranks.
        threads: the number of writer threads of each rank. Each writes a file.

    The defaults come from Megatron's arguments or the environment (:func:`~.options.current_options`).
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__(backend, version)
        self.process_group = process_group
        self._given = {"exchange_timeout_seconds": timeout_seconds, "writer_threads": threads}
        self.last_report: SaveReport | None = None
        """The report of this strategy's last save; ``None`` before the first. An asynchronous save sets it when
        Megatron finalizes the save."""

    @property
    def options(self) -> MegatronOptions:
        """The options of the next save."""
        given: dict[str, Any] = {name: value for name, value in self._given.items() if value is not None}
        return replace(current_options(), **given)

    @entry_point
    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: CheckpointDir) -> None:
        """Save and commit. ``last_report`` then has the report.

        Raises:
            RobustCheckpointError: any rank failed. Every rank raises it.
            ValueError: ``checkpoint_dir`` is a URL.
        """
        strategy_save(versions.TorchDistSaveShardedStrategy.save, self, sharded_state_dict, checkpoint_dir)

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
            versions.TorchDistSaveShardedStrategy.async_save, self, sharded_state_dict, checkpoint_dir, async_strategy
        )


def _options_of(base_strategy: Any) -> tuple[MegatronOptions, dist.ProcessGroup | None]:
    if isinstance(base_strategy, RobustSaveStrategy):
        return base_strategy.options, base_strategy.process_group
    return current_options(), None


@entry_point
def strategy_save(
    stock: Callable[..., Any], strategy: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: Any
) -> None:
    """``save`` of Megatron's strategy and of ``FullyParallelSaveStrategyWrapper``, for callers of these methods."""
    base = _base_strategy_of(strategy)
    if _is_written_by_ours(base):
        base.last_report = _save_by(api.save, strategy, sharded_state_dict, checkpoint_dir)
        log_report(base.last_report)
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
    background = BackgroundSave(_save_by(async_save, strategy, sharded_state_dict, checkpoint_dir))
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


@dataclass(eq=False)
class _Prepared:
    """What one rank has prepared from its state dict."""

    sharded: dict[str, Any] = field(default_factory=dict)
    facts: ShardFacts = field(default_factory=lambda: ShardFacts([]))
    common_file: bytes | None = None
    refused: dict[str, NotData] = field(default_factory=dict)
    digests: common_state.LeafDigests = field(default_factory=lambda: common_state.LeafDigests({}))


@entry_point
def save(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``dist_checkpointing.save``. ``metadata.json`` exists only if the checkpoint is complete.

    Returns:
        ``None``, or a request for an asynchronous save. The request's finalizer waits until the shards are committed,
        and then writes ``metadata.json``.

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
    options, group = _options_of(strategy)
    phase = f"save {checkpoint_name(directory)}"
    channel = Channel.for_group(group, operation=f"Megatron: {phase}", timeout_seconds=options.exchange_timeout_seconds)
    is_async, hashes_files = call["async_sharded_save"], call.get("verify_integrity", False)
    request_class = versions.async_request_class(call.get("async_strategy")) if is_async else None
    writer = RobustWriter(directory, threads=options.writer_threads)
    meet_before_saving()
    with as_megatron_raises():
        prepared = _prepare_and_validate(call, directory, strategy, channel, phase)

    def save_shards(save: Callable[..., Any]) -> Any:
        known = {"facts": prepared.facts, "refused": prepared.refused}
        timeout_seconds = options.exchange_timeout_seconds
        return _save_shards(save, call["sharded_strategy"], prepared.sharded, writer, timeout_seconds, group, **known)

    finish = _Finish(strategy, channel, phase, writer, directory, prepared.common_file)
    if not is_async:
        report = save_shards(api.save)
        log_report(report)
        finish(report, (lambda: integrity.hashes_of(directory, report.files)) if hashes_files else None)
        return None
    background = BackgroundSave(save_shards(async_save))
    hashes: Callable[[], dict[str, str]] | None = None
    if hashes_files:
        hashes = background.then(channel.ranks, lambda report: integrity.hashes_of(directory, report.files))
    return request_for(request_class, background, lambda report: finish(report, hashes))


def _prepare_and_validate(
    call: Mapping[str, Any], directory: str, strategy: Any, channel: Channel, phase: str
) -> _Prepared:
    prepared = _Prepared()
    validates = call["validate_access_integrity"]

    def prepare() -> ShardFacts:
        if channel.is_coordinator and os.path.isdir(directory) and os.listdir(directory):
            # Stock warns too and does not raise: queued jobs have nobody to remove it.
            logger.warning("Overwriting old incomplete / corrupted checkpoint...")
        prepared.sharded, common = versions.prepare_to_save(call["sharded_state_dict"], call.get("content_metadata"))
        shards = prepared.facts = ShardFacts(versions.nested_values(prepared.sharded))
        if validates:
            preprocess = call["preprocess_common_before_consistancy_check"]
            prepared.digests = common_state.leaf_digests(preprocess(common) if preprocess else common)
        if versions.common_state_is_a_sharded_object():
            replica_id = 0 if channel.is_coordinator else 1 + channel.rank
            common_object = versions.ShardedObject(versions.COMMON_STATE_KEY, common, (1,), (0,), replica_id)
            prepared.sharded[versions.COMMON_STATE_KEY] = common_object
            prepared.facts = shards.plus(common_object)
        elif channel.is_coordinator:
            prepared.common_file = common_state.encode_common(common)
            prepared.refused = common_state.refused_in(common, prepared.common_file)
        return shards

    check = agree_on_access(
        channel, f"{phase}: prepare", prepare, value=lambda: prepared.digests.whole() if validates else 0
    )
    if not check.agreement.same_value:
        common_state.report_differences(channel, f"{phase}: common state", prepared.digests)
    # The user promises a constant structure by this option. It is validated all the same if it has changed.
    is_wanted = validates or getattr(strategy, "use_cached_ckpt_structure", False)
    if is_wanted and not check.is_known:
        check.verdict(f"{phase}: validate").raise_if_wrong()
    return prepared


class _Withdrawn(msgspec.Struct, frozen=True):
    """Whether the shards were withdrawn."""

    is_done: bool


@dataclass(eq=False)
class _Finish:
    """The last step of a save, after the shards are committed. It may run much later, so it keeps no part of the state
    dict.

    Attributes:
        strategy: the strategy, without a wrapper.
        channel, phase: the channel and phase of the save.
        writer: the writer that wrote the shards.
        directory: the checkpoint's directory.
        common_file: the bytes of ``common.pt``, on the rank that writes it, if this version has one.
    """

    strategy: Any
    channel: Channel
    phase: str
    writer: RobustWriter
    directory: str
    common_file: bytes | None
    _new: list[str] = field(default_factory=list)

    @entry_point
    def __call__(self, report: SaveReport, hashes: Callable[[], dict[str, str]] | None) -> None:
        """Write the common files. If that fails, withdraw the shards.

        Args:
            report: the report of saving the shards.
            hashes: returns the hashes of the files that this rank wrote, if a manifest is wanted.
        """
        if self.strategy is not None and not isinstance(self.strategy, tuple):
            self.strategy.last_report = report
        with as_megatron_raises():
            try:
                self.channel.barrier(f"{self.phase}: finish", self._write_common_files)
                if hashes is not None:
                    integrity.save_manifest(self.channel, self.phase, self.directory, hashes)
            except RobustCheckpointError as error:
                if failed_in_step(error):
                    self._withdraw(error)
                raise

    def _write_common_files(self) -> None:
        """On rank 0. ``metadata.json`` comes last, because it says that the checkpoint is complete."""
        if not self.channel.is_coordinator:
            return
        files = {} if self.common_file is None else {common_state.COMMON_FILE: self.common_file}
        for name, data in {**files, common_state.CONFIG_FILE: versions.checkpoint_config(self.strategy)}.items():
            path = os.path.join(self.directory, name)
            is_new = not os.path.lexists(path)
            Disk().replace_file(path, data)
            if is_new:
                self._new.append(path)

    def _withdraw(self, error: RobustCheckpointError) -> None:
        """Withdraw the committed shards of an incomplete checkpoint, and the new files beside them. Never raises.

        If the shards have replaced older ones, the older ones are gone already, so the new ones stay.
        """

        def take_back() -> _Withdrawn:
            while self._new:
                Disk().unlink(self._new[-1])
                self._new.pop()
            return _Withdrawn(self.writer.directory.withdraw())

        try:
            withdrawn = self.channel.broadcast(f"{self.phase}: withdraw", take_back, _Withdrawn)
        except RobustCheckpointError as lost:
            error.message = f"{error.message}; its shards could not be removed: {lost.message}"
            return
        if withdrawn.is_done:
            clean_up(self.channel, self.phase, self.writer.directory, error)
