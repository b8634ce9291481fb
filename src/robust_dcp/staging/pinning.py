"""Locks memory for copies by a CUDA device. Only into locked memory such copies run by themselves.

A machine may refuse to lock more memory. Then nothing is lost but speed, so a refusal must leave no trace: the CUDA
runtime keeps the error of a failed call for its thread, and PyTorch would raise it after the next kernel that this
thread starts, which may be one of the training.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

import torch

__all__ = ["NOT_PINNED", "pin", "unpin"]

NOT_PINNED: Final = "copied slowly: the system does not lock memory for the device"
"""What a report says of a save whose memory could not be locked."""

_FORGETS_ERROR: Final = ("cudaGetLastError", "hipGetLastError")
"""Functions that return the error which the runtime keeps for the calling thread, and forget it."""


def pin(address: int, nbytes: int) -> bool:
    """Lock memory. Returns whether that worked."""
    if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0:
        return True
    _forget_error()
    return False


def unpin(address: int) -> None:
    """Undo :func:`pin`. Call this before the memory is freed."""
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        _forget_error()


def _forget_error() -> None:
    # PyTorch loads the runtime's library so that its functions are found among those of the process.
    process = ctypes.CDLL(None)
    for name in _FORGETS_ERROR:
        if hasattr(process, name):
            getattr(process, name)()
            return
    with contextlib.suppress(Exception):  # PyTorch takes the error, and raises it, after this kernel
        torch.zeros(1, device="cuda")
