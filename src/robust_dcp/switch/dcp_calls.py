"""Runs calls of ``torch.distributed.checkpoint.save``, ``load`` and ``async_save`` through robust_dcp.

Owns which arguments of stock robust_dcp supports, and how they become its own. If it does not support a call, stock's
function runs, and each reason is logged once as a warning. A call returns what stock would return: ``Metadata``,
``None``, a ``Future`` or an ``AsyncSaveResponse``.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from errno import ENOENT
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint import state_dict_saver as stock_saver
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful

from robust_dcp import api
from robust_dcp.asynchronous import async_save as robust_async_save
from robust_dcp.environment import value_of
from robust_dcp.errors import StorageError
from robust_dcp.plan.load_planner import RobustLoadPlanner, robust_load_planner
from robust_dcp.plan.save_planner import CommittedMetadata, RobustPlanner
from robust_dcp.proof import compare
from robust_dcp.report import SaveReport
from robust_dcp.stateful import NamesOfStock
from robust_dcp.storage.files.paths import is_url
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.writer import RobustWriter
from robust_dcp.switch.patching import log_left_to_stock, log_without_effect

logger = logging.getLogger(__name__)

Function = Callable[..., Any]
Arguments = dict[str, Any]

TRUSTED = "ROBUST_DCP_TRUSTED"
"""The environment variable that lets objects run code when they are loaded, as stock does."""

PARITY_NODES = "ROBUST_DCP_PARITY_NODES"
"""The environment variable that says about how many nodes keep parity for each other."""

PROVE = "ROBUST_DCP_PROVE"
"""The environment variable that has each load proved: what was loaded is compared with the checkpoint."""

_GROUP = ("process_group", "no_dist")
_STORAGES = ("storage_writer", "storage_reader")


class _StaysStock(Exception):
    """robust_dcp does not support this call. The message says why."""


def save(
    stock: Function,
    args: tuple[Any, ...],
    kwargs: Arguments,
    *,
    threads: int | None = None,
    parity_nodes: int | None = None,
    on_saved: Callable[[SaveReport], object] = lambda report: None,
    **more: Any,
) -> Any:
    """``torch.distributed.checkpoint.save(*args, **kwargs)``.

    Args:
        threads: of a writer that does not say how many.
        parity_nodes: as for ``WriteOptions``. ``None``: as the environment says.
        on_saved: called with the report.
        more: arguments of :func:`robust_dcp.save` for this call.

    Returns:
        The ``Metadata`` of the checkpoint. It looks entries up when they are needed.
    """
    try:
        given = _given_arguments(stock, args, kwargs)
        state_dict, writer = given.pop("state_dict"), given.get("storage_writer")
        arguments = {**_save_arguments(given, threads, parity_nodes), **more}
    except _StaysStock as why:
        log_left_to_stock(f"saves by torch.distributed.checkpoint.{stock.__name__}", str(why))
        return stock(*args, **kwargs)
    report = api.save(_with_names_of_stock(state_dict), **arguments)
    on_saved(report)
    return _metadata_for(writer, arguments["storage_writer"])(report)


def load(stock: Function, args: tuple[Any, ...], kwargs: Arguments, *, trusted: bool | None = None, **more: Any) -> Any:
    """``torch.distributed.checkpoint.load(*args, **kwargs)``, in place. As in stock, other dtypes are converted.

    Args:
        trusted: whether objects may run code. ``None``: as the environment says.
        more: arguments of :func:`robust_dcp.load` for this call.
    """
    try:
        given = _given_arguments(stock, args, kwargs)
        state_dict, planner = given.pop("state_dict"), given.pop("planner", None)
        reader, checkpoint_id = given.pop("storage_reader", None), given.pop("checkpoint_id", None)
        trusted = bool(value_of(TRUSTED)) if trusted is None else trusted
        arguments = {
            **_common(given),
            **_reader_for(reader, checkpoint_id, trusted=trusted),
            "planner": robust_load_planner(DefaultLoadPlanner() if planner is None else planner),
        }
    except _StaysStock as why:
        log_left_to_stock(f"loads by torch.distributed.checkpoint.{stock.__name__}", str(why))
        return stock(*args, **kwargs)
    reason = f"{type(planner).__name__} overrides create_global_plan, which gets the plans of all ranks"
    if type(arguments["planner"]).create_global_plan is DefaultLoadPlanner.create_global_plan:
        try:
            named = _with_names_of_stock(state_dict)
            try:
                api.load(named, **arguments, **more)
            finally:
                _tell_reader(reader, arguments["storage_reader"])
            for key, value in named.items():  # a dict of its own class may note what is set
                if not (hasattr(value, "state_dict") and isinstance(value, Stateful)):
                    state_dict[key] = value
            if value_of(PROVE):
                _prove(named, arguments)
            return None
        except StorageError as error:
            if not _is_of_single_ranks(arguments, error):
                raise
            reason = "it was saved with use_collectives=False, so each rank loads by itself"
    log_left_to_stock("the planning of a load", reason)
    return stock(state_dict, **arguments)


def _prove(state_dict: Any, arguments: Arguments) -> None:
    """Compare what a load has put into ``state_dict`` with the checkpoint. A program may load a part on purpose, and
    convert dtypes, so only values that differ are an error."""
    planner = arguments["planner"]
    if type(planner) is not RobustLoadPlanner:
        log_without_effect(PROVE, f"{type(planner).__name__} decides what goes where, so there is nothing to compare")
        return
    options = {name: each for name, each in arguments.items() if name != "checkpoint_id"}  # the reader knows it
    report = compare(state_dict, **options)
    if report.differing:
        report.raise_if_differs()
    logger.info("%s", report)


def async_save(stock: Function, args: tuple[Any, ...], kwargs: Arguments) -> Any:
    """``torch.distributed.checkpoint.async_save(*args, **kwargs)``.

    Returns:
        What stock returns for these arguments: an ``AsyncSaveResponse`` if the stager copies in the background, else a
        ``Future`` of the ``Metadata``.
    """
    try:
        given = _given_arguments(stock, args, kwargs)
        state_dict, writer = given.pop("state_dict"), given.get("storage_writer")
        stager = given.pop("async_stager", None)
        if stager is not None and not type(stager).__module__.startswith("torch.distributed.checkpoint."):
            raise _StaysStock(f"{type(stager).__name__} stages in a way of its own")
        copies_in_the_background = getattr(getattr(stager, "_config", None), "use_async_staging", False)
        staging: Any = "lazy" if copies_in_the_background else "full"
        arguments = {"async_checkpointer_type": given.pop("async_checkpointer_type", None), **_save_arguments(given)}
    except _StaysStock as why:
        log_left_to_stock("saves by torch.distributed.checkpoint.async_save", str(why))
        return stock(*args, **kwargs)
    saving: Any = robust_async_save(_with_names_of_stock(state_dict), staging=staging, **arguments)
    saving.convert = _metadata_for(writer, arguments["storage_writer"])
    response: Any = getattr(stock_saver, "AsyncSaveResponse", None)
    if staging == "full" or response is None:
        return saving
    return response(staging_completion=saving.staging_completion, upload_completion=saving)


def _with_names_of_stock(state_dict: Any) -> Any:
    """Make modules and optimizers keep the names that stock gives them."""
    # All ranks refuse another value later in the same way.
    return NamesOfStock(state_dict) if isinstance(state_dict, Mapping) else state_dict


def _given_arguments(stock: Function, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """The arguments that differ from stock's defaults, by name.

    Stock still takes a writer or a reader as the second argument of ``save`` and ``load``, as its first versions did.

    Raises:
        TypeError: stock does not take these arguments.
    """
    signature = inspect.signature(stock)
    positional = list(args)
    if len(positional) == 2:
        name = next((name for name in _STORAGES if name in signature.parameters), "")
        if name and signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs = {**kwargs, name: positional.pop()}
    try:
        bound = signature.bind(*positional, **kwargs)
    except TypeError as error:
        raise TypeError(f"{stock.__name__}() {error}") from None
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    return {name: value for name, value in bound.arguments.items() if value is not defaults[name]}


def _save_arguments(given: Arguments, threads: int | None = None, parity_nodes: int | None = None) -> Arguments:
    if not given.pop("use_collectives", True):
        raise _StaysStock("use_collectives=False: each rank would save by itself")
    writer, planner = given.pop("storage_writer", None), given.pop("planner", None)
    checkpoint_id = given.pop("checkpoint_id", None)
    common, name = _common(given), type(planner).__name__
    if not (planner is None or isinstance(planner, RobustPlanner) or type(planner) is DefaultSavePlanner):
        raise _StaysStock(f"{name} plans otherwise than DefaultSavePlanner; derive it from RobustPlanner")
    if isinstance(planner, RobustPlanner) and planner.hooks_of_stock:
        raise _StaysStock(f"{name} overrides {', '.join(planner.hooks_of_stock)}")
    return {
        **common,
        **_writer_for(writer, checkpoint_id, threads, parity_nodes or value_of(PARITY_NODES)),
        "planner": planner,
    }


def _common(given: Arguments) -> Arguments:
    coordinator_rank = given.pop("coordinator_rank", 0)
    if coordinator_rank != 0:
        raise _StaysStock(f"coordinator_rank={coordinator_rank}: rank 0 of the group leads")
    others = set(given) - set(_GROUP)
    if others:
        raise _StaysStock(f"robust_dcp does not know the arguments {', '.join(sorted(others))}")
    return given


def _writer_for(writer: Any, checkpoint_id: Any, threads: int | None, parity_nodes: int | None) -> Arguments:
    """The writer to use, and the ``checkpoint_id`` that our save is to hand on to it."""
    if isinstance(writer, RobustWriter):
        return {"storage_writer": writer, "checkpoint_id": checkpoint_id}
    if writer is None:
        return {"storage_writer": RobustWriter(_directory(checkpoint_id), threads=threads, parity_nodes=parity_nodes)}
    if not _is_of_torch(writer, "FileSystemWriter", "FsspecWriter"):
        raise _StaysStock(f"{type(writer).__name__} writes otherwise than FileSystemWriter")
    if getattr(writer, "_extensions", None) or getattr(writer.transforms, "extensions", None):
        raise _StaysStock("FileSystemWriter with extensions transforms what it writes")
    if getattr(getattr(writer, "serialization_format", None), "value", "torch_save") != "torch_save":
        raise _StaysStock('robust_dcp writes safetensors by RobustWriter(layout="safetensors")')
    threads = writer.thread_count if writer.thread_count > 1 else threads
    path = _directory_of(writer, checkpoint_id)
    return {
        "storage_writer": RobustWriter(path, threads=threads, parity_nodes=parity_nodes, overwrite=writer.overwrite)
    }


def _reader_for(reader: Any, checkpoint_id: Any, *, trusted: bool) -> Arguments:
    """The reader to use, and the ``checkpoint_id`` that our load is to hand on to it."""
    if isinstance(reader, RobustReader):
        return {"storage_reader": reader, "checkpoint_id": checkpoint_id}
    if reader is None:
        return {"storage_reader": RobustReader(_directory(checkpoint_id), trusted=trusted)}
    if not _is_of_torch(reader, "FileSystemReader", "FsspecReader"):
        raise _StaysStock(f"{type(reader).__name__} reads otherwise than FileSystemReader")
    registry = getattr(getattr(reader, "transforms", None), "extension_registry", None)
    if registry is not None and vars(registry) != vars(ExtensionRegistry()):
        raise _StaysStock("FileSystemReader with an extension registry of its own transforms what it reads")
    robust = RobustReader(_directory_of(reader, checkpoint_id), trusted=trusted)
    robust.load_id = reader.load_id
    return {"storage_reader": robust}


def _tell_reader(given: Any, reader: RobustReader) -> None:
    """Let the reader that was given hold what it would hold after a load by stock."""
    metadata = reader.metadata_if_set_up
    if given is not None and given is not reader and metadata is not None:
        given.storage_data, given.use_collectives = metadata.storage_data, True
        given.rank = dist.get_rank() if dist.is_initialized() else 0


def _is_of_single_ranks(arguments: Arguments, error: StorageError) -> bool:
    """Whether a load failed only because each rank has a metadata file of its own: there was a save without
    collectives. All ranks ask this, since all raise the error."""
    source = arguments["storage_reader"].source
    if error.errno != ENOENT or error.path != source.path_of_metadata():
        return False
    by_itself = arguments.get("no_dist", False) or not dist.is_initialized()
    return bool(source.is_there(0 if by_itself else dist.get_rank(arguments.get("process_group"))))


def _is_of_torch(storage: Any, *names: str) -> bool:
    """Whether its class is one of these of torch itself. By name: the module of ``FsspecWriter`` needs fsspec."""
    kind = type(storage)
    return kind.__module__.startswith("torch.distributed.checkpoint.") and kind.__name__ in names


def _directory_of(storage: Any, checkpoint_id: Any) -> Any:
    """The directory of stock's writer or reader. As in stock, ``checkpoint_id`` moves it there, for later calls too."""
    path = _directory(storage.path if checkpoint_id is None else checkpoint_id)
    if checkpoint_id is not None:
        storage.reset(checkpoint_id)
    return path


def _directory(path: Any) -> Any:
    if path is None:
        raise _StaysStock("there is neither a checkpoint_id nor a directory")
    if is_url(path):
        scheme = os.fsdecode(path).partition(":")[0]
        raise _StaysStock(f"{scheme}:// is no mounted file system; robust_dcp.save and robust_dcp.load take such URLs")
    return path


def _metadata_for(given: Any, writer: RobustWriter) -> Callable[[SaveReport], Metadata]:
    """What a save returns. It is read when somebody looks at it: by now the program may have renamed the directory. As
    in stock, the writer that was given has the ``save_id`` of the metadata on rank 0.
    """
    directory, save_id = writer.path, writer.save_id

    def metadata_of(report: SaveReport) -> Metadata:
        if given is not None and given is not writer:
            given.save_id = save_id
        return CommittedMetadata(directory)

    return metadata_of
