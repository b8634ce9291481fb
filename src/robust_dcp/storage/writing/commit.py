"""The moment at which a save counts: ``.metadata`` replaced in one durable step.

Owns the order of the system calls. Never touches a data file of a committed checkpoint before the next is durable.
The coordinator calls it once every rank has written, fsynced and closed its data files.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.layouts import FileName
from robust_dcp.storage.writing.removal import is_gone_or_told

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["BEFORE_RENAME", "CHECK", "MetadataToPublish", "commit_metadata"]

logger = logging.getLogger(__name__)

_RENAME_DATA: Final = "give data files their names"
_FSYNC_NAMES: Final = "make the names of data files durable"
CHECK: Final = "look before the commit"
BEFORE_RENAME: Final = frozenset({"create", "write", "fsync", "close", _RENAME_DATA, _FSYNC_NAMES, CHECK})
"""Operations (of a ``StorageError``) whose failure in :func:`commit_metadata` leaves the old checkpoint the only one.
After any other both may be found later, and the data files of both have to stay."""


@dataclass(frozen=True)
class MetadataToPublish:
    """What a commit makes visible.

    Attributes:
        fragments: the bytes of ``.metadata``, one after the other.
        files: the data files that it names.
        renames: those whose names change with the commit.
        index: the bytes of the index, one after the other; none if there is to be none.
    """

    fragments: Sequence[bytes | memoryview]
    files: Collection[str]
    renames: Sequence[FileName] = ()
    index: Sequence[bytes | memoryview] = ()


def commit_metadata(
    disk: Disk,
    directory: str,
    encoded: Buffer | Sequence[Buffer],
    *,
    name: str = METADATA_NAME,
    renames: Sequence[FileName] = (),
    token: str | None = None,
    index: Sequence[Buffer] = (),
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Make ``encoded`` (in parts that follow each other) the metadata of the checkpoint in ``directory``, wholly or not
    at all.

    The calls, in this order; killed or powered off between any two, the directory loads as before up to 6 and as the
    new checkpoint after 7, and in between as one of the two:

    1. create ``.metadata.<token>.tmp`` (exclusively: no left-over of a killed save is written to)
    2. write it
    3. fsync it: its bytes are durable
    4. close it; do the same with the index, if there is one; give each data file its name, where the layout has another
       one until then
    5. fsync the directory: the names of the new data files are durable; ``check``
    6. rename the index, then it to ``.metadata``, each over the old one
    7. fsync the directory: the rename is durable

    Within call 6 the index is already the new one and does not fit the old ``.metadata``, so nobody uses it. If it
    cannot be written the checkpoint is committed without it: readers can do without.

    Args:
        renames: the data files whose names change with the commit.
        token: by which the journal of the save knows the temporary files; by default random.
        index: what goes into the index, in parts that follow each other; none if there is to be none.
        check: makes sure, right before the rename, that nobody else has written here; what it raises ends the commit.

    Returns:
        whether the checkpoint has an index.

    Raises:
        StorageError: a call failed. Up to call 5 the old checkpoint is untouched, and the temporary file and what call
            4 has renamed are removed. If call 6 or 7 failed, either may be found later: both are complete, so keep
            the data files of both.
    """
    token = token or secrets.token_hex(8)
    temporary = os.path.join(directory, f"{name}.{token}.tmp")
    index_path = os.path.join(directory, f"{INDEX_NAME}.{token}.tmp") if index else ""
    renamed: list[str] = []
    try:
        _write(disk, temporary, encoded)
        if index and not _index_works(lambda: _write(disk, index_path, index)):
            is_gone_or_told(disk.unlink, index_path)
            index_path = ""
        _rename_data(disk, directory, renames, renamed)
        with _as_operation(_FSYNC_NAMES):
            disk.fsync_directory(directory)
        with _as_operation(CHECK):
            check()
        renamed = []  # from here on they may be a committed checkpoint's
        has_index = index_path != "" and _index_works(
            lambda: disk.rename(index_path, os.path.join(directory, INDEX_NAME))
        )
        disk.rename(temporary, os.path.join(directory, name))
    except BaseException:
        for path in (temporary, index_path, *renamed):
            if path:
                is_gone_or_told(disk.unlink, path)
        raise
    disk.fsync_directory(directory)
    if index_path and not has_index:
        is_gone_or_told(disk.unlink, index_path)
    return has_index


def _write(disk: Disk, path: str, data: Buffer | Sequence[Buffer]) -> None:
    """Make a new file and its bytes durable."""
    file = disk.open_new(path)
    try:
        disk.pwrite(file, data, 0)
        disk.fsync(file)
    finally:
        disk.close(file)


def _index_works(step: Callable[[], None]) -> bool:
    """Take a step towards an index; whether that went well."""
    try:
        step()
    except StorageError as error:
        logger.warning("the checkpoint gets no index, so a load takes longer: %s", error.message)
        return False
    return True


def _rename_data(disk: Disk, directory: str, renames: Sequence[FileName], renamed: list[str]) -> None:
    """Rename, and note in ``renamed`` what has got its name."""
    for name in renames:
        if name.written == name.committed:
            continue
        path = os.path.join(directory, name.committed)
        with _as_operation(_RENAME_DATA):
            disk.rename(os.path.join(directory, name.written), path)
        renamed.append(path)


@contextmanager
def _as_operation(operation: str) -> Iterator[None]:
    """Tell a call from the same call after the rename."""
    try:
        yield
    except StorageError as error:
        raise StorageError(error.message, path=error.path, errno=error.errno, operation=operation) from error
