"""The table of functions that are replaced in ``torch.distributed.checkpoint``: those that save and load.

Each replacement passes the call to ``dcp_calls``, which is imported at the first call. Applied by ``installation``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from robust_dcp.switch.patching import Patch

__all__ = ["PATCHES", "TAKEN_OVER", "TAKES_ALL_CALLS"]

Function = Callable[..., Any]

TAKES_ALL_CALLS = "robust_dcp_takes_all_calls"
"""A replacement with this attribute goes through robust_dcp for every caller."""

TAKEN_OVER = ("save", "load", "async_save")
"""The names in ``torch.distributed.checkpoint`` that the log line lists."""


def _through(name: str) -> Callable[[Function], Function]:
    """Make a replacement that calls the function ``name`` of ``dcp_calls`` with stock's function and the arguments."""

    def make(stock: Function) -> Function:
        @functools.wraps(stock)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            from robust_dcp.switch import dcp_calls

            return getattr(dcp_calls, name)(stock, args, kwargs)

        vars(replacement)[TAKES_ALL_CALLS] = True
        return replacement

    return make


_save, _load, _async_save = _through("save"), _through("load"), _through("async_save")

PATCHES: tuple[Patch, ...] = (
    # The modules come first. The package imports these names from them, and may import our replacements, which
    # `Patches` recognises.
    Patch("torch.distributed.checkpoint.state_dict_saver", "save", _save),
    Patch("torch.distributed.checkpoint.state_dict_saver", "save_state_dict", _save, optional=True),  # deprecated
    Patch("torch.distributed.checkpoint.state_dict_saver", "async_save", _async_save),
    Patch("torch.distributed.checkpoint.state_dict_loader", "load", _load),
    Patch("torch.distributed.checkpoint.state_dict_loader", "load_state_dict", _load, optional=True),  # deprecated
    Patch("torch.distributed.checkpoint", "save", _save),
    Patch("torch.distributed.checkpoint", "save_state_dict", _save, optional=True),
    Patch("torch.distributed.checkpoint", "async_save", _async_save),
    Patch("torch.distributed.checkpoint", "load", _load),
    Patch("torch.distributed.checkpoint", "load_state_dict", _load, optional=True),
    # Lightning loads the optimizer of FSDP by load_sharded_optimizer_state_dict, which calls this.
    Patch("torch.distributed.checkpoint.optimizer", "load_state_dict", _load, optional=True),
)
