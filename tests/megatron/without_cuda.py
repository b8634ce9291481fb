"""Lets Megatron's training run on a machine without a GPU: the few calls of CUDA that it makes without asking."""

from __future__ import annotations

import contextlib
from typing import Any

__all__ = ["redirect_cuda"]


class _Stream:
    """In place of ``torch.cuda.Stream``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


def redirect_cuda() -> None:
    """Redirect this process's ``torch.cuda`` calls for good, also those that only training makes."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from demo import megatron_cpu

    megatron_cpu.install()
    from_group = DeviceMesh.from_group
    stand_ins: tuple[tuple[Any, str, Any], ...] = (
        (torch.cuda, "device_count", lambda: 1),  # without a device Megatron makes no groups for model parallelism
        (torch.cuda, "get_rng_state", lambda *args: torch.zeros(8, dtype=torch.uint8)),
        (torch.cuda.random, "get_rng_state", lambda *args, **kwargs: torch.zeros(8, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", lambda *args, **kwargs: None),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (DeviceMesh, "from_group", lambda group, device_type, **kwargs: from_group(group, "cpu", **kwargs)),
    )
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
