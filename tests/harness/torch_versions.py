"""Marks for tests of what older versions of torch do not have. Each tests for the thing, and its reason names it."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import staging, state_dict_saver

__all__ = [
    "HAS_SAFETENSORS",
    "needs_background_stager",
    "needs_response",
    "needs_safetensors",
    "needs_use_collectives",
]

HAS_SAFETENSORS = hasattr(dcp, "HuggingFaceStorageReader")

needs_safetensors = pytest.mark.skipif(not HAS_SAFETENSORS, reason="this torch has no HuggingFaceStorageReader")

needs_background_stager = pytest.mark.skipif(
    not hasattr(staging, "DefaultStager"), reason="this torch has no DefaultStager, which copies in the background"
)

needs_response = pytest.mark.skipif(
    not hasattr(state_dict_saver, "AsyncSaveResponse"), reason="async_save of this torch returns no AsyncSaveResponse"
)

needs_use_collectives = pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters, reason="save of this torch has no use_collectives"
)
