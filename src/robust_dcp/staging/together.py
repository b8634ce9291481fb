"""Copies many small tensors to the host at the cost of one copy: each copy from a device waits, however small it is.

The tensors are gathered on the device first. This module never keeps a buffer. ``storage.writing.pack`` calls it for
small tensors on a device, with at most one block at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from robust_dcp.staging.host import on_cpu, to_host

__all__ = ["flat_bytes", "to_host_together"]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The data of ``tensor`` on its own device, as uint8 ``[nbytes]``. It is copied only if it is not contiguous."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        tensor = to_host(tensor)  # only the subclass knows how its data lies
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not reshape(-1): a contiguous tensor may have any stride where its size is 1, and reshape keeps that stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def to_host_together(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the host. Tensors on one device are copied together.

    Args:
        parts: uint8 ``[n]`` each, on any device.

    Returns:
        uint8 ``[n]`` each, on the CPU, in the same order.
    """
    on_host = list(parts)
    for device in dict.fromkeys(part.device for part in parts):
        places = [place for place, part in enumerate(parts) if part.device == device]
        try:
            copied = on_cpu(torch.cat([parts[place] for place in places]))
        except torch.OutOfMemoryError:  # training has filled the device, and gathering needs room there
            copies = [on_cpu(parts[place]) for place in places]
        else:
            copies = list(copied.split([parts[place].numel() for place in places]))
        for place, copy in zip(places, copies, strict=True):
            on_host[place] = copy
    return on_host
