"""Memory that the system does not lock is used all the same, and the refusal leaves nothing behind."""

from __future__ import annotations

import ctypes

import pytest
import torch

from robust_dcp.staging.blocks import Block


class Runtime:
    """Stands in for ``torch.cuda.cudart()``, and keeps the error of a failed call as the CUDA runtime does.

    Args:
        error: what it answers when it is asked to lock memory.
    """

    def __init__(self, error: int) -> None:
        self.error = error
        self.kept_error = 0
        self.calls: list[str] = []
        self.cudaHostRegister = self.register
        self.cudaHostUnregister = self.unregister
        self.cudaGetLastError = self.last_error

    def register(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append("register")
        self.kept_error = self.error
        return self.error

    def unregister(self, address: int) -> int:
        self.calls.append("unregister")
        return 0

    def last_error(self) -> int:
        error, self.kept_error = self.kept_error, 0
        return error


def test_a_block_that_was_refused_is_asked_for_once_and_leaves_no_error_for_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Runtime(error=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    block = Block(4096)
    for _ in range(3):
        block.pin()
        assert not block.is_pinned and cuda.kept_error == 0
    block.unpin()
    assert cuda.calls == ["register"]
    cuda.error = 0
    block.pin()
    block.unpin()
    assert cuda.calls == ["register", "register", "unregister"]
