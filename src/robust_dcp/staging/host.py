"""Brings a tensor to the host, ready to be read as bytes.

This module copies one tensor from device to host; ``together`` copies many small ones. It never keeps a buffer. The
threads of ``storage.writing.engine`` call it for one tensor at a time, so that each thread has at most one tensor on
the host.

``Tensor.cpu()`` and ``Stream.synchronize()`` wait for a whole stream, and PyTorch counts them as synchronizing calls,
which a training loop may have forbidden (``torch.cuda.set_sync_debug_mode``). So everything here, and every other
module of this package, waits for events.
"""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["on_cpu", "to_host", "wait_for_copies"]

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""Only these classes are known to be nothing but their data."""


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or its copy if it is on a device. The copy comes after the work queued on the current stream."""
    if not tensor.is_cuda or type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.to("cpu")
    copy = torch.empty_like(tensor, device="cpu", memory_format=torch.preserve_format)
    copy.copy_(tensor, non_blocking=True)
    wait_for_copies(torch.cuda.current_stream(tensor.device))
    return copy


def wait_for_copies(stream: torch.cuda.Stream) -> None:
    """Wait until the work that was queued on a stream before this call is done."""
    done = torch.cuda.Event()
    done.record(stream)
    done.synchronize()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a contiguous, detached CPU tensor of the same dtype and shape.

    A contiguous CPU tensor is not copied. A copy from a device waits for the work queued on the current stream, so it
    has the values after the caller's last operation.
    """
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        # Lazy conjugation and negation are flags of the tensor. Its bytes do not show them.
        tensor = tensor.resolve_conj().resolve_neg()
    return on_cpu(tensor).contiguous()
