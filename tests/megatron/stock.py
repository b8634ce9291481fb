"""Stock Megatron-Core strategies as tests use them: unchanged, but without the manager process that they spawn.

A synchronous save needs that process for nothing but a queue that one process fills and empties; a plain queue saves
about 7 seconds a test. The demo runs stock with everything it starts.
"""

from __future__ import annotations

import inspect
import queue
from typing import Any

import numpy as np
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

__all__ = ["stock_strategy"]


def stock_strategy(**options: Any) -> TorchDistSaveShardedStrategy:
    """Megatron's own ``torch_dist`` strategy."""
    if not hasattr(np, "product"):
        np.product = np.prod  # type: ignore[attr-defined]  # 0.14 knows it by the name that NumPy 2 has dropped
    if hasattr(AsyncRequest, "execute_sync") and "execute_sync" in inspect.getsource(TorchDistSaveShardedStrategy.save):
        filesystem_async._results_queue = queue.Queue()  # up to 0.14 another process fills it
    return TorchDistSaveShardedStrategy("torch_dist", 1, **options)
