"""Many small tensors on the host at the cost of one copy: a copy from a device waits for it, however small it is.

Owns the gathering on the device; never keeps a buffer. Called by ``storage.pack`` with no more than a block at once,
for small tensors on a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from robust_dcp.staging.host import to_host

__all__ = ["flat_bytes", "to_host_together"]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The data of ``tensor``, on its own device, as uint8 ``[nbytes]``; a copy only where it is not contiguous."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        tensor = to_host(tensor)  # what a subclass makes of the rest is its own affair
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not reshape(-1): where a size is 1, a contiguous tensor may have any stride, and keeps it.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def to_host_together(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the host, those of one device all at once.

    Args:
        parts: uint8 ``[n]`` each, on any device.

    Returns:
        uint8 ``[n]`` each, on the CPU, in the same order.
    """
    on_host = list(parts)
    for device in dict.fromkeys(part.device for part in parts):
        places = [place for place, part in enumerate(parts) if part.device == device]
        try:
            copied = torch.cat([parts[place] for place in places]).cpu()
        except torch.OutOfMemoryError:  # training has filled the device, and there a copy needs room as well
            copies = [parts[place].cpu() for place in places]
        else:
            copies = list(copied.split([parts[place].numel() for place in places]))
        for place, copy in zip(places, copies, strict=True):
            on_host[place] = copy
    return on_host
