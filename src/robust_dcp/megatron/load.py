"""Loads of the format ``torch_dist``: ``megatron.core.dist_checkpointing.load`` and Megatron's load strategies.

If a rank fails in a step, all ranks hear of it. No object that is read runs code, and every tensor is filled
completely. This module owns the order of the steps.

From 0.18 on Megatron's ranks talk to each other only if something is validated. Without that a rank may load by itself,
and here each step is then done on that rank alone.

| step | exchanges |
| --- | --- |
| verify files | a broadcast of the manifest and a barrier; only with ``verify_integrity`` |
| common state | a broadcast: rank 0 reads ``metadata.json`` and the common state |
| prepare | ``agree``: each rank offers the signature of the shards that it asks for |
| validate | a gather, if this structure was not found valid before, or the mode needs the keys of all ranks |
| strictness | a broadcast of the checkpoint's keys and a barrier; only in modes that compare keys |
| read | those of :func:`robust_dcp.load`; with ``FullyParallelLoadStrategyWrapper`` in each of its groups |
| merge | ``agree``: rank 0 looks whether another save was committed since it has read the common state |
"""

from __future__ import annotations

import inspect
import io
import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner, TorchDistLoadShardedStrategy
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from robust_dcp import api
from robust_dcp.comm import Channel, Offer
from robust_dcp.errors import CorruptCheckpoint, ExchangeError, RobustCheckpointError, entry_point
from robust_dcp.megatron import common_state, integrity, versions
from robust_dcp.megatron.access import PART, agree_on_access, key_of
from robust_dcp.megatron.failures import as_megatron_raises, failure_sent_to_all
from robust_dcp.megatron.options import current_options
from robust_dcp.megatron.shards import ShardFacts
from robust_dcp.nodes.files import make_whole
from robust_dcp.plan.load_items import plan_reads
from robust_dcp.plan.load_planner import check_filled
from robust_dcp.report import LoadReport
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import checkpoint_name, directory_path
from robust_dcp.storage.index.stored_index import index_of
from robust_dcp.storage.pieces import PieceReader
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.reading.metadata_source import MetadataSource, overwritten
from robust_dcp.storage.reading.reads import PlannedItems
from robust_dcp.storage.records.objects import load_object
from robust_dcp.storage.records.record import ZIP_MAGIC
from robust_dcp.switch.patching import log_left_to_stock

logger = logging.getLogger(__name__)

CheckpointDir = str | os.PathLike[str]

_BUFFER_NBYTES = 64 << 20

LAST_LOADED: list[str] = []
"""The directory that :func:`load` has loaded last."""


