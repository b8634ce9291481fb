"""Lets Megatron-Core build, train and save models on CPU tensors, although it names the device "cuda" in many places.

It redirects a few calls of torch. ``torch.cuda.is_available()`` stays false, and nothing of Megatron or robust_dcp is
changed. The demo's Megatron jobs and the tests with Megatron call it first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

__all__ = ["install"]

_CPU = torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):
    """Sends whatever is placed on a CUDA device to the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The distributed optimizer sorts parameters by their legacy type string, "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.", 1)
        device = kwargs.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        args = tuple(_CPU if isinstance(each, torch.device) and each.type == "cuda" else each for each in args)
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


class _Stream:
    """A stream or an event that has nothing to order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _always(value: Any) -> Callable[..., Any]:
    """A new function each time: torch.compile keeps its rules by function."""
    return lambda *args, **kwargs: value


def install() -> None:
    """Redirect this process's ``torch.cuda`` calls for good."""
    from_group, no_state = DeviceMesh.from_group, torch.zeros(8, dtype=torch.uint8)
    stand_ins: tuple[tuple[Any, str, Any], ...] = (
        *((torch.cuda, name, _always(None)) for name in ("synchronize", "set_device", "empty_cache", "set_rng_state")),
        *((owner, "get_rng_state", _always(no_state)) for owner in (torch.cuda, torch.cuda.random)),
        *((torch.cuda, name, type(name, (_Stream,), {})) for name in ("Stream", "Event")),
        (torch.cuda, "current_stream", _always(_Stream())),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "current_device", _always(_CPU)),
        (torch.cuda, "device_count", _always(1)),  # without a device Megatron makes no groups for model parallelism
        (torch.Tensor, "cuda", lambda self, *args, **kwargs: self),
        (DeviceMesh, "from_group", lambda group, device_type, **kwargs: from_group(group, "cpu", **kwargs)),
    )
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
    _CudaMeansCpu().__enter__()  # type: ignore[no-untyped-call]
