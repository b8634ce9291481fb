"""Saves and loads of Megatron's formats ``torch_dcp`` and ``fsdp_dtensor``, which are plain DCP checkpoints.

Owns how Megatron's calls of ``torch.distributed.checkpoint`` for these formats become calls of ours, with the options
of Megatron's command line. The files are those that stock writes and reads. Called by ``dcp_patches``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter

from robust_dcp import api
from robust_dcp.asynchronous import async_save
from robust_dcp.megatron import versions
from robust_dcp.megatron.async_requests import BackgroundSave, request_for
from robust_dcp.megatron.checkpoint_call import meet_before_saving
from robust_dcp.megatron.hooks.options import MegatronOptions
from robust_dcp.megatron.writing import log_report, writer_for
from robust_dcp.plan.save_planner import RobustPlanner
from robust_dcp.storage.reader import RobustReader
from robust_dcp.switch.dcp_calls import given_arguments, robust_load_planner
from robust_dcp.switch.stock_paths import log_left_to_stock

__all__ = ["load_call", "request_for_dcp", "save_call", "save_dcp", "start_dcp"]

Path = str | os.PathLike[str]

_WHY = "only calls with DCP's own planner, and a directory or DCP's own reader or writer of one, are taken over"


def save_dcp(state_dict: dict[str, Any], path: Path, options: MegatronOptions) -> None:
    """Save a state dict of tensors, DTensors and objects from all ranks.

    Raises:
        ValueError: ``path`` is a URL.
        RobustCheckpointError: something failed on any rank. All ranks raise the same error.
    """
    log_report(_call(api.save, state_dict, path, options))


def start_dcp(state_dict: dict[str, Any], path: Path, options: MegatronOptions) -> BackgroundSave:
    """As :func:`save_dcp`, but write and commit while training goes on. Raises what :func:`save_dcp` raises."""
    return BackgroundSave(_call(async_save, state_dict, path, options))


def request_for_dcp(save: BackgroundSave, async_strategy: str) -> Any:
    """The request for Megatron's queue. Its finalizer only waits for the save.

    Args:
        save: what :func:`start_dcp` returned.
        async_strategy: ``"nvrx"`` or ``"mcore"``: the package that owns the queue.
    """
    return request_for(versions.async_request_class(async_strategy), save, lambda report: None)


def _call(save: Callable[..., Any], state_dict: dict[str, Any], path: Path, options: MegatronOptions) -> Any:
    writer = writer_for(path, options)
    meet_before_saving()
    return save(
        state_dict,
        storage_writer=writer,
        planner=RobustPlanner(
            on_structure_change=options.on_structure_change,
            on_unloadable_object=options.on_unloadable_object,
        ),
        timeout_seconds=options.exchange_timeout_seconds,
    )


def save_call(
    stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: MegatronOptions
) -> Any:
    """``torch.distributed.checkpoint.save(*args, **kwargs)`` as Megatron calls it: with a path, on all ranks.

    Stock's function runs if the call has a planner, writer or group of its own.

    Returns:
        ``None``. Stock returns a ``Metadata``, but Megatron does not look at it, and reading it would take time. If
        stock's function runs, its result is returned.
    """
    given = given_arguments(stock, args, kwargs)
    path = _path_of(given.pop("storage_writer", None), given.pop("checkpoint_id", None), FileSystemWriter)
    state_dict = given.pop("state_dict", None)
    if path is None or state_dict is None or given:
        log_left_to_stock(
            "saves by torch.distributed.checkpoint.save with a planner, writer or group of their own", _WHY
        )
        return stock(*args, **kwargs)
    save_dcp(state_dict, path, options)
    return None


def load_call(
    stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: MegatronOptions
) -> Any:
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
    api.load(
        state_dict,
        storage_reader=RobustReader(path, trusted=options.trusted),
        planner=robust_load_planner(planner, trusted=options.trusted),
        timeout_seconds=options.exchange_timeout_seconds,
    )
    return None


def _path_of(storage: Any, checkpoint_id: Path | None, plain: type[Any]) -> Path | None:
    """The checkpoint's directory, or ``None`` if ``storage`` is not the class that stock uses for a directory."""
    if storage is None:
        return checkpoint_id
    if type(storage) is not plain or checkpoint_id is not None:
        return None
    path: Path = storage.path
    return path
