"""``megatron.core.dist_checkpointing.load`` for ``torch_dist``, with every step inside an exchange.

If a rank fails in a step, all ranks hear of it. This module owns the order of the steps. Called by the replacement in
``load_patches``.

| step | exchanges |
| --- | --- |
| verify files | a broadcast of the manifest and a barrier; only with ``verify_integrity`` |
| common state | a broadcast: rank 0 reads ``metadata.json`` and the common state |
| prepare | ``agree``: each rank offers the signature of the shards that it asks for |
| validate | none, if all ranks found this structure valid before and the strictness mode needs no keys of all ranks |
| strictness | a broadcast of the checkpoint's keys and a barrier; only in modes that compare keys |
| read | those of :func:`robust_dcp.load`; with ``FullyParallelLoadStrategyWrapper`` in each of its groups |
| merge | a barrier |
"""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from robust_dcp import api
from robust_dcp.comm import Agreement, Channel
from robust_dcp.errors import entry_point
from robust_dcp.megatron import versions
from robust_dcp.megatron.checks import common_state, integrity
from robust_dcp.megatron.checks.validation import AccessCheck, GlobalMetadata, agree_on_access
from robust_dcp.megatron.failures import as_megatron_raises, failure_sent_to_all
from robust_dcp.megatron.hooks.options import MegatronOptions, current_options
from robust_dcp.megatron.loading.load_strategy import (
    RobustLoadStrategy,
    checkpoint_reader,
    load_in_parallel,
    read_sharded,
    stored_keys,
)
from robust_dcp.plan.checkpoint_name import checkpoint_name
from robust_dcp.storage.files.paths import directory_path
from robust_dcp.storage.records.objects import load_object
from robust_dcp.switch.stock_paths import log_left_to_stock

__all__ = ["LoadCall", "load_common_state", "load_torch_dist"]


