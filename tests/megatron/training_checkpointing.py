"""How ``megatron/training/checkpointing.py`` of Megatron-LM 0.19 saves and loads ``torch_dcp`` and ``fsdp_dtensor``.

Its own lines, without what they stand in, which needs all of Megatron-LM and its arguments. :func:`megatron_lm` gives
this module under the name of that one.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint import FileSystemReader, default_planner

__all__ = ["load_args", "load_checkpoint", "load_fsdp_dtensor", "megatron_lm", "save_async", "save_checkpoint"]


def megatron_lm() -> ModuleType:
    """This module as ``megatron.training.checkpointing``; ``sys.modules`` stays as it is."""
    spec = importlib.util.spec_from_file_location("megatron.training.checkpointing", __file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save_checkpoint(state_dict: dict[str, Any], checkpoint_name: str) -> None:
    fs_storage_writer = torch.distributed.checkpoint.FileSystemWriter(checkpoint_name)
    torch.distributed.checkpoint.save(state_dict=state_dict, storage_writer=fs_storage_writer)


def save_async(state_dict: dict[str, Any], checkpoint_name: str, async_strategy: str) -> Any:
    planner = torch.distributed.checkpoint.DefaultSavePlanner()
    coordinator_rank = 0
    _, async_modules = get_async_strategy(async_strategy)
    save_state_dict_async_plan = async_modules["save_state_dict_async_plan"]
    fs_storage_writer = async_modules["FileSystemWriterAsync"](checkpoint_name, thread_count=2, use_msc=False)
    save_state_dict_ret = save_state_dict_async_plan(
        state_dict, fs_storage_writer, None, coordinator_rank, planner=planner, enable_cache=False
    )
    return get_save_and_finalize_callbacks(fs_storage_writer, save_state_dict_ret, async_strategy)


def get_async_strategy(async_strategy: str) -> tuple[str, dict[str, Any]]:
    """Megatron-Core's, from 0.17 on."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    return async_strategy, {"FileSystemWriterAsync": FileSystemWriterAsync}


def get_save_and_finalize_callbacks(writer: Any, save_state_dict_ret: Any, async_strategy: str = "nvrx") -> Any:
    raise AssertionError("a save by robust_dcp was expected")


def load_args(checkpoint_name: str) -> dict[str, Any]:
    state_dict: dict[str, Any] = {"args": None, "iteration": None}
    torch.distributed.checkpoint.load(state_dict=state_dict, checkpoint_id=checkpoint_name)
    return state_dict


def load_checkpoint(state_dict: dict[str, Any], checkpoint_name: str) -> None:
    fs_storage_reader = torch.distributed.checkpoint.FileSystemReader(checkpoint_name)
    torch.distributed.checkpoint.load_state_dict(state_dict=state_dict, storage_reader=fs_storage_reader)


def load_fsdp_dtensor(state_dict: dict[str, Any], checkpoint_name: str, *, allow_partial_load: bool) -> None:
    fs_storage_reader = FileSystemReader(checkpoint_name)
    planner = default_planner.DefaultLoadPlanner(allow_partial_load=allow_partial_load)
    torch.distributed.checkpoint.load_state_dict(
        state_dict=state_dict, storage_reader=fs_storage_reader, planner=planner
    )
