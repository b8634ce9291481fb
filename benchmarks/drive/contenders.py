"""The contenders that save and load: robust_dcp, the writers of torch, and other packages if they are installed.

Each is used synchronously as its documentation says, from one process or from each rank of the default group. Packages
are imported when they are used. :func:`why_not` finds out which contenders work here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import robust_dcp
from benchmarks.drive.shapes import StateDict

__all__ = [
    "OURS",
    "READERS",
    "STOCK",
    "STOCK_DEFAULT",
    "STOCK_READER",
    "WRITERS",
    "Reader",
    "Writer",
    "remove_checkpoint",
    "why_not",
]


def _nothing(state_dict: StateDict, path: str) -> None:
    pass


@dataclass(frozen=True)
class Writer:
    """A way to save.

    Attributes:
        save: saves a state dict into a directory that does not exist yet. This is timed.
        readers: the names in ``READERS`` that can load what this writer saved.
        prepare: called before ``save`` with the same arguments. This is not timed.
        note: a remark on the figures.
        takes_ranks: whether it is also measured with several ranks, and with objects in the state dict.
    """

    save: Callable[[StateDict, str], Any]
    readers: tuple[str, ...] = ()
    prepare: Callable[[StateDict, str], Any] = _nothing
    note: str = ""
    takes_ranks: bool = False


@dataclass(frozen=True)
class Reader:
    """A way to load.

    Attributes:
        load: loads a directory into the tensors of a state dict, in place. This is timed.
        takes_ranks: as for :class:`Writer`.
    """

    load: Callable[[StateDict, str], Any]
    takes_ranks: bool = False


def _is_alone() -> bool:
    return not dist.is_initialized()


def remove_checkpoint(path: str) -> None:
    """Remove the checkpoint of all ranks. Returns when it is gone."""
    if _is_alone() or dist.get_rank() == 0:
        shutil.rmtree(path)
    if not _is_alone():
        dist.barrier()


def _ours(**options: Any) -> Callable[[StateDict, str], Any]:
    return lambda state_dict, path: robust_dcp.save(
        state_dict, storage_writer=robust_dcp.RobustWriter(path, **options), no_dist=_is_alone()
    )


def _stock(threads: int, planner: dcp.DefaultSavePlanner | None = None) -> Callable[[StateDict, str], Any]:
    return lambda state_dict, path: dcp.save(
        state_dict,
        storage_writer=dcp.FileSystemWriter(path, thread_count=threads),
        planner=planner,
        no_dist=_is_alone(),
    )


def _stock_with_cached_plan(state_dict: StateDict, path: str) -> None:
    _stock(1, dcp.DefaultSavePlanner(enable_plan_caching=True))(state_dict, path)


def _before(save: Callable[[StateDict, str], Any]) -> Callable[[StateDict, str], Any]:
    """Make a function that saves the same structure once and removes it again."""

    def prepare(state_dict: StateDict, path: str) -> None:
        save(state_dict, path)
        remove_checkpoint(path)

    return prepare


def _save_huggingface(state_dict: StateDict, path: str) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    dcp.save(state_dict, storage_writer=HuggingFaceStorageWriter(path), no_dist=True)


def _load_huggingface(state_dict: StateDict, path: str) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    dcp.load(state_dict, storage_reader=HuggingFaceStorageReader(path), no_dist=True)


def _checkpoint_manager() -> Any:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(config)


def _load_snapshot(state_dict: StateDict, path: str) -> None:
    import torchsnapshot

    target = torchsnapshot.StateDict(**state_dict)
    torchsnapshot.Snapshot(path).restore({"model": target})
    state_dict.update(target)


def _save_snapshot(state_dict: StateDict, path: str) -> None:
    import torchsnapshot

    torchsnapshot.Snapshot.take(path, {"model": torchsnapshot.StateDict(**state_dict)})


def _megatron_group(state_dict: StateDict, path: str) -> None:
    """Make a process group, because Megatron-Core's writer needs the rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _save_megatron(state_dict: StateDict, path: str) -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    class Synchronous(FileSystemWriterAsync):
        """As Megatron-Core's synchronous save runs it: prepare, write in forked processes, collect."""

        def write_data(self, plan: Any, planner: Any) -> torch.futures.Future[Any]:
            self.prepare_write_data(plan, planner)
            function, _, arguments = self.get_save_function_and_args()
            function(*arguments)
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(self.retrieve_write_results())
            return future

    os.makedirs(path, exist_ok=True)
    dcp.save(state_dict, storage_writer=Synchronous(path, thread_count=2), no_dist=True)


