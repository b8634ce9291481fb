"""Checkpoints of all kinds that tests copy, what is found of them afterwards, and a disk on which something happens."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import robust_dcp
from robust_dcp import CopyOptions, RobustWriter
from robust_dcp.storage.files.disk import Disk, OpenFile, storage_error

__all__ = ["KINDS", "ONE_THREAD", "ActingDisk", "data_files", "files_of", "loaded", "refuse", "save", "state_dict"]

StateDict = dict[str, Any]

ONE_THREAD = CopyOptions(threads=1, retries=1)


def state_dict(value: float = 1.0, rank: int = 0) -> StateDict:
    return {"weight": torch.full((100_000,), value), f"of_{rank}": torch.full((7,), value), "step": torch.tensor(value)}


def save(path: Any, value: float = 1.0) -> Path:
    robust_dcp.save(state_dict(value), checkpoint_id=path)
    return Path(path)


def loaded(place: Any, rank: int = 0) -> float:
    found = state_dict(-1.0, rank)
    robust_dcp.load(found, checkpoint_id=place)
    (value,) = {float(each) for tensor in found.values() for each in tensor.unique()}
    return value


def files_of(path: Path) -> set[str]:
    return {str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()}


def data_files(path: Path) -> list[str]:
    return sorted(each.name for each in path.glob("*.distcp"))


def _save_shards(path: Path) -> None:
    robust_dcp.save(state_dict(), storage_writer=RobustWriter(path, layout="safetensors"))


def _save_stock(path: Path) -> None:
    dcp.save(state_dict(), checkpoint_id=path, no_dist=True)


def _save_like_megatron(path: Path) -> None:
    _save_stock(path)
    torch.save({"iteration": 7}, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    save(path / "modelopt_state")


KINDS: dict[str, Callable[[Path], object]] = {
    "ours": save,
    "safetensors": _save_shards,
    "stock": _save_stock,
    "Megatron": _save_like_megatron,
}


class ActingDisk(Disk):
    """Does something right before a call for a path: what another program does meanwhile, or what the disk refuses.

    Args:
        call: ``open``, ``create``, ``read``, ``write``, ``fsync``, ``rename``, ``unlink`` or ``fsync directory``.
        part: of the path of the file, or of its new name.
        act: called with the path.
        times: how often.
    """

    def __init__(self, call: str, part: str, act: Callable[[str], object], times: int = 1) -> None:
        super().__init__()
        self.call, self.part, self.act, self.times = call, part, act, times

    def _at(self, call: str, path: str) -> None:
        if call == self.call and self.part in path and self.times:
            self.times -= 1
            self.act(path)

    def open_read(self, path: str, *, direct: bool = False) -> OpenFile:
        self._at("open", path)
        return super().open_read(path, direct=direct)

    def open_new(self, path: str, *, direct: bool = False) -> OpenFile:
        self._at("create", path)
        return super().open_new(path, direct=direct)

    def pread_into(self, file: OpenFile, buffer: Any, offset: int) -> int:
        self._at("read", file.path)
        return super().pread_into(file, buffer, offset)

    def pwrite(self, file: OpenFile, data: Any, offset: int) -> None:
        self._at("write", file.path)
        super().pwrite(file, data, offset)

    def fsync(self, file: OpenFile) -> None:
        self._at("fsync", file.path)
        super().fsync(file)

    def fsync_directory(self, path: str) -> None:
        self._at("fsync directory", path)
        super().fsync_directory(path)

    def rename(self, source: str, target: str) -> None:
        self._at("rename", target)
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._at("unlink", path)
        super().unlink(path)


def refuse(number: int = errno.EACCES) -> Callable[[str], object]:
    def raise_it(path: str) -> None:
        error = OSError(number, os.strerror(number))
        raise storage_error("use", path, error) from error

    return raise_it
