"""What the forkserver imports once, so that a rank starts in milliseconds with everything at hand.

It never starts a thread or touches a device: a process that did could not be forked. Only the forkserver imports it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import warnings

THIRD_PARTY = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "numpy",
    "msgspec",
    "pytest",
    "hypothesis",
)
# What importing Megatron-Core costs, seconds of CPU, each rank of a test would pay again. Whether something imports it
# that should not is tested in fresh interpreters, not in ranks.
MEGATRON = (
    "megatron.core",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard",
    "megatron.core.transformer.fsdp_dtensor_checkpoint",
    "demo.megatron_model",
)
OWN = (
    "robust_dcp",
    "robust_dcp.errors",
    "robust_dcp.comm",
    "robust_dcp.storage",
    "robust_dcp.plan",
    "robust_dcp.plan.save_planner",
    "robust_dcp.plan.load_planner",
    "robust_dcp.api",
)

for name in (*THIRD_PARTY, *MEGATRON, *OWN):
    # A module that cannot be imported fails in the rank that needs it, with a traceback, and not here, where an
    # exception would end the server and be reported as a broken pipe. So do warnings: in the test, or not at all.
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(name)

# A rank that collected garbage would walk all that is loaded here, and copy every page that it touches. Megatron's
# optimizer collects at each sharded state dict.
gc.collect()
gc.freeze()
