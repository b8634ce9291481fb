"""``copy_checkpoint``: the copy of a checkpoint by one process."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext

from robust_dcp.drain.copy import Copy, same_place
from robust_dcp.drain.plan import CopyResult, Progress
from robust_dcp.drain.record import awaited_copy, note_arrival
from robust_dcp.errors import StorageError, entry_point
from robust_dcp.storage.files.being_loaded import needed_for_a_load
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.posix_disk import PosixDisk
from robust_dcp.storage.remote.copy_options import CopyOptions
from robust_dcp.storage.remote.filesystem import local_path_of

__all__ = ["copy_checkpoint"]

logger = logging.getLogger(__name__)


@entry_point
def copy_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    options: CopyOptions | None = None,
    progress: Progress | None = None,
    disk: Disk | None = None,
) -> CopyResult:
    """Copy a checkpoint to another directory or to an object store, in either direction, or between two of them.

    Data files go first, and each is verified at the target. ``.metadata`` goes last, so a load never finds half a copy.
    A copy that was cut off goes on if it is started again: what is there and verifies is not sent again. That holds
    for a drain as well, and its local checkpoint is not awaited any more.

    Args:
        source: a path, or any URL of fsspec. The checkpoint may be of robust_dcp, of stock or of Megatron.
        target: a path or URL. If there is another checkpoint, it is replaced. Its data files stay until the new one is
            committed.
        options: see :class:`CopyOptions`.
        progress: called from several threads with two numbers: the bytes that have been sent, or were found at the
            target, and the bytes of the checkpoint.
        disk: the file system of paths.

    Raises:
        StorageError: a call failed and could not be repeated; no checkpoint is at the source; the source was replaced
            meanwhile.
        CorruptCheckpoint: the source is damaged, or a file has not arrived as it was sent.
        UnsafeCheckpoint: the metadata of the source leads out of its directory, or would run code.
        ValueError: a URL is of a kind that fsspec does not know.

    Example:
        >>> import torch, robust_dcp, tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     _ = robust_dcp.save({"weight": torch.ones(4)}, checkpoint_id=f"{root}/step_1")
        ...     copied = robust_dcp.copy_checkpoint(f"{root}/step_1", f"file://{root}/durable/step_1")
        ...     again = robust_dcp.copy_checkpoint(f"{root}/step_1", f"{root}/durable/step_1")
        >>> copied.skipped_files, again.files
        (0, 0)
    """
    copy = Copy(source, target, options or CopyOptions(), progress=progress, disk=disk)
    path = local_path_of(copy.source_url)
    with nullcontext() if path is None else needed_for_a_load(disk or PosixDisk(), path):
        try:
            copy.begin()
            copied = copy.commit(copy.send_data(copy.inventory.data))
        except StorageError:
            if copy.was_replaced:
                copy.withdraw()
            raise
        if path is not None:
            _note_arrival(disk or PosixDisk(), path, copy)
        return copied


def _note_arrival(disk: Disk, path: str, copy: Copy) -> None:
    """If this was the copy that a drain has begun, note that it has arrived. Else nobody may remove the checkpoint."""
    record = awaited_copy(disk, path)
    if record is None or not same_place(record.target, copy.target_url):
        return
    if record.save_id not in copy.inventory.save_ids:  # another save has replaced it right after the copy
        return
    try:
        note_arrival(disk, path, record)
    except StorageError as error:
        logger.warning("%s has arrived at %s, and that cannot be noted: %s", path, copy.target_url, error.message)