@dataclass(frozen=True)
class LoadCall:
    """The arguments of one call of ``dist_checkpointing.load`` in any version of Megatron.

    Attributes:
        sharded_state_dict, checkpoint_dir, sharded_strategy, strict: the arguments of the call.
        validate_access_integrity: whether to check that each shard has its main replica on exactly one rank.
        verify_integrity: whether to compare all files with Megatron's manifest first (0.19).
        process_group: the ranks that load together; ``None`` for all.
    """

    sharded_state_dict: dict[str, Any]
    checkpoint_dir: str
    sharded_strategy: Any
    strict: Any
    validate_access_integrity: bool
    verify_integrity: bool
    process_group: dist.ProcessGroup | None

    @classmethod
    def of(cls, load: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LoadCall:
        """Read the arguments of ``load(*args, **kwargs)``, where ``load`` is Megatron's own function.

        Raises:
            TypeError: ``load`` does not take these arguments.
            ValueError: ``checkpoint_dir`` is a URL.
        """
        bound = inspect.signature(load).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        strategy = given["sharded_strategy"]
        group = given.get("process_group")
        if group is None and isinstance(strategy, RobustLoadStrategy):
            group = strategy.process_group
        return cls(
            sharded_state_dict=given["sharded_state_dict"],
            checkpoint_dir=directory_path(given["checkpoint_dir"]),
            sharded_strategy=strategy,
            strict=given["strict"],
            validate_access_integrity=given["validate_access_integrity"],
            verify_integrity=given.get("verify_integrity", False),
            process_group=group,
        )


class _Opened(msgspec.Struct, frozen=True):
    """What rank 0 found in the directory. ``common`` has the bytes of the common state, in ``torch.save``'s format.
    ``is_file`` says whether they came from ``common.pt``."""

    backend: str
    common: bytes = b""
    is_file: bool = True


class _Keys(msgspec.Struct, frozen=True):
    """The keys of the checkpoint, which rank 0 read from its metadata."""

    keys: tuple[str, ...]


@entry_point
def load_torch_dist(call: LoadCall, options: MegatronOptions, stock: Callable[[], Any]) -> Any:
    """Load a Megatron checkpoint that robust_dcp or stock has saved.

    Args:
        call: the arguments of the load.
        options: the options of the exchanges.
        stock: Megatron's own load. All ranks call it if the checkpoint's backend is not ``torch_dist``.

    Returns:
        What ``dist_checkpointing.load`` returns.

    Raises:
        InvalidAccess: the ranks do not access each shard exactly once.
        RobustCheckpointError: something failed on any rank. All ranks raise the same error.
    """
    timeout = options.exchange_timeout_seconds
    if isinstance(call.sharded_strategy, RobustLoadStrategy):
        timeout = call.sharded_strategy.timeout_seconds
    phase = f"load {checkpoint_name(call.checkpoint_dir)}"
    channel = Channel.for_group(call.process_group, operation=f"Megatron: {phase}", timeout_seconds=timeout)
    with as_megatron_raises():
        if call.verify_integrity:
            integrity.verify_files(channel, phase, call.checkpoint_dir)
        opened = channel.broadcast(f"{phase}: common state", lambda: _open(call), _Opened)
        if opened.backend != "torch_dist":
            log_left_to_stock(f"loads of {opened.backend} checkpoints", "only torch_dist is taken over")
            return stock()
        return _Load(call, channel, phase, opened).run()


@entry_point
def load_common_state(checkpoint_dir: str | os.PathLike[str]) -> Any:
    """``dist_checkpointing.load_common_state_dict``. It asks no other rank and runs no code from the file.

    Raises:
        ValueError: ``checkpoint_dir`` is a URL.
        CheckpointingException: there is no checkpoint.
        UnsafeCheckpoint: the common state holds an object of a class that is not known to be plain data.
        CorruptCheckpoint: the common state is damaged.
    """
    directory = directory_path(checkpoint_dir)
    versions.backend_of(directory)
    return _decoded(_read_common(directory), directory)


class _Load:
    """One load on one rank."""

    def __init__(self, call: LoadCall, channel: Channel, phase: str, opened: _Opened) -> None:
        self._call = call
        self._channel = channel
        self._phase = phase
        self._opened = opened
        self._result: dict[str, Any] = {}
        self._sharded: dict[str, Any] = {}
        self._factories: dict[str, Any] = {}
        self._missing: set[str] = set()
        self._unexpected: set[str] = set()

    def run(self) -> Any:
        strict, needs_checkpoint_keys, needs_global_keys, returns_mismatch = versions.strictness(self._call.strict)
        check, agreement = agree_on_access(self._channel, f"{self._phase}: prepare", self._prepare)
        global_metadata = self._validate(check, agreement, needs_keys=needs_global_keys)
        if needs_checkpoint_keys:
            self._check_keys(strict, global_metadata)
        loaded = self._read()
        self._channel.barrier(f"{self._phase}: merge", lambda: self._merge(loaded))
        return (self._result, self._missing, self._unexpected) if returns_mismatch else self._result

    def _prepare(self) -> list[Any]:
        call = self._call
        self._result = _decoded(self._opened, call.checkpoint_dir)
        self._sharded, not_persistent, self._factories = versions.prepare_to_load(
            call.sharded_state_dict, call.sharded_strategy
        )
        versions.merge(self._result, not_persistent)
        return list(versions.nested_values(self._sharded))

    def _validate(self, check: AccessCheck, agreement: Agreement, *, needs_keys: bool) -> GlobalMetadata | None:
        phase = f"{self._phase}: validate"
        if needs_keys:
            found = check.keys_of_all(self._channel, phase)
            if self._call.validate_access_integrity:
                found.raise_if_wrong()
                check.remember(self._channel, agreement)
            return found
        if self._call.validate_access_integrity and not check.is_known(agreement):
            check.finish(self._channel, phase, agreement)
        return None

    def _check_keys(self, strict: Any, global_metadata: GlobalMetadata | None) -> None:
        def find() -> _Keys:
            return _Keys(tuple(sorted(stored_keys(checkpoint_reader(self._call.checkpoint_dir).read_metadata()))))

        stored = self._channel.broadcast(f"{self._phase}: keys", find, _Keys)

        def check() -> None:
            self._sharded, self._missing, self._unexpected = versions.check_keys(
                self._sharded, strict, global_metadata, stored.keys
            )

        self._channel.barrier(f"{self._phase}: strictness", check)

    def _read(self) -> dict[str, Any]:
        call, strategy = self._call, self._call.sharded_strategy
        if versions.is_parallel_load_wrapper(strategy):
            return self._read_in_parallel(strategy)
        if not versions.reads_torch_dist(strategy):
            loaded: dict[str, Any] = strategy.load(self._sharded, call.checkpoint_dir)
            return loaded
        return read_sharded(
            self._sharded,
            checkpoint_reader(call.checkpoint_dir),
            timeout_seconds=self._channel.timeout_seconds,
            process_group=call.process_group,
            strategy=strategy,
        )

    def _read_in_parallel(self, wrapper: Any) -> dict[str, Any]:
        """Each parallelization group reads by itself. If one group fails, all ranks raise its error."""
        loaded: dict[str, Any] = {}

        def load() -> None:
            with failure_sent_to_all(dist.get_rank(wrapper.parallelization_group)):
                loaded.update(
                    load_in_parallel(wrapper, self._sharded, self._call.checkpoint_dir, self._channel.timeout_seconds)
                )

        self._channel.barrier(f"{self._phase}: read in parallel", load)
        return loaded

    def _merge(self, loaded: dict[str, Any]) -> None:
        versions.merge(self._result, loaded)
        self._result = versions.merge_factories(self._result, self._factories)


def _open(call: LoadCall) -> _Opened:
    backend = versions.backend_of(call.checkpoint_dir)
    return _read_common(call.checkpoint_dir) if backend == "torch_dist" else _Opened(backend)


def _read_common(directory: str) -> _Opened:
    """Read the common state's bytes from ``common.pt``, or from a ShardedObject as Megatron 0.19 saves it."""
    path = os.path.join(directory, common_state.COMMON_FILE)
    file = common_state.read_file(path)
    if file is not None:
        return _Opened("torch_dist", file)
    key = versions.ShardedObject(versions.COMMON_STATE_KEY, None, (1,), (0,)).unique_key
    reader, planner = checkpoint_reader(directory), _KeepsBytes()
    if key not in reader.read_metadata().state_dict_metadata:
        raise versions.CheckpointingException(f"Common file {path} does not exist")
    with failure_sent_to_all(0):
        api.load({key: None}, storage_reader=reader, planner=planner, no_dist=True)
    return _Opened("torch_dist", planner.data, is_file=False)


class _KeepsBytes(DefaultLoadPlanner):
    """Loads one object and keeps its stored bytes in ``data``. Each rank decodes them later."""

    data = b""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.data = value.getvalue()


def _decoded(opened: _Opened, directory: str) -> Any:
    """Decode the common state without running any code that its bytes name."""
    file, item = directory, versions.COMMON_STATE_KEY
    if opened.is_file:
        file, item = os.path.join(directory, common_state.COMMON_FILE), common_state.COMMON_FILE
    found = load_object(opened.common, file=file, item=item, trusted=current_options().trusted)
    return found if opened.is_file else found[0]
