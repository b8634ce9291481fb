"""What is replaced for Megatron's formats ``torch_dcp`` and ``fsdp_dtensor``: calls of DCP.

Megatron looks ``save``, ``load`` and ``load_state_dict`` up as attributes of ``torch.distributed.checkpoint``, as
everybody does; so the replacements there look who calls, and give stock's function to whoever is not Megatron's
checkpointing. Imports neither torch nor Megatron. Applied by ``install``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from robust_dcp.megatron.choice import is_chosen
from robust_dcp.megatron.hooks.options import current_options
from robust_dcp.switch.dcp_patches import TAKES_ALL_CALLS
from robust_dcp.switch.patching import Patch
from robust_dcp.switch.stock_paths import say_stays_stock

__all__ = ["CALLERS", "PATCHES"]

Function = Callable[..., Any]

CALLERS = ("megatron.training.checkpointing", "megatron.bridge.training.checkpointing")
"""Modules whose saves and loads are taken over."""

_MARK = "preprocess_state_dict_for_uneven_dtensor"
"""Name that a module has which saves ``fsdp_dtensor`` on its own, as verl's does."""


def _is_ours(caller: dict[str, Any], what: str, stock: Function) -> bool:
    """Whether the module with these globals saves and loads Megatron's checkpoints, and robust_dcp is to do it.

    Args:
        caller: the globals.
        what: it does, for the log.
        stock: what is called else; not stock's own where robust_dcp takes over the calls of everybody.
    """
    name = caller.get("__name__")
    if name in CALLERS or _MARK in caller:
        return is_chosen()
    takes_all = hasattr(stock, TAKES_ALL_CALLS)
    if not takes_all and not str(name).startswith("torch.") and current_options().planner == "robust_dcp":
        why = "in this job only calls that Megatron's checkpointing makes are taken over; others call robust_dcp.save"
        say_stays_stock(f"{what} by {name}", why)
    return False


def _save(stock: Function) -> Function:
    @functools.wraps(stock)
    def save(*args: Any, **kwargs: Any) -> Any:
        if not _is_ours(sys._getframe(1).f_globals, "torch.distributed.checkpoint.save", stock):
            return stock(*args, **kwargs)
        from robust_dcp.megatron.formats.dcp_formats import save_call

        return save_call(stock, args, kwargs, current_options())

    return save


def _load(stock: Function) -> Function:
    @functools.wraps(stock)
    def load(*args: Any, **kwargs: Any) -> Any:
        if not _is_ours(sys._getframe(1).f_globals, "torch.distributed.checkpoint.load", stock):
            return stock(*args, **kwargs)
        from robust_dcp.megatron.formats.dcp_formats import load_call

        return load_call(stock, args, kwargs, current_options())

    return load


def _async_modules(stock: Function) -> Function:
    """``get_async_strategy`` as ``megatron.training.checkpointing`` uses it: for these two formats."""

    @functools.wraps(stock)
    def get_async_strategy(*args: Any, **kwargs: Any) -> Any:
        strategy, modules = stock(*args, **kwargs)
        if not isinstance(modules, dict) or not is_chosen():
            return strategy, modules
        from robust_dcp.megatron.formats.dcp_formats import SynchronousWriter

        return strategy, {
            **modules,
            "FileSystemWriterAsync": SynchronousWriter,
            "save_state_dict_async_plan": _save_at_once,
        }

    return get_async_strategy


def _save_at_once(state_dict: dict[str, Any], storage_writer: Any, *_: Any, **__: Any) -> None:
    storage_writer.save(state_dict, current_options())


def _callbacks(stock: Function) -> Function:
    @functools.wraps(stock)
    def get_save_and_finalize_callbacks(writer: Any, save_state_dict_ret: Any, *args: Any, **kwargs: Any) -> Any:
        from robust_dcp.megatron.formats.dcp_formats import SynchronousWriter

        if not isinstance(writer, SynchronousWriter):
            return stock(writer, save_state_dict_ret, *args, **kwargs)
        from robust_dcp.megatron.versions import finished_request

        return finished_request(kwargs.get("async_strategy", args[0] if args else None))

    return get_save_and_finalize_callbacks


def _async_of_bridge(stock: Function) -> Function:
    """``save_state_dict_async_plan`` of ``nvidia_resiliency_ext`` as Megatron-Bridge calls it: stock's, and said so."""

    @functools.wraps(stock)
    def save_state_dict_async_plan(*args: Any, **kwargs: Any) -> Any:
        if is_chosen():
            say_stays_stock("asynchronous saves of fsdp_dtensor by Megatron-Bridge", "save without async_save for ours")
        return stock(*args, **kwargs)

    return save_state_dict_async_plan


PATCHES: tuple[Patch, ...] = (
    Patch("torch.distributed.checkpoint", "save", _save),
    Patch("torch.distributed.checkpoint", "load", _load),
    Patch("torch.distributed.checkpoint", "load_state_dict", _load, optional=True),  # deprecated by torch
    Patch("megatron.training.checkpointing", "get_async_strategy", _async_modules, optional=True),  # from 0.17
    Patch("megatron.training.checkpointing", "get_save_and_finalize_callbacks", _callbacks, optional=True),
    Patch("megatron.bridge.training.checkpointing", "save_state_dict_async_plan", _async_of_bridge, optional=True),
)
