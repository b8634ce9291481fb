"""Real text to train on that is everywhere where torch is: the source of ``torch.nn.functional``, byte by byte."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["CONTEXT", "VOCABULARY", "Text"]

CONTEXT = 64
"""Tokens in a window."""
VOCABULARY = 256
"""Tokens are bytes."""


class Text:
    """Draws windows of the text; the same ``seed`` draws the same windows."""

    def __init__(self, *, seed: int) -> None:
        source = Path(torch.nn.functional.__file__).read_bytes()
        self._tokens = torch.frombuffer(bytearray(source), dtype=torch.uint8)
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, n_windows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, and for each of them the one that follows: two int64 tensors ``[n_windows, CONTEXT]``."""
        starts = torch.randint(len(self._tokens) - CONTEXT - 1, (n_windows,), generator=self._generator)
        windows = torch.stack([self._tokens[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
