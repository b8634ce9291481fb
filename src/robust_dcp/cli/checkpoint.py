"""The checkpoint that a command was given: what it holds, and its first line."""

from __future__ import annotations

import os
from typing import Any

from robust_dcp.cli.output import CommandFailed, age, number, size
from robust_dcp.contents.items import Contents
from robust_dcp.contents.read import holds_checkpoint, read_contents
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.files.what_is_there import what_is_there

__all__ = ["open_checkpoint", "summary", "summary_json"]


def open_checkpoint(path: str) -> Contents:
    """What the checkpoint at ``path`` holds.

    Raises:
        CommandFailed: there is no checkpoint.
        StorageError, CorruptCheckpoint, UnsafeCheckpoint: as :func:`read_contents`.
    """
    disk = PosixDisk()
    if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):
        raise CommandFailed(f"{path} cannot be read: check who owns the directory and with which mode")
    if not holds_checkpoint(disk, path):  # found out here, because our errors need torch
        raise CommandFailed(f"{path} holds no checkpoint: {what_is_there(disk, path)}")
    return read_contents(disk, path)


def summary(contents: Contents) -> str:
    """The checkpoint in one line."""
    n_tensors = sum(item.is_tensor for item in contents.items)
    return (
        f"{contents.path}: {number(n_tensors, 'tensor')}, {number(len(contents.items) - n_tensors, 'object')}, "
        f"{size(contents.nbytes)} in {number(len(contents.files), 'file')} ({size(contents.file_nbytes)}), layout "
        f"{contents.layout}, written by {contents.written_by} {age(contents.saved_seconds)}"
    )


def summary_json(contents: Contents) -> dict[str, Any]:
    """The same as plain values."""
    n_tensors = sum(item.is_tensor for item in contents.items)
    return {
        "path": contents.path,
        "layout": contents.layout,
        "written_by": contents.written_by,
        "save_id": contents.save_id,
        "saved_seconds": contents.saved_seconds,
        "tensors": n_tensors,
        "objects": len(contents.items) - n_tensors,
        "nbytes": contents.nbytes,
        "files": len(contents.files),
        "file_nbytes": contents.file_nbytes,
        "unknown_classes": list(contents.unknown_classes),
    }
