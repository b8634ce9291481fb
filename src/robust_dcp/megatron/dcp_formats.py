"""Saves and loads of Megatron's formats ``torch_dcp`` and ``fsdp_dtensor``, which are plain DCP checkpoints.

Owns how Megatron's calls of ``torch.distributed.checkpoint`` for these formats become calls of ours, with the options
of Megatron's command line. The files are those that stock writes and reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from robust_dcp.asynchronous import async_save
from robust_dcp.megatron import versions
from robust_dcp.megatron.async_requests import BackgroundSave, end_save, request_for
from robust_dcp.megatron.failures import meet_before_saving
from robust_dcp.megatron.options import current_options
from robust_dcp.storage.writer import RobustWriter
from robust_dcp.switch import dcp_calls

Function = Callable[..., Any]


def save(stock: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.distributed.checkpoint.save(*args, **kwargs)`` as Megatron calls it: with a path, on all ranks.

    Raises:
        RobustCheckpointError: something failed on any rank. All ranks raise the same error.
    """
    options = current_options()
    meet_before_saving()
    return dcp_calls.save(
        stock,
        args,
        kwargs,
        threads=options.writer_threads,
        parity_nodes=options.parity_nodes,
        on_saved=end_save,
        timeout_seconds=options.exchange_timeout_seconds,
    )


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
    options = current_options()
    return dcp_calls.load(
        stock, args, kwargs, trusted=options.trusted, timeout_seconds=options.exchange_timeout_seconds
    )


def get_async_strategy(stock: Function, *args: Any, **kwargs: Any) -> Any:
    """``get_async_strategy`` of ``megatron.training.checkpointing``, for these two formats."""
    strategy, modules = stock(*args, **kwargs)
    if not isinstance(modules, dict):
        return strategy, modules
    return strategy, {**modules, "save_state_dict_async_plan": partial(start_save, None)}


def start_save(_: Any, state_dict: dict[str, Any], storage_writer: Any, *__: Any, **___: Any) -> BackgroundSave:
    """``save_state_dict_async_plan``: starts the save. Of Megatron's writer it uses only the path."""
    options = current_options()
    writer = RobustWriter(storage_writer.path, threads=options.writer_threads, parity_nodes=options.parity_nodes)
    meet_before_saving()
    timeout_seconds = options.exchange_timeout_seconds
    saving: Any = async_save(state_dict, storage_writer=writer, timeout_seconds=timeout_seconds)
    return BackgroundSave(saving)


def get_save_and_finalize_callbacks(
    stock: Function, writer: Any, save_state_dict_ret: Any, *args: Any, **kwargs: Any
) -> Any:
    """``get_save_and_finalize_callbacks(writer, save_state_dict_ret, async_strategy)``. Megatron-Bridge's has no third
    argument. The finalizer of our request only waits for the save."""
    if not isinstance(save_state_dict_ret, BackgroundSave):
        return stock(writer, save_state_dict_ret, *args, **kwargs)
    async_strategy = kwargs.get("async_strategy", args[0] if args else "nvrx")
    return request_for(versions.async_request_class(async_strategy), save_state_dict_ret, lambda report: None)
