"""``megatron.core.dist_checkpointing.save`` for ``torch_dist``, with every step inside an exchange.

Stock applies factories, writes ``common.pt`` on rank 0 and writes ``metadata.json`` between its collectives, where
other ranks do not hear of a failure. Here these steps run inside exchanges, so a failure reaches all ranks. This module
owns the order of the steps. Called by the replacement in ``save_patches``.

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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from robust_dcp.comm import Channel
from robust_dcp.errors import RobustCheckpointError, entry_point
from robust_dcp.megatron import versions
from robust_dcp.megatron.async_requests import request_for
from robust_dcp.megatron.checkpoint_call import meet_before_saving
from robust_dcp.megatron.checks import common_state, integrity
from robust_dcp.megatron.checks.shard_facts import ShardFacts
from robust_dcp.megatron.checks.validation import agree_on_access
from robust_dcp.megatron.failures import as_megatron_raises
from robust_dcp.megatron.hooks.options import MegatronOptions
from robust_dcp.megatron.saving.save_strategy import RobustSaveStrategy, ShardedSave
from robust_dcp.megatron.writing import writer_for
from robust_dcp.plan.checkpoint_name import checkpoint_name
from robust_dcp.plan.clean_up import clean_up, failed_in_step
from robust_dcp.report import SaveReport
from robust_dcp.storage import RobustWriter
from robust_dcp.storage.files.paths import directory_path
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.records.objects import Refusal

__all__ = ["SaveCall", "base_strategy_of", "is_ours", "save_torch_dist"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveCall:
    """The arguments of one call of ``dist_checkpointing.save`` in any version of Megatron.

    Attributes:
        sharded_state_dict, checkpoint_dir, sharded_strategy: the arguments of the call.
        validate_access_integrity: whether to check that each shard has its main replica on exactly one rank.
        is_async: the argument ``async_sharded_save``.
        preprocess_common: applied to the common state before ranks compare it.
        content_metadata: put into the common state.
        async_strategy: the package that owns the queue of an asynchronous save; ``None`` if Megatron has only one.
        verify_integrity: whether to write Megatron's own manifest of all files (0.19).
    """

    sharded_state_dict: dict[str, Any]
    checkpoint_dir: str | os.PathLike[str]
    sharded_strategy: Any
    validate_access_integrity: bool
    is_async: bool
    preprocess_common: Callable[[dict[str, Any]], Any] | None
    content_metadata: dict[str, Any] | None
    async_strategy: str | None
    verify_integrity: bool

    @classmethod
    def of(cls, save: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> SaveCall:
        """Read the arguments of ``save(*args, **kwargs)``, where ``save`` is Megatron's own function.

        Raises:
            TypeError: ``save`` does not take these arguments.
        """
        bound = inspect.signature(save).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        return cls(
            sharded_state_dict=given["sharded_state_dict"],
            checkpoint_dir=given["checkpoint_dir"],
            sharded_strategy=given["sharded_strategy"],
            validate_access_integrity=given["validate_access_integrity"],
            is_async=given["async_sharded_save"],
            preprocess_common=given["preprocess_common_before_consistancy_check"],
            content_metadata=given.get("content_metadata"),
            async_strategy=given.get("async_strategy"),
            verify_integrity=given.get("verify_integrity", False),
        )


def base_strategy_of(strategy: Any) -> Any:
    """The strategy inside ``FullyParallelSaveStrategyWrapper``, which is not needed: our plan spreads the writes."""
    while hasattr(strategy, "base_strategy"):
        strategy = strategy.base_strategy
    return strategy


def name_of_strategy(strategy: Any) -> str:
    """A name for the log: the backend, or the class of the strategy inside a wrapper."""
    strategy = base_strategy_of(strategy)
    return str(strategy[0]) if isinstance(strategy, tuple) else type(strategy).__name__


def parallelization_group_of(strategy: Any) -> Any:
    """The group over which ``FullyParallelSaveStrategyWrapper`` spreads the writes; ``None`` for other strategies."""
    return getattr(strategy, "parallelization_group", None)


def is_ours(call: SaveCall, *, chosen: bool) -> bool:
    """Whether robust_dcp makes this save: always with its own strategy, and with Megatron's only if it is chosen."""
    strategy = base_strategy_of(call.sharded_strategy)
    if isinstance(strategy, RobustSaveStrategy):
        return True
    if isinstance(strategy, tuple):
        return chosen and strategy[0] == "torch_dist"
    return chosen and (strategy is None or versions.writes_torch_dist(strategy))