class MegatronLoadPlanner(MCoreLoadPlanner):
    """``MCoreLoadPlanner`` (global shapes, ``allow_shape_mismatch``) with more checks, and with plans from an index."""

    state_dict: dict[str, Any]

    # Megatron overrides these only for quantized tensors. With DCP's own methods tensors may be filled in any order.
    resolve_tensor = DefaultLoadPlanner.resolve_tensor
    commit_tensor = DefaultLoadPlanner.commit_tensor

    def __init__(self, checkpoint: str, shards: list[ShardedTensor], *, trusted: bool, **options: Any) -> None:
        super().__init__(
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
            shapes_validation_sharded_tensors=[shard for shard in shards if not shard.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={shard.key: shard for shard in shards if shard.allow_shape_mismatch},
            **options,
        )
        self._checkpoint = checkpoint
        self._trusted = trusted

    def create_local_plan(self) -> LoadPlan:
        """Make Megatron's plan, and check that it fills every requested tensor.

        Raises:
            CorruptCheckpoint: the checkpoint's chunks do not fill all of a tensor. Stock would leave the rest as it is.
            CheckpointingException, KeyError, RuntimeError: as ``MCoreLoadPlanner``.
        """
        index = index_of(self.metadata)
        if index is not None:
            index.find_all(self.state_dict)
        plan: LoadPlan = super().create_local_plan() if index is None else self._plan_by_index(self.metadata)
        flexible = self.allow_shape_mismatch_sharded_tensors or {}
        tensors = {key: value for key, value in self.state_dict.items() if key not in flexible}
        check_filled(PlannedItems.of(plan.items), tensors, self._checkpoint)
        return plan

    def _plan_by_index(self, metadata: Metadata) -> LoadPlan:
        """Look up the tensors that have their saved shape. Megatron plans the rest, and raises what must be refused."""
        whole = self.state_dict
        looked_up = {key: value for key, value in whole.items() if _fits(value, metadata.state_dict_metadata.get(key))}
        self.state_dict = {key: value for key, value in whole.items() if key not in looked_up}
        try:
            others = super().create_local_plan()
        finally:
            self.state_dict = whole
        planned: Any = plan_reads(looked_up, metadata, PlannedItems(others=others.items))
        return LoadPlan(planned)  # no list, but as good

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the state dict if it is plain data.

        Raises:
            UnsafeCheckpoint: unpickling the object would run code.
        """
        key = read_item.dest_index.fqn
        self.state_dict[key] = load_object(value, file=self._checkpoint, item=key, trusted=self._trusted)


def _fits(value: Any, saved: Any) -> bool:
    size = getattr(value, "size", None)
    return isinstance(saved, TensorStorageMetadata) and callable(size) and size() == saved.size


class _QuantizedLoadPlanner(MegatronLoadPlanner):
    """Reads tensors of Transformer Engine's FP8 classes one by one, as Megatron does."""

    resolve_tensor = MCoreLoadPlanner.resolve_tensor
    commit_tensor = MCoreLoadPlanner.commit_tensor


def _reader(checkpoint_dir: CheckpointDir, *, share_reads: bool = False) -> RobustReader:
    """A reader with the options of robust_dcp. Only ``FullyParallelLoadStrategyWrapper`` asks to share reads."""
    directory = directory_path(checkpoint_dir)  # the files of Megatron beside it are read from there, too
    return RobustReader(directory, trusted=current_options().trusted, share_reads=share_reads)


@entry_point
def _read_sharded(
    sharded_state_dict: dict[str, Any],
    reader: RobustReader,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    strategy: Any = None,
) -> dict[str, Any]:
    """Read the shards of a sharded state dict. A shard that has a tensor is read into this tensor.

    Args:
        sharded_state_dict: nested dicts and lists of ShardedTensor and ShardedObject, after factories were applied.
        reader: the reader of the checkpoint.
        process_group: the ranks that load together; ``None`` for all.
        no_dist: whether this rank loads alone, without exchanges.
        strategy: Megatron's strategy. Its options are used, and the attributes that a load sets are set on it.

    Returns:
        The same nested state dict, with tensors and objects for leaves.

    Raises:
        RobustCheckpointError: any rank that takes part failed. All of them raise it.
    """
    name, timeout_seconds = checkpoint_name(reader.path), current_options().exchange_timeout_seconds
    targets: dict[str, Any] = {}
    restore: Callable[[dict[str, Any]], dict[str, Any]] = dict

    def translate() -> None:
        nonlocal targets, restore
        targets, restore = versions.to_dcp_targets(sharded_state_dict)

    channel = Channel.for_group(
        process_group, operation=f"translate {name}", timeout_seconds=timeout_seconds, no_dist=no_dist
    )
    stream_dequantize = getattr(strategy, "stream_ckpt_dequant", None)
    options = {} if stream_dequantize is None else {"stream_ckpt_dequant": stream_dequantize}
    with as_megatron_raises():
        channel.barrier(f"load {name}: translate", translate)
        shards = [shard for shard in nested_values(sharded_state_dict) if isinstance(shard, ShardedTensor)]
        make = _QuantizedLoadPlanner if any(map(versions.has_quantized_data, shards)) else MegatronLoadPlanner
        planner = make(name, shards, trusted=current_options().trusted, **options)
        report = api.load(
            targets,
            storage_reader=reader,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            timeout_seconds=timeout_seconds,
        )
    if isinstance(strategy, TorchDistLoadShardedStrategy):
        strategy.cached_global_metadata = planner.metadata
        strategy.last_report = report
    return restore(targets)


class RobustLoadStrategy(TorchDistLoadShardedStrategy):
    """Loads Megatron checkpoints that robust_dcp or stock has saved.

    It verifies checksums, reads in parallel, and runs no code from the checkpoint.

        from megatron.core import dist_checkpointing
        from robust_dcp.megatron import RobustLoadStrategy

        state_dict = dist_checkpointing.load(sharded_state_dict, checkpoint_dir, RobustLoadStrategy())

    Attributes:
        cached_global_metadata: the metadata of the checkpoint that was loaded last.
        last_report: the report of the last load.
    """

    last_report: LoadReport | None = None

    @entry_point
    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: CheckpointDir, async_strategy: str | None = None
    ) -> dict[str, Any]:
        """Load the shards: on all ranks together up to Megatron-Core 0.17, each rank by itself from 0.18 on.

        Args:
            sharded_state_dict: the shards to load, with the tensors to load them into.
            checkpoint_dir: the checkpoint's directory.
            async_strategy: ignored. Megatron passes it, but our loads do not depend on it.

        Raises:
            RobustCheckpointError: any rank that takes part failed. Every one of them raises it.
        """
        return strategy_load(None, self, sharded_state_dict, checkpoint_dir)

    # A load of stock with this strategy calls these two, and stock's own would run code that `.metadata` names.
    def load_tensors_metadata(self, checkpoint_dir: CheckpointDir, metadata: Metadata | None = None) -> dict[str, Any]:
        """The tensors of a checkpoint, without data. Asks no other rank."""
        stock = TorchDistLoadShardedStrategy.load_tensors_metadata
        return load_tensors_metadata(stock, self, checkpoint_dir, metadata)

    def load_sharded_metadata(self, checkpoint_dir: CheckpointDir) -> dict[str, Any]:
        """The tensors and objects of a checkpoint, without data. Asks no other rank."""
        return load_sharded_metadata(None, self, checkpoint_dir)


