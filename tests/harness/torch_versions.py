"""Marks for tests of what older versions of torch do not have. Each tests for the thing, and its reason names it."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

__all__ = ["HAS_SAFETENSORS", "needs_lazy_connections", "needs_use_collectives"]

HAS_SAFETENSORS = hasattr(dcp, "HuggingFaceStorageReader")

needs_use_collectives = pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters, reason="save of this torch has no use_collectives"
)
needs_lazy_connections = pytest.mark.skipif(
    "lazy_init" not in str(dist.ProcessGroupGloo.create_device.__doc__),
    reason="gloo of this torch connects each rank to each other one at once",
)
