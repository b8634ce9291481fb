"""Real text to train on: the bytes of the source of ``torch.nn.functional``. Every installation of torch has it."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["CONTEXT", "VOCABULARY", "Text"]

CONTEXT = 64
"""Tokens in a window."""
VOCABULARY = 256
"""Tokens are bytes."""


class Text:
    """Draws windows of the text. The same ``seed`` draws the same windows."""

    def __init__(self, *, seed: int) -> None:
        source = Path(torch.nn.functional.__file__).read_bytes()
        self._tokens = torch.frombuffer(bytearray(source), dtype=torch.uint8)
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, n_windows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw tokens, and for each token the next one: two int64 tensors ``[n_windows, CONTEXT]``."""
        starts = torch.randint(len(self._tokens) - CONTEXT - 1, (n_windows,), generator=self._generator)
        windows = torch.stack([self._tokens[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