def strategy_load(
    stock: Any, strategy: Any, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, *_: Any, **__: Any
) -> dict[str, Any]:
    """``TorchDistLoadShardedStrategy.load``, for callers that call the strategy themselves.

    All ranks load together if they do so in the installed version. From 0.18 on each rank loads by itself.
    """
    return _read_sharded(
        sharded_state_dict,
        _reader(checkpoint_dir),
        no_dist=not versions.load_is_collective(),
        strategy=strategy,
    )


@entry_point
def parallel_load(
    stock: Callable[..., Any],
    wrapper: Any,
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``FullyParallelLoadStrategyWrapper.load``, around a strategy that reads ``torch_dist``. All ranks of its group
    call it.

    If several ranks need the same bytes, one rank reads them and passes them on, as in any load with shared reads. Of
    Megatron's wrapper the group and the base strategy are used. Its cached distribution is not.
    """
    strategy = wrapper.base_strategy
    if not versions.reads_torch_dist(strategy):
        name = type(strategy).__name__
        log_left_to_stock(f"loads by {name}", "a strategy that loads in its own way is left to do so")
        return stock(wrapper, sharded_state_dict, checkpoint_dir, *args, **kwargs)
    loaded = _read_sharded(
        versions.dequantized(sharded_state_dict),
        _reader(checkpoint_dir, share_reads=True),
        process_group=wrapper.parallelization_group,
        strategy=strategy,
    )
    wrapper.cached_global_metadata = getattr(strategy, "cached_global_metadata", None)
    return loaded


def load_tensors_metadata(
    stock: Callable[..., dict[str, Any]], strategy: Any, checkpoint_dir: CheckpointDir, metadata: Any = None
) -> dict[str, Any]:
    """``TorchDistLoadShardedStrategy.load_tensors_metadata``. Nothing in ``.metadata`` is executed."""
    return stock(strategy, checkpoint_dir, _reader(checkpoint_dir).read_metadata() if metadata is None else metadata)


def load_sharded_metadata(_: Any, strategy: Any, checkpoint_dir: CheckpointDir) -> dict[str, Any]:
    """``load_sharded_metadata``: the ShardedTensors (each as one unsharded whole) and ShardedObjects, without data."""
    metadata = _reader(checkpoint_dir).read_metadata()
    objects = {}
    for key, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, BytesStorageMetadata):
            found = ShardedObject.empty_from_unique_key(key)
            objects[found.unique_key] = found
    return {**objects, **strategy.load_tensors_metadata(checkpoint_dir, metadata)}


class _Opened(msgspec.Struct, frozen=True):
    """What rank 0 found in the directory. ``common`` has the bytes of the common state, in ``torch.save``'s format.
    ``is_file`` says whether they came from ``common.pt``, and ``fit`` tells this ``.metadata`` from other saves'."""

    backend: str
    common: bytes = b""
    is_file: bool = True
    fit: bytes = b""


class _Keys(msgspec.Struct, frozen=True):
    """What rank 0 tells: the keys of the checkpoint, and those of all ranks if they were gathered."""

    stored: tuple[str, ...]
    asked: tuple[str, ...]


@entry_point
def load(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``dist_checkpointing.load`` of a checkpoint that robust_dcp or stock has saved. Stock loads other backends.

    It is collective where Megatron's is: up to 0.17 always, from 0.18 on if it validates the access (the default),
    needs the keys of all ranks, or verifies files.

    Raises:
        InvalidAccess: the ranks do not access each shard exactly once.
        RobustCheckpointError: something failed on any rank. All ranks raise the same error.
    """
    bound = inspect.signature(stock).bind(*args, **kwargs)
    bound.apply_defaults()
    return _load(stock, bound, is_last_try=False)


def _load(stock: Callable[..., Any], bound: inspect.BoundArguments, *, is_last_try: bool) -> Any:
    call = bound.arguments
    directory, strategy = directory_path(call["checkpoint_dir"]), call["sharded_strategy"]
    group, timeout_seconds = call.get("process_group"), current_options().exchange_timeout_seconds
    phase = f"load {checkpoint_name(directory)}"
    strict, needs_checkpoint_keys, needs_global_keys, returns_mismatch = versions.strictness(call["strict"])
    validates, verifies_files = call["validate_access_integrity"], call.get("verify_integrity", False)
    no_dist = not (versions.load_is_collective() or validates or needs_global_keys or verifies_files)
    channel = Channel.for_group(group, operation=f"Megatron: {phase}", timeout_seconds=timeout_seconds, no_dist=no_dist)
    with as_megatron_raises():
        if verifies_files:
            integrity.verify_files(channel, phase, directory)
        try:
            opened = channel.broadcast(f"{phase}: common state", lambda: _open(directory), _Opened)
        except RobustCheckpointError as error:
            # Rank 0 may be on a node that has lost its drive.
            if isinstance(error, ExchangeError) or no_dist or not make_whole(channel, phase, directory).was_lacking:
                raise
            opened = channel.broadcast(f"{phase}: common state", lambda: _open(directory), _Opened)
        if opened.backend != "torch_dist":
            log_left_to_stock(f"loads of {opened.backend} checkpoints", "only torch_dist is taken over")
            return stock(*bound.args, **bound.kwargs)

        result: dict[str, Any] = {}
        sharded: dict[str, Any] = {}
        factories: dict[str, Any] = {}

        def prepare() -> ShardFacts:
            nonlocal result, sharded, factories
            result = _decoded(opened, directory)
            sharded, not_persistent, factories = versions.prepare_to_load(call["sharded_state_dict"], strategy)
            merge(result, not_persistent)
            return ShardFacts(nested_values(sharded))

        check = agree_on_access(channel, f"{phase}: prepare", prepare)
        asked = tuple[str, ...]()
        if needs_global_keys or (validates and not check.is_known):
            asked = check.run(f"{phase}: validate", refuses=validates)

        missing: set[str] = set()
        unexpected: set[str] = set()
        if needs_checkpoint_keys:
            keys = channel.broadcast(f"{phase}: keys", lambda: _Keys(_stored_keys(directory), asked), _Keys)

            def check_keys() -> None:
                nonlocal sharded, missing, unexpected
                of_all_ranks = keys.asked if needs_global_keys else None
                sharded, missing, unexpected = versions.check_keys(sharded, strict, of_all_ranks, keys.stored)

            channel.barrier(f"{phase}: strictness", check_keys)

        loaded = _read(sharded, directory, strategy, group, channel, phase, no_dist=no_dist)

        def merge_loaded() -> Offer:
            nonlocal result
            merge(result, loaded)
            result = apply_factory_merges(result, factories)
            return Offer(flags=int(channel.is_coordinator and MetadataSource(Disk(), directory).fit() != opened.fit))

        _, agreement = channel.agree(f"{phase}: merge", merge_loaded)
        if agreement.count(1):  # shards and common state may be of two saves
            if is_last_try:
                raise overwritten(directory, "saves were committed meanwhile")
            logger.warning("%s was overwritten while it was loaded: it is loaded once more", directory)
            return _load(stock, bound, is_last_try=True)
    LAST_LOADED[:] = [directory]
    return (result, missing, unexpected) if returns_mismatch else result


def _read(
    sharded: dict[str, Any],
    directory: str,
    strategy: Any,
    group: dist.ProcessGroup | None,
    channel: Channel,
    phase: str,
    *,
    no_dist: bool,
) -> dict[str, Any]:
    """Read the shards by the strategy that the caller gave. One that reads in its own way is asked to."""
    loaded: dict[str, Any] = {}
    is_parallel = hasattr(strategy, "parallelization_group") and versions.reads_torch_dist(strategy.base_strategy)
    if is_parallel and not no_dist:

        def load_in_parallel() -> None:
            """Each parallelization group reads by itself. If one group fails, all ranks raise its error."""
            with failure_sent_to_all(dist.get_rank(strategy.parallelization_group)):
                loaded.update(strategy.load(sharded, directory))  # which is parallel_load

        channel.barrier(f"{phase}: read in parallel", load_in_parallel)
        return loaded
    if is_parallel or not versions.reads_torch_dist(strategy):
        loaded = strategy.load(sharded, directory)
        return loaded
    return _read_sharded(sharded, _reader(directory), process_group=group, no_dist=no_dist, strategy=strategy)


@entry_point
def load_common_state_dict(_: Any, checkpoint_dir: CheckpointDir) -> Any:
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


def _stored_keys(directory: str) -> tuple[str, ...]:
    """The keys of the ShardedTensors and ShardedObjects that a checkpoint holds."""
    metadata = _reader(directory).read_metadata()
    entries = metadata.state_dict_metadata
    may_be_parts = [name for name in entries if PART in name]
    index = index_of(metadata)
    if index is not None:
        index.find_all(may_be_parts)
    parts = {name for name in may_be_parts if isinstance(entries[name], BytesStorageMetadata)}
    return tuple(sorted({key_of(name) if name in parts else name for name in entries}))


def _open(directory: str) -> _Opened:
    backend = versions.backend_of(directory)
    return _read_common(directory) if backend == "torch_dist" else _Opened(backend)


def _read_common(directory: str) -> _Opened:
    """Read the common state's bytes from ``common.pt``, or from a ShardedObject as Megatron 0.19 saves it."""
    path = os.path.join(directory, common_state.COMMON_FILE)
    source, trusted = MetadataSource(Disk(), directory), current_options().trusted
    fit = source.fit()
    begins = b"" if trusted else ZIP_MAGIC  # no other object is loaded, so no other file is read as a whole
    file = source.read_beside(common_state.COMMON_FILE, common_state.MAX_NBYTES, trusted=trusted, begins=begins)
    if file is not None:
        return _Opened("torch_dist", file, fit=fit)
    key = ShardedObject(versions.COMMON_STATE_KEY, None, (1,), (0,)).unique_key
    reader = PieceReader(directory, buffer_nbytes=_BUFFER_NBYTES)
    if key not in reader.metadata.state_dict_metadata:
        raise CheckpointingException(f"Common file {path} does not exist")
    return _Opened("torch_dist", dict(reader.objects([key]))[key], is_file=False, fit=fit)


def _decoded(opened: _Opened, directory: str) -> Any:
    """Decode the common state without running any code that its bytes name."""
    file, item = directory, versions.COMMON_STATE_KEY
    if opened.is_file:
        file, item = os.path.join(directory, common_state.COMMON_FILE), common_state.COMMON_FILE
    common = load_object(opened.common, file=file, item=item, trusted=current_options().trusted)
    if not opened.is_file and isinstance(common, list) and common:  # Megatron saves an object as a list of one
        common = common[0]
    if not isinstance(common, dict):
        raise CorruptCheckpoint.of_file(file, "a dict as the common state", type(common).__name__, item=item)
    return common
