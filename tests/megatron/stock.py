"""Stock Megatron-Core strategies as tests use them: unchanged, but without the manager process that they spawn.

A synchronous save needs that process for nothing but a queue that one process fills and empties; a plain queue saves
about 7 seconds a test. The demo runs stock with everything it starts.
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

__all__ = ["stock_strategy"]


def stock_strategy(**options: Any) -> TorchDistSaveShardedStrategy:
    """Megatron's own ``torch_dist`` strategy."""
    return TorchDistSaveShardedStrategy("torch_dist", 1, **options)
