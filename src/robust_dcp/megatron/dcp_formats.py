"""Saves and loads of Megatron's formats ``torch_dcp`` and ``fsdp_dtensor``, which are plain DCP checkpoints.

Owns how Megatron's calls of ``torch.distributed.checkpoint`` for these formats become calls of ours, with the options
of Megatron's command line. The files are those that stock writes and reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter

from robust_dcp import api
from robust_dcp.asynchronous import async_save
from robust_dcp.megatron import versions
from robust_dcp.megatron.async_requests import BackgroundSave, log_report, request_for
from robust_dcp.megatron.failures import meet_before_saving
from robust_dcp.megatron.options import current_options
from robust_dcp.plan.save_planner import RobustPlanner
from robust_dcp.storage import RobustReader, RobustWriter
from robust_dcp.switch.dcp_calls import given_arguments, robust_load_planner
from robust_dcp.switch.patching import log_left_to_stock

__all__ = ["get_async_strategy", "get_save_and_finalize_callbacks", "load", "save", "start_save"]

Function = Callable[..., Any]
Path = str | os.PathLike[str]

_WHY = "only calls with DCP's own planner, and a directory or DCP's own reader or writer of one, are taken over"


def save(stock: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.distributed.checkpoint.save(*args, **kwargs)`` as Megatron calls it: with a path, on all ranks.

    Stock's function runs if the call has a planner, writer or group of its own.

    Returns:
        ``None``. Stock returns a ``Metadata``, but Megatron does not look at it, and reading it would take time. If
        stock's function runs, its result is returned.

    Raises:
        ValueError: the path is a URL.
        RobustCheckpointError: something failed on any rank. All ranks raise the same error.
    """
    given = given_arguments(stock, args, kwargs)
    path = _path_of(given.pop("storage_writer", None), given.pop("checkpoint_id", None), FileSystemWriter)
    state_dict = given.pop("state_dict", None)
    if path is None or state_dict is None or given:
        log_left_to_stock(
            "saves by torch.distributed.checkpoint.save with a planner, writer or group of their own", _WHY
        )
        return stock(*args, **kwargs)
    log_report(_call(api.save, state_dict, path))
    return None


def load(stock: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``load`` or ``load_state_dict`` of ``torch.distributed.checkpoint`` as Megatron calls them. Loads in place.

    As in stock, a tensor of another dtype is converted, and a key that the checkpoint lacks is an error unless the
    planner says ``allow_partial_load``. Unlike in stock, nothing that is read is executed. Objects may have the classes
    that Megatron registers with ``torch.serialization.add_safe_globals``. You can register your own classes there too.

    Raises:
        PlanConflict: keys are missing or shapes differ.
        UnsafeCheckpoint: an object has a class that is not known to be plain data.
        RobustCheckpointError: something else failed on any rank. All ranks raise the same error.
    """
    given = given_arguments(stock, args, kwargs)
    path = _path_of(given.pop("storage_reader", None), given.pop("checkpoint_id", None), FileSystemReader)
    state_dict = given.pop("state_dict", None)
    planner = given.pop("planner", None)
    if path is None or state_dict is None or given or not (planner is None or type(planner) is DefaultLoadPlanner):
        log_left_to_stock(
            "loads by torch.distributed.checkpoint.load with a planner, reader or group of their own", _WHY
        )
        return stock(*args, **kwargs)
    options = current_options()
    api.load(
        state_dict,
        storage_reader=RobustReader(path, trusted=options.trusted),
        planner=robust_load_planner(planner, trusted=options.trusted),
        timeout_seconds=options.exchange_timeout_seconds,
    )
    return None


def _call(save: Function, state_dict: dict[str, Any], path: Path) -> Any:
    options = current_options()
    writer = RobustWriter(path, threads=options.writer_threads)
    meet_before_saving()
    return save(
        state_dict,
        storage_writer=writer,
        planner=RobustPlanner(),
        timeout_seconds=options.exchange_timeout_seconds,
    )


def _path_of(storage: Any, checkpoint_id: Path | None, plain: type[Any]) -> Path | None:
    """The checkpoint's directory, or ``None`` if ``storage`` is not the class that stock uses for a directory."""
    if storage is None:
        return checkpoint_id
    if type(storage) is not plain or checkpoint_id is not None:
        return None
    path: Path = storage.path
    return path


def get_async_strategy(stock: Function, *args: Any, **kwargs: Any) -> Any:
    """``get_async_strategy`` as ``megatron.training.checkpointing`` calls it for these two formats."""
    strategy, modules = stock(*args, **kwargs)
    if not isinstance(modules, dict):
        return strategy, modules
    return strategy, {**modules, "save_state_dict_async_plan": start_save}


def start_save(state_dict: dict[str, Any], storage_writer: Any, *_: Any, **__: Any) -> BackgroundSave:
    """``save_state_dict_async_plan``: starts the save. Of Megatron's writer it uses only the path."""
    return BackgroundSave(_call(async_save, state_dict, storage_writer.path))


def start_bridge_save(_: Function, *args: Any, **kwargs: Any) -> BackgroundSave:
    """``save_state_dict_async_plan`` of ``nvidia_resiliency_ext``, as Megatron-Bridge imports and calls it."""
    return start_save(*args, **kwargs)


def get_save_and_finalize_callbacks(
    stock: Function, writer: Any, save_state_dict_ret: Any, *args: Any, **kwargs: Any
) -> Any:
    """``get_save_and_finalize_callbacks(writer, save_state_dict_ret, async_strategy)``. Megatron-Bridge's has no third
    argument. The finalizer of our request only waits for the save."""
    if not isinstance(save_state_dict_ret, BackgroundSave):
        return stock(writer, save_state_dict_ret, *args, **kwargs)
    async_strategy = kwargs.get("async_strategy", args[0] if args else "nvrx")
    return request_for(versions.async_request_class(async_strategy), save_state_dict_ret, lambda report: None)
