"""What our own tests have the forkserver import besides: seconds of CPU that each rank of a test would pay again.

Whether something imports Megatron-Core that should not is tested in fresh interpreters, not in ranks.
"""

from __future__ import annotations

from robust_dcp.testing.preload import load_for_ranks

load_for_ranks(
    (
        "hypothesis",
        "megatron.core",
        "megatron.core.dist_checkpointing.strategies.fully_parallel",
        "megatron.core.dist_checkpointing.strategies.torch",
        "megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard",
        "megatron.core.transformer.fsdp_dtensor_checkpoint",
        "demo.megatron_model",
    )
)
