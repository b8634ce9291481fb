"""Imports modules once in the forkserver, so that a rank starts in milliseconds.

Whether something imports Megatron-Core that should not is tested in fresh interpreters, not in ranks.

It never starts a thread or touches a device, because then the process could not be forked. Only the forkserver imports
this module.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import warnings
from collections.abc import Iterable

import torch

_OFTEN_NEEDED = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.serialization",
    "numpy",
    "numpy.ma",
    "encodings.ascii",
    "encodings.utf_32_le",
    "msgspec",
    "pytest",
    # `import robust_dcp` alone imports next to nothing.
    "robust_dcp.api",
    "robust_dcp.asynchronous",
    "robust_dcp.cli.app",
    "robust_dcp.installation",
    "robust_dcp.public_later",
    "tests.faults.disk",
    "tests.harness.faults",
    "tests.harness.fingerprints",
    "tests.harness.ranks",
    "tests.harness.state_dicts",
    "hypothesis",
)
_ASK_FOR_DEVICES = (
    "tests.harness.without_inductor",
    "torch._dynamo",  # the first collective of a DTensor imports it: 0.8 seconds of CPU time on each rank
    "megatron.core",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard",
    "megatron.core.transformer.fsdp_dtensor_checkpoint",
    "demo.megatron_model",
)


def _load(names: Iterable[str]) -> None:
    """Import modules in the forkserver.

    If a module cannot be imported, the rank that needs it fails with a traceback. An exception here would end the
    server, and the test would only see a broken pipe. Warnings are treated in the same way.
    """
    gc.disable()  # all of it stays
    for name in names:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    gc.enable()
    # Otherwise garbage collection in a rank would walk all objects loaded here, and copy every page that it touches.
    gc.collect()
    gc.freeze()


_load(_OFTEN_NEEDED)
# Megatron asks for CUDA devices while it is imported. CUDA cannot be used by a process that was forked after that.
if not torch.backends.cuda.is_built() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    _load(_ASK_FOR_DEVICES)