OURS = "robust_dcp"
STOCK_DEFAULT = "torch FileSystemWriter, 1 thread"
STOCK = (STOCK_DEFAULT, "torch FileSystemWriter, 2 threads", "torch FileSystemWriter, 4 threads")
STOCK_READER = "torch FileSystemReader"

_DCP_READERS = (OURS, STOCK_READER)

WRITERS: dict[str, Writer] = {
    OURS: Writer(_ours(), _DCP_READERS, takes_ranks=True),
    f"{OURS}, repeated save": Writer(
        _ours(), prepare=_before(_ours()), note="of the structure of an earlier save", takes_ranks=True
    ),
    f"{OURS}, safetensors": Writer(
        _ours(layout="safetensors"), (OURS, "torch HuggingFaceStorageReader"), takes_ranks=True
    ),
    STOCK[0]: Writer(_stock(1), _DCP_READERS, takes_ranks=True),
    STOCK[1]: Writer(_stock(2), takes_ranks=True),
    STOCK[2]: Writer(_stock(4), takes_ranks=True),
    "torch FileSystemWriter, repeated save": Writer(
        _stock_with_cached_plan,
        prepare=_before(_stock_with_cached_plan),
        note="1 thread, enable_plan_caching",
        takes_ranks=True,
    ),
    "torch HuggingFaceStorageWriter": Writer(_save_huggingface, ("torch HuggingFaceStorageReader",)),
    "torch_checkpointing": Writer(
        lambda state_dict, path: _checkpoint_manager().save(path, {"model": state_dict}),
        ("torch_checkpointing",),
        note="buffered: its direct I/O fails with EINVAL on ext4 and XFS (0.1.1)",
    ),
    "torchsnapshot": Writer(_save_snapshot, ("torchsnapshot",)),
    "Megatron-Core FileSystemWriterAsync": Writer(
        _save_megatron, prepare=_megatron_group, note="2 processes; the figures do not include their memory"
    ),
}

READERS: dict[str, Reader] = {
    OURS: Reader(
        lambda state_dict, path: robust_dcp.load(
            state_dict, storage_reader=robust_dcp.RobustReader(path), no_dist=_is_alone()
        ),
        takes_ranks=True,
    ),
    STOCK_READER: Reader(
        lambda state_dict, path: dcp.load(state_dict, storage_reader=dcp.FileSystemReader(path), no_dist=_is_alone()),
        takes_ranks=True,
    ),
    "torch HuggingFaceStorageReader": Reader(_load_huggingface),
    "torch_checkpointing": Reader(
        lambda state_dict, path: _checkpoint_manager().load(path, into={"model": state_dict})
    ),
    "torchsnapshot": Reader(_load_snapshot),
}


def why_not(writer: str, directory: str) -> dict[str, str]:
    """Save something small, and load it with each of the writer's readers.

    Returns:
        The reason why something does not work here, by ``writer`` or ``"{reader} < {writer}"``.
    """
    path = os.path.join(directory, "trial")
    state_dict = {"weight": torch.arange(12.0).reshape(3, 4), "step": torch.tensor(7.0)}
    failed: dict[str, str] = {}
    try:
        with _noted(failed, writer):
            WRITERS[writer].prepare(state_dict, path)
            WRITERS[writer].save(state_dict, path)
        for reader in () if failed else WRITERS[writer].readers:
            with _noted(failed, f"{reader} < {writer}"):
                loaded = {name: torch.zeros_like(tensor) for name, tensor in state_dict.items()}
                READERS[reader].load(loaded, path)
                if not all(torch.equal(loaded[name], tensor) for name, tensor in state_dict.items()):
                    raise ValueError("loads something else than was saved")
    finally:
        shutil.rmtree(path, ignore_errors=True)
    return failed


@contextmanager
def _noted(failed: dict[str, str], name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        failed[name] = f"{error.name} is not installed" if error.name else str(error)
    except (Exception, CheckpointException) as error:
        lines = str(error).strip().splitlines() or [""]
        # Stock's exception begins with the ranks and a traceback, and ends with what happened.
        failed[name] = (
            lines[-1] if lines[0].startswith("CheckpointException") else f"{type(error).__name__}: {lines[0]}"
        )
