"""The patches for Megatron's formats ``torch_dcp`` and ``fsdp_dtensor``: they replace functions of DCP.

Megatron calls ``save``, ``load`` and ``load_state_dict`` as attributes of ``torch.distributed.checkpoint``, and so does
everybody else. Our replacements there look at the calling module. If it is not Megatron's checkpointing, they call
stock's function. This module imports neither torch nor Megatron. Applied by ``install``.
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
from robust_dcp.switch.stock_paths import log_left_to_stock

__all__ = ["CALLERS", "PATCHES"]

Function = Callable[..., Any]

_BRIDGE = "megatron.bridge.training.checkpointing"

CALLERS = ("megatron.training.checkpointing", _BRIDGE)
"""The modules from which saves and loads are taken over."""

_MARK = "preprocess_state_dict_for_uneven_dtensor"
"""A module with this global name saves ``fsdp_dtensor`` checkpoints by its own code. verl has such a module."""


def _is_ours(caller: dict[str, Any], what: str, stock: Function) -> bool:
    """Whether the calling module saves and loads Megatron's checkpoints, and robust_dcp is chosen to do it.

    Args:
        caller: the globals of the calling module.
        what: what the module does, for the log.
        stock: the function to call otherwise. It is not stock's own if robust_dcp takes over the calls of all modules.
    """
    name = caller.get("__name__")
    if name in CALLERS or _MARK in caller:
        return is_chosen()
    takes_all = hasattr(stock, TAKES_ALL_CALLS)
    if not takes_all and not str(name).startswith("torch.") and current_options().planner == "robust_dcp":
        why = "in this job only calls that Megatron's checkpointing makes are taken over; others call robust_dcp.save"
        log_left_to_stock(f"{what} by {name}", why)
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
    """``get_async_strategy`` as ``megatron.training.checkpointing`` calls it for these two formats."""

    @functools.wraps(stock)
    def get_async_strategy(*args: Any, **kwargs: Any) -> Any:
        strategy, modules = stock(*args, **kwargs)
        if not isinstance(modules, dict) or not is_chosen():
            return strategy, modules
        return strategy, {**modules, "save_state_dict_async_plan": _start}

    return get_async_strategy


def _start(state_dict: dict[str, Any], storage_writer: Any, *_: Any, **__: Any) -> Any:
    """``save_state_dict_async_plan``: starts the save. Of Megatron's writer it uses only the path."""
    from robust_dcp.megatron.formats.dcp_formats import start_dcp

    return start_dcp(state_dict, storage_writer.path, current_options())


def _start_for_bridge(stock: Function) -> Function:
    """``save_state_dict_async_plan`` of ``nvidia_resiliency_ext``, as Megatron-Bridge imports and calls it."""

    @functools.wraps(stock)
    def save_state_dict_async_plan(*args: Any, **kwargs: Any) -> Any:
        return _start(*args, **kwargs) if is_chosen() else stock(*args, **kwargs)

    return save_state_dict_async_plan


def _callbacks(stock: Function) -> Function:
    """``get_save_and_finalize_callbacks(writer, save_state_dict_ret, async_strategy)``. Megatron-Bridge's has no third
    argument."""

    @functools.wraps(stock)
    def get_save_and_finalize_callbacks(writer: Any, save_state_dict_ret: Any, *args: Any, **kwargs: Any) -> Any:
        from robust_dcp.megatron.async_requests import BackgroundSave
        from robust_dcp.megatron.formats.dcp_formats import request_for_dcp

        if not isinstance(save_state_dict_ret, BackgroundSave):
            return stock(writer, save_state_dict_ret, *args, **kwargs)
        return request_for_dcp(save_state_dict_ret, kwargs.get("async_strategy", args[0] if args else "nvrx"))

    return get_save_and_finalize_callbacks


PATCHES: tuple[Patch, ...] = (
    Patch("torch.distributed.checkpoint", "save", _save),
    Patch("torch.distributed.checkpoint", "load", _load),
    Patch("torch.distributed.checkpoint", "load_state_dict", _load, optional=True),  # deprecated by torch
    Patch("megatron.training.checkpointing", "get_async_strategy", _async_modules, optional=True),  # from 0.17
    Patch("megatron.training.checkpointing", "get_save_and_finalize_callbacks", _callbacks, optional=True),
    Patch(_BRIDGE, "save_state_dict_async_plan", _start_for_bridge, optional=True),
    Patch(_BRIDGE, "get_save_and_finalize_callbacks", _callbacks, optional=True),
)
