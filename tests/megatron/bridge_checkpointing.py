"""How ``megatron/bridge/training/checkpointing.py`` of Megatron-Bridge 0.7 saves ``fsdp_dtensor`` asynchronously.

The names that it binds and the calls that it makes, without what they stand in. Needs ``nvidia_resiliency_ext``.
"""

from __future__ import annotations

from typing import Any

from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import save_state_dict_async_plan
from torch.distributed.checkpoint import DefaultSavePlanner

__all__ = ["save_async"]


def save_async(state_dict: dict[str, Any], checkpoint_name: str) -> Any:
    writer = FileSystemWriterAsync(checkpoint_name, thread_count=2, use_msc=False)
    planned = save_state_dict_async_plan(state_dict, writer, None, 0, planner=DefaultSavePlanner(), enable_cache=False)
    return get_save_and_finalize_callbacks(writer, planned)


def get_save_and_finalize_callbacks(writer: Any, save_state_dict_ret: Any) -> Any:
    raise AssertionError("a save by robust_dcp was expected")
