"""Stock Megatron-Core strategies as tests use them: unchanged, but for the process that they start for a queue.

It is forked here. Stock starts it afresh, which takes seconds on each rank. The demo runs stock with what it starts.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

__all__ = ["stock_strategy"]


def stock_strategy(**options: Any) -> TorchDistSaveShardedStrategy:
    """Megatron's own ``torch_dist`` strategy."""
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    return TorchDistSaveShardedStrategy("torch_dist", 1, **options)
