"""The contenders of ``benchmarks.async_save``: robust_dcp, stock, and other packages that save beside training.

Others are optional. They take part if their package is on the path:

    pip install --no-deps --target .compat/torch-checkpointing torch-checkpointing==0.1.1
    pip install --no-deps --target .compat/nvidia-resiliency-ext-0.4.1 nvidia-resiliency-ext==0.4.1
    PYTHONPATH=.compat/torch-checkpointing:.compat/nvidia-resiliency-ext-0.4.1 python -m benchmarks.async_save
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import robust_dcp

__all__ = ["CONTENDERS", "Save", "Saved", "missing_package"]

Saved = tuple[Callable[[], object], Callable[[], object]]
"""What an async save returns: a function that waits until tensors may change, and one that waits for the commit."""

Save = Callable[[dict[str, Any], str], Saved]
"""Saves a state dict in a directory."""


def _nothing() -> None:
    return None


def _ours(state_dict: dict[str, Any], path: str) -> Saved:
    saving = robust_dcp.async_save(state_dict, checkpoint_id=path)
    assert isinstance(saving, Future)
    return _nothing, saving.result


def _ours_by_process(state_dict: dict[str, Any], path: str) -> Saved:
    saving = robust_dcp.async_save(state_dict, checkpoint_id=path, executor="process")
    assert isinstance(saving, Future)
    return _nothing, saving.result


def _ours_lazily(state_dict: dict[str, Any], path: str) -> Saved:
    saving = robust_dcp.async_save(state_dict, checkpoint_id=path, staging="lazy")
    assert isinstance(saving, robust_dcp.AsyncSave)
    return saving.wait_staged, saving.upload_completion.result


def _ours_at_once(state_dict: dict[str, Any], path: str) -> Saved:
    robust_dcp.save(state_dict, checkpoint_id=path)
    return _nothing, _nothing


def _stock(kind: AsyncCheckpointerType, stager: Callable[[], Any] = _nothing) -> Save:
    kept: list[Any] = []  # a stager keeps its memory between saves, as ours does

    def save(state_dict: dict[str, Any], path: str) -> Saved:
        if not kept:
            kept.append(stager())
        more = {} if kept[0] is None else {"async_stager": kept[0]}
        saving = dcp.async_save(state_dict, checkpoint_id=path, async_checkpointer_type=kind, **more)
        if isinstance(saving, Future):
            return _nothing, saving.result
        return saving.staging_completion.result, saving.upload_completion.result

    return save


def _stager(*, is_async: bool, is_shared: bool) -> Callable[[], Any]:
    def make() -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        return DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=is_shared,
                use_async_staging=is_async,
                use_non_blocking_copy=False,
            )
        )

    return make


def _torch_checkpointing() -> Save:
    """``torch_checkpointing``: each rank writes its own part into a file of its own.

    Such files load into the same sharding only. Its ``DefaultResharder`` would change that, but in 0.1.1 it requires a
    CUDA device. Direct I/O is off, because on some file systems the package refuses it. A thread stages, and tensors
    may change once its lock is free.
    """
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config.with_async_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(config)

    def save(state_dict: dict[str, Any], path: str) -> Saved:
        written = manager.save(path, {"model": state_dict})

        def wait_staged() -> None:
            with manager.lock():
                return

        return wait_staged, _nothing if written is None else written.result

    return save


def _nvrx() -> Save:
    """``nvidia_resiliency_ext``: its queue forks a process for each save, which keeps the tensors as they are then.

    Its persistent worker is not used. It gets the CPU tensors themselves, and would write what training has changed.
    """
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
    from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
        CheckpointMetadataCache,
        save_state_dict_async_finalize,
        save_state_dict_async_plan,
    )

    if not torch.cuda.is_available():  # the package calls these without asking whether there is a device
        torch.cuda.synchronize = _nothing  # type: ignore[assignment]
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    queue, plans = AsyncCallsQueue(persistent=False), CheckpointMetadataCache()

    def save(state_dict: dict[str, Any], path: str) -> Saved:
        writer = FileSystemWriterAsync(path, thread_count=2)
        result = save_state_dict_async_plan(
            state_dict, writer, planner=dcp.DefaultSavePlanner(), enable_cache=True, metadata_cache=plans
        )
        function, preload, arguments = writer.get_save_function_and_args()
        request = AsyncRequest(
            function,
            arguments,
            [lambda: save_state_dict_async_finalize(*result)],
            async_fn_kwargs={},
            preload_fn=preload,
        )
        queue.schedule_async_request(request)
        return _nothing, lambda: queue.maybe_finalize_async_calls(blocking=True, no_dist=False)

    return save


CONTENDERS: dict[str, Callable[[], Save]] = {
    "ours": lambda: _ours,
    "ours, process": lambda: _ours_by_process,
    "ours, lazy": lambda: _ours_lazily,
    "ours, synchronous": lambda: _ours_at_once,
    "stock, thread": lambda: _stock(AsyncCheckpointerType.THREAD),
    "stock, process": lambda: _stock(AsyncCheckpointerType.PROCESS),
    "stock, thread, DefaultStager": lambda: _stock(
        AsyncCheckpointerType.THREAD, _stager(is_async=False, is_shared=False)
    ),
    "stock, process, DefaultStager": lambda: _stock(
        AsyncCheckpointerType.PROCESS, _stager(is_async=False, is_shared=True)
    ),
    "torch_checkpointing": _torch_checkpointing,
    "nvidia_resiliency_ext": _nvrx,
}


def missing_package(who: str) -> str | None:
    """The package that a contender needs, if it is missing from the path."""
    if who in ("torch_checkpointing", "nvidia_resiliency_ext") and importlib.util.find_spec(who) is None:
        return who
    return None
