"""Tensors on the host, ready to be read as bytes.

Owns the copy of one tensor from device to host (``together`` copies many small ones); never keeps a buffer. Called by
``storage.engine`` from its threads, one tensor at a time, so that no more than a tensor for each thread is staged.
"""

from __future__ import annotations

import torch

__all__ = ["to_host"]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a contiguous, detached CPU tensor of the same dtype and shape.

    No copy is made of a CPU tensor that is contiguous already. A copy from a device waits for the work queued on the
    current stream before it, so the values are those that the caller's last operation left.
    """
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        # Lazy conjugation and negation live in a bit of the tensor, not in its bytes.
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.to(device="cpu").contiguous()
