"""The checkpoint that a command was given: what it holds, and its first line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from robust_dcp.cli.output import CommandFailed, age, number, size
from robust_dcp.nodes.parity_file import read_parity_note
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import METADATA_NAME, SAFETENSORS_SUFFIX, is_url
from robust_dcp.storage.files.what_is_there import what_is_there

if TYPE_CHECKING:
    from robust_dcp.contents import Contents


def holds_checkpoint(path: str, disk: Disk) -> bool:
    """Whether a directory has a ``.metadata``, those of ranks that saved for themselves, or safetensors files."""
    if disk.exists(os.path.join(path, METADATA_NAME)):
        return True
    return any(name.endswith((METADATA_NAME, SAFETENSORS_SUFFIX)) for name in disk.list_directory(path))


def check_directory(path: str) -> None:
    """Refuse what is no directory, without an import of torch.

    Raises:
        CommandFailed: it is not there, or no directory, or may not be read.
    """
    if not os.path.isdir(path):
        raise CommandFailed(f"{path}: {what_is_there(Disk(), path)}")
    if not os.access(path, os.R_OK | os.X_OK):
        raise CommandFailed(f"{path} cannot be read: check who owns the directory and with which mode")


def disk_of_root(root: str) -> Disk:
    """The file system of a directory, or of a URL, that holds the checkpoints of a run.

    Raises:
        CommandFailed: it is not there, or cannot be used.
    """
    if not is_url(root):
        check_directory(root)
        return Disk()
    disk = _remote_disk(root)
    if not disk.exists(root):
        raise CommandFailed(f"{root}: {what_is_there(disk, root)}")
    return disk


def open_checkpoint(path: str) -> Contents:
    """What the checkpoint at a path or URL holds.

    Raises:
        CommandFailed: there is no checkpoint.
        StorageError, CorruptCheckpoint, UnsafeCheckpoint: as ``read_contents``.
    """
    disk = disk_of(path)
    from robust_dcp.contents import read_contents

    return read_contents(disk, path)


def disk_of(path: str) -> Disk:
    """The file system that the checkpoint at a path or URL is in. That of a path is given without an import of torch.

    Raises:
        CommandFailed: there is no checkpoint at the path, or the URL cannot be used.
    """
    if not is_url(path):
        if os.path.isdir(path):
            check_directory(path)
        if not os.path.isdir(path) or not holds_checkpoint(path, Disk()):
            raise CommandFailed(f"{path} holds no checkpoint: {what_is_there(Disk(), path)}")
        return Disk()
    return _remote_disk(path)


def _remote_disk(url: str) -> Disk:
    from robust_dcp.storage.remote import RemoteDisk

    try:
        return RemoteDisk(url)
    except ValueError as error:
        raise CommandFailed(str(error)) from error


def summary_json(contents: Contents) -> dict[str, Any]:
    """What it holds, in numbers."""
    n_tensors = sum(item.is_tensor for item in contents.items)
    is_on_drive = contents.mark is not None and not is_url(contents.path)
    note = read_parity_note(contents.disk, contents.path, contents.mark) if is_on_drive else None
    is_safetensors = any(file.name.endswith(SAFETENSORS_SUFFIX) for file in contents.files)
    return {
        "path": contents.path,
        "layout": "safetensors" if is_safetensors else "torch",
        "written_by": contents.written_by,
        "save_id": contents.save_id,
        "saved_seconds": contents.saved_seconds,
        "tensors": n_tensors,
        "objects": len(contents.items) - n_tensors,
        "nbytes": sum(item.nbytes for item in contents.items),
        "files": len(contents.files),
        "file_nbytes": contents.file_nbytes,
        "protection": None if note is None else str(note),
    }


def summary(contents: Contents) -> str:
    """The same in one line."""
    of = summary_json(contents)
    return (
        f"{of['path']}: {number(of['tensors'], 'tensor')}, {number(of['objects'], 'object')}, {size(of['nbytes'])} in "
        f"{number(of['files'], 'file')} ({size(of['file_nbytes'])}), layout {of['layout']}, written by "
        f"{of['written_by']} {age(of['saved_seconds'])}{protected_in_words(of['protection'])}"
    )


def protected_in_words(protection: object) -> str:
    """What follows the state of a checkpoint that outlives the loss of a node."""
    return "" if protection is None else f", protected: {protection}"
