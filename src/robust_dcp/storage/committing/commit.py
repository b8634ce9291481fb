"""The commit of a save: ``.metadata`` is replaced in one durable step.

This module owns the order of the system calls. It never touches a data file of a committed checkpoint before the next
one is durable. The coordinator calls it once every rank has written, fsynced and closed its data files.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from robust_dcp.on_demand import errors
from robust_dcp.storage.committing.removal import is_gone_or_told
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from robust_dcp.storage.layouts import FileName

__all__ = ["BEFORE_RENAME", "CHECK", "MetadataToPublish", "PreparedCommit", "commit_metadata"]

logger = logging.getLogger(__name__)

_RENAME_DATA: Final = "give data files their names"
_FSYNC_NAMES: Final = "make the names of data files durable"
CHECK: Final = "look before the commit"
_FSYNC_COMMIT: Final = "make the commit durable"
BEFORE_RENAME: Final = frozenset({"create", "write", "fsync", "close", _RENAME_DATA, _FSYNC_NAMES, CHECK})
"""Operations of a ``StorageError``. If one of these fails in :func:`commit_metadata`, only the old checkpoint exists.

If any other operation fails, readers may find either checkpoint later, so the data files of both must stay.
"""


@dataclass(frozen=True)
class MetadataToPublish:
    """What a commit makes visible.

    Attributes:
        fragments: the bytes of ``.metadata``, one after the other.
        files: the data files that it names.
        renames: the data files that get another name with the commit.
        index: the bytes of the index, one after the other; empty if the checkpoint gets no index.
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
    """Replace the metadata of the checkpoint in ``directory`` with ``encoded``, wholly or not at all.

    ``encoded`` may be given in parts that follow each other. The calls are made in this order:

    1. create ``.metadata.<token>.tmp``; it must be new, so that no file of a killed save is written to
    2. write it
    3. fsync it: its bytes are durable
    4. close it; do the same with the index, if there is one; rename the data files, where the layout asks for that
    5. fsync the directory: the names of the new data files are durable; call ``check``
    6. rename the index, then ``.metadata.<token>.tmp`` to ``.metadata``, each over the old one
    7. fsync the directory: the rename is durable

    The process may be killed, or the power may fail, between any two calls. Before call 6 the directory loads as the
    old checkpoint, after call 7 as the new one, and in between as one of the two.

    During call 6 the new index may lie beside the old ``.metadata``. It does not fit that, so nobody uses it. If the
    index cannot be written, the checkpoint is committed without it: readers do not need it.

    Args:
        renames: the data files that get another name with the commit.
        token: names the temporary files, so that the journal of the save accounts for them. The default is random.
        index: the contents of the index, in parts that follow each other; empty if there is no index.
        check: makes sure, right before the rename, that nobody else has written here. What it raises ends the commit.

    Returns:
        whether the checkpoint has an index.

    Raises:
        StorageError: a call failed. If it was call 1 to 5, the old checkpoint is untouched; the temporary files are
            removed, and so are the data files that call 4 has renamed. If it was call 6 or 7, readers may find either
            checkpoint later. Both are complete, so keep the data files of both.
    """
    prepared = PreparedCommit.prepare(disk, directory, encoded, name=name, renames=renames, token=token, index=index)
    return prepared.finish(check)


class PreparedCommit:
    """A commit that wants nothing but its renames. Make it with :meth:`prepare`, and end it with :meth:`finish`.

    A save on several nodes that do not share the directory prepares the commit on each of them before the first one
    finishes: see :mod:`robust_dcp.plan.node_commit`.
    """

    def __init__(self, disk: Disk, directory: str, name: str, token: str) -> None:
        self._disk = disk
        self._directory = directory
        self._name = name
        self._temporary = os.path.join(directory, f"{name}.{token}.tmp")
        self._index_path = os.path.join(directory, f"{INDEX_NAME}.{token}.tmp")
        self._renamed: list[str] = []

    @classmethod
    def prepare(
        cls,
        disk: Disk,
        directory: str,
        encoded: Buffer | Sequence[Buffer],
        *,
        name: str = METADATA_NAME,
        renames: Sequence[FileName] = (),
        token: str | None = None,
        index: Sequence[Buffer] = (),
    ) -> PreparedCommit:
        """Make calls 1 to 5 of :func:`commit_metadata`, which has the arguments and errors."""
        prepared = cls(disk, directory, name, token or secrets.token_hex(8))
        try:
            prepared._write_all(encoded, index, renames)
        except BaseException:
            prepared._undo()
            raise
        return prepared

    def _write_all(
        self, encoded: Buffer | Sequence[Buffer], index: Sequence[Buffer], renames: Sequence[FileName]
    ) -> None:
        disk = self._disk
        disk.write_file(self._temporary, encoded)
        if not index:
            self._index_path = ""
        elif not _index_works(lambda: disk.write_file(self._index_path, index)):
            is_gone_or_told(disk.unlink, self._index_path)
            self._index_path = ""
        _rename_data(disk, self._directory, renames, self._renamed)
        with _as_operation(_FSYNC_NAMES):
            disk.fsync_directory(self._directory)

    def finish(self, check: Callable[[], None] = lambda: None) -> bool:
        """Call ``check``, and then make calls 6 and 7 of :func:`commit_metadata`, which has the errors.

        Returns:
            whether the checkpoint has an index.
        """
        disk, directory = self._disk, self._directory
        try:
            with _as_operation(CHECK):
                check()
            self._renamed = []  # from here on they may be a committed checkpoint's
            has_index = self._index_path != "" and _index_works(
                lambda: disk.rename(self._index_path, os.path.join(directory, INDEX_NAME))
            )
            disk.rename(self._temporary, os.path.join(directory, self._name))
        except BaseException:
            self._undo()
            raise
        with _as_operation(_FSYNC_COMMIT):  # also if it was its close that failed
            disk.fsync_directory(directory)
        if self._index_path and not has_index:
            is_gone_or_told(disk.unlink, self._index_path)
        return has_index

    def _undo(self) -> None:
        for path in (self._temporary, self._index_path, *self._renamed):
            if path:
                is_gone_or_told(self._disk.unlink, path)


def _index_works(step: Callable[[], None]) -> bool:
    """Do one step of writing the index. Returns whether it succeeded."""
    try:
        step()
    except errors.StorageError as error:
        logger.warning("the checkpoint gets no index, so a load takes longer: %s", error.message)
        return False
    return True


def _rename_data(disk: Disk, directory: str, renames: Sequence[FileName], renamed: list[str]) -> None:
    """Rename the data files. ``renamed`` receives the name of each that has been renamed."""
    for name in renames:
        if name.written == name.committed:
            continue
        path = os.path.join(directory, name.committed)
        with _as_operation(_RENAME_DATA):
            disk.rename(os.path.join(directory, name.written), path)
        renamed.append(path)


@contextmanager
def _as_operation(operation: str) -> Iterator[None]:
    """Give errors of a call after the rename another operation than the same call before it."""
    try:
        yield
    except errors.StorageError as error:
        raise errors.StorageError(error.message, path=error.path, errno=error.errno, operation=operation) from error
