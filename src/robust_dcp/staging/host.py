"""Brings a tensor to the host, ready to be read as bytes.

This module copies one tensor from device to host; ``together`` copies many small ones. It never keeps a buffer. The
threads of ``storage.writing.engine`` call it for one tensor at a time, so that each thread has at most one tensor on
the host.
"""

from __future__ import annotations

import torch

__all__ = ["to_host"]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a contiguous, detached CPU tensor of the same dtype and shape.

    A contiguous CPU tensor is not copied. A copy from a device waits for the work queued on the current stream, so it
    has the values after the caller's last operation.
    """
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        # Lazy conjugation and negation are flags of the tensor. Its bytes do not show them.
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.to(device="cpu").contiguous()
