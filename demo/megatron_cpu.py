"""Lets Megatron-Core build and save models on CPU tensors, although it names the device "cuda" in many places.

It redirects a few calls of torch. ``torch.cuda.is_available()`` stays false, and nothing of Megatron or robust_dcp is
changed. The demo's Megatron jobs and tests/megatron call it first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["install"]


class _CudaMeansCpu(TorchFunctionMode):
    """Sends every ``device="cuda"`` (or device index) of a torch function to the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, int) or (device is not None and str(device).startswith("cuda")):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The distributed optimizer sorts parameters by their legacy type string, "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def install() -> None:
    """Redirect this process's ``torch.cuda`` calls for good."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.set_device = lambda *args, **kwargs: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.current_stream = lambda *args: None  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    _CudaMeansCpu().__enter__()  # type: ignore[no-untyped-call]