@dataclass(eq=False)
class _Prepared:
    """What one rank has prepared from its state dict."""

    sharded: dict[str, Any] = field(default_factory=dict)
    facts: ShardFacts = field(default_factory=lambda: ShardFacts([]))
    common_file: bytes | None = None
    refused: dict[str, Refusal] = field(default_factory=dict)
    digests: common_state.LeafDigests = field(default_factory=lambda: common_state.LeafDigests({}))


@entry_point
def save_torch_dist(call: SaveCall, options: MegatronOptions) -> Any:
    """Save a checkpoint that Megatron can load. ``metadata.json`` exists only if the checkpoint is complete.

    Returns:
        ``None``, or a request for an asynchronous save. The request's finalizer waits until the shards are committed,
        and then writes ``metadata.json``.

    Raises:
        ValueError: ``checkpoint_dir`` is a URL.
        InvalidAccess: the ranks do not access each shard exactly once.
        RobustCheckpointError: something failed on any rank. All ranks raise the same error.
    """
    directory = directory_path(call.checkpoint_dir)
    call = replace(call, checkpoint_dir=directory)
    strategy = base_strategy_of(call.sharded_strategy)
    group = None
    if isinstance(strategy, RobustSaveStrategy):
        options, group = strategy.options, strategy.process_group
    phase = f"save {checkpoint_name(call.checkpoint_dir)}"
    channel = Channel.for_group(group, operation=f"Megatron: {phase}", timeout_seconds=options.exchange_timeout_seconds)
    request_class = versions.async_request_class(call.async_strategy) if call.is_async else None
    writer = writer_for(directory, options)
    meet_before_saving()
    with as_megatron_raises():
        prepared = _prepare_and_validate(call, strategy, channel, phase)

    def hash_files(report: SaveReport) -> dict[str, str]:
        return integrity.hashes_of(directory, report.files)

    save = ShardedSave(
        prepared.sharded,
        directory,
        options,
        group,
        writer,
        parallelization_group=parallelization_group_of(call.sharded_strategy),
        facts=prepared.facts,
        refused=prepared.refused,
    )
    finish = _Finish(strategy, channel, phase, writer, _CommonFiles(directory, prepared.common_file))
    if request_class is None:
        report = save.write()
        finish(report, (lambda: hash_files(report)) if call.verify_integrity else None)
        return None
    background = save.start()
    hashes = background.then(channel.ranks, hash_files) if call.verify_integrity else None
    return request_for(request_class, background, lambda report: finish(report, hashes))


def _prepare_and_validate(call: SaveCall, strategy: Any, channel: Channel, phase: str) -> _Prepared:
    prepared = _Prepared()

    def prepare() -> ShardFacts:
        if channel.is_coordinator:
            _warn_of_what_is_there(call.checkpoint_dir)
        prepared.sharded, common = versions.prepare_to_save(call.sharded_state_dict, call.content_metadata)
        shards = prepared.facts = ShardFacts(versions.nested_values(prepared.sharded))
        if call.validate_access_integrity:
            compared = call.preprocess_common(common) if call.preprocess_common else common
            prepared.digests = common_state.leaf_digests(compared)
        if versions.common_state_is_a_sharded_object():
            common_object = _common_object(common, channel)
            prepared.sharded[versions.COMMON_STATE_KEY] = common_object
            prepared.facts = shards.plus(common_object)
        elif channel.is_coordinator:
            prepared.common_file = common_state.encode_common(common)
            prepared.refused = common_state.refused_in(common, prepared.common_file)
        return shards

    check, agreement = agree_on_access(
        channel,
        f"{phase}: prepare",
        prepare,
        value=lambda: prepared.digests.whole() if call.validate_access_integrity else 0,
    )
    if not agreement.same_value:
        common_state.report_differences(channel, f"{phase}: common state", prepared.digests)
    # The user promises a constant structure by this option. It is validated all the same if it has changed.
    is_wanted = call.validate_access_integrity or getattr(strategy, "use_cached_ckpt_structure", False)
    if is_wanted and not check.is_known(agreement):
        check.finish(channel, f"{phase}: validate", agreement)
    return prepared


def _common_object(common: dict[str, Any], channel: Channel) -> Any:
    return versions.ShardedObject(
        key=versions.COMMON_STATE_KEY,
        data=common,
        global_shape=(1,),
        global_offset=(0,),
        replica_id=0 if channel.is_coordinator else 1 + channel.rank,
    )


class _CommonFiles:
    """The files that rank 0 writes beside the shards. It remembers which of them did not exist before.

    Args:
        directory: the checkpoint's directory.
        common_file: the bytes of ``common.pt``, if this version has one.
    """

    def __init__(self, directory: str, common_file: bytes | None) -> None:
        self.directory = directory
        self._common_file = common_file
        self._new: list[str] = []

    def write(self, strategy: Any) -> None:
        """Write the files. ``metadata.json`` comes last, because it says that the checkpoint is complete."""
        if self._common_file is not None:
            self._write(common_state.COMMON_FILE, self._common_file)
        self._write(common_state.CONFIG_FILE, versions.checkpoint_config(strategy))

    def _write(self, name: str, data: bytes) -> None:
        path = os.path.join(self.directory, name)
        is_new = not os.path.lexists(path)
        common_state.write_durably(self.directory, name, data)
        if is_new:
            self._new.append(path)

    def remove(self) -> None:
        """Remove the files that did not exist before, ``metadata.json`` first."""
        disk = PosixDisk()
        while self._new:
            disk.unlink(self._new[-1])
            self._new.pop()


class _Finish:
    """The last step of a save, after the shards are committed. It may run much later, so it keeps no part of the state
    dict.

    Args:
        strategy: the strategy, without a wrapper.
        channel, phase: the channel and phase of the save.
        writer: the writer that wrote the shards.
        files: the files beside the shards.
    """

    def __init__(self, strategy: Any, channel: Channel, phase: str, writer: RobustWriter, files: _CommonFiles) -> None:
        self._strategy = strategy
        self._channel = channel
        self._phase = phase
        self._writer = writer
        self._files = files

    @entry_point
    def __call__(self, report: SaveReport, hashes: Callable[[], dict[str, str]] | None) -> None:
        """Write the common files. If that fails, withdraw the shards.

        Args:
            report: the report of saving the shards.
            hashes: returns the hashes of the files that this rank wrote, if a manifest is wanted.
        """
        if self._strategy is not None and not isinstance(self._strategy, tuple):
            self._strategy.last_report = report
        channel, phase = self._channel, self._phase
        with as_megatron_raises():
            try:
                channel.barrier(f"{phase}: finish", self._write_common_files)
                if hashes is not None:
                    integrity.save_manifest(channel, phase, self._files.directory, hashes)
            except RobustCheckpointError as error:
                if failed_in_step(error):
                    _withdraw(channel, phase, self._writer, self._files, error)
                raise

    def _write_common_files(self) -> None:
        if self._channel.is_coordinator:
            self._files.write(self._strategy)


class _Withdrawn(msgspec.Struct, frozen=True):
    """Whether the shards were withdrawn."""

    is_done: bool


def _withdraw(
    channel: Channel, phase: str, writer: RobustWriter, files: _CommonFiles, error: RobustCheckpointError
) -> None:
    """Withdraw the committed shards of an incomplete checkpoint. Never raises.

    If the shards have replaced older ones, the older ones are gone already, so the new ones stay.
    """

    def take_back() -> _Withdrawn:
        files.remove()
        return _Withdrawn(writer.directory.withdraw())

    try:
        is_withdrawn = channel.broadcast(f"{phase}: withdraw", take_back, _Withdrawn).is_done
    except RobustCheckpointError as lost:
        error.message = f"{error.message}; its shards could not be removed: {lost.message}"
        return
    if is_withdrawn:
        clean_up(channel, phase, writer.directory, error)


def _warn_of_what_is_there(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Warn, as stock does, that an incomplete checkpoint will be overwritten. Queued jobs have nobody to remove it."""
    if os.path.isdir(checkpoint_dir) and os.listdir(checkpoint_dir):
        logger.warning("Overwriting old incomplete / corrupted checkpoint...")
