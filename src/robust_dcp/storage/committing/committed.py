"""Which data files a committed ``.metadata`` names. These files may be removed once another checkpoint has replaced it.

This module remembers the answers. So a save that replaces the last checkpoint of this process does not have to decode
what that save wrote. ``leftovers`` and ``earlier_checkpoint`` call it.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from robust_dcp.errors import RobustCheckpointError, StorageError
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import is_data_file
from robust_dcp.storage.metadata.metadata_file import decode_metadata, referenced_files
from robust_dcp.storage.metadata.stored_pickle import files_are_marked
from robust_dcp.structure_cache import CACHE, Table

__all__ = ["Committed", "committed_in", "remember"]

logger = logging.getLogger(__name__)

_STAMP_NBYTES: Final = 20
"""The length of what we write after the pickle, with the pickle's CRC-32. The pickle holds the id of its save."""

_Stamp = tuple[int, bytes]
"""Length and last bytes of a ``.metadata``."""

_Fingerprint = tuple[int, int, int]
"""See ``Disk.fingerprint``."""


@dataclass(frozen=True)
class Committed:
    """What a ``.metadata`` says.

    Attributes:
        files: the data files that it names and that lie in its own directory, without others.
        save_id: the id of the save that wrote it.
        is_readable: whether it could be decoded. If not, nobody knows which files it needs.
        are_marked: whether the files have the mark of that save.
        fingerprint: that of the file, taken before the file was read. If it differs later, somebody has written the
            file.
    """

    files: frozenset[str] = frozenset()
    save_id: str | None = None
    is_readable: bool = True
    are_marked: bool = False
    fingerprint: _Fingerprint | None = None


_COMMITTED: Table[str, tuple[_Stamp, Committed]] = CACHE.table(
    "committed", lambda path, known: sum(map(len, known[1].files)) + 100 * len(known[1].files), max_nbytes=64 << 20
)
"""By path."""


def committed_in(disk: Disk, path: str) -> Committed | None:
    """Read what the ``.metadata`` at ``path`` names; ``None`` if there is none.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        fingerprint = disk.fingerprint(path)
        with disk.reading(path) as file:
            nbytes = disk.size(file)
            length = min(_STAMP_NBYTES, nbytes)
            tail = disk.read(file, length, nbytes - length)
            known = _COMMITTED.get(os.path.realpath(path))
            if known is not None and known[0] == (nbytes, tail):
                return replace(known[1], fingerprint=fingerprint)
            data = disk.read(file, nbytes, 0)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    try:
        metadata = decode_metadata(data, path)
    except RobustCheckpointError as error:
        logger.warning("%s cannot be read, so no file that it may name is removed: %s", path, error.message)
        return Committed(is_readable=False, fingerprint=fingerprint)
    files = frozenset(name for name in referenced_files(metadata) if is_data_file(name))
    save_id = getattr(metadata.storage_meta, "save_id", None)
    return Committed(
        files,
        save_id if isinstance(save_id, str) else None,
        are_marked=files_are_marked(tail),
        fingerprint=fingerprint,
    )


def remember(path: str, fragments: Sequence[bytes | memoryview], files: Collection[str], save_id: str) -> None:
    """Remember what this process has just committed at ``path``."""
    nbytes, tail = sum(map(len, fragments)), b""
    for fragment in reversed(fragments):
        tail = bytes(fragment[-_STAMP_NBYTES:]) + tail
        if len(tail) >= _STAMP_NBYTES:
            break
    committed = Committed(frozenset(files), save_id, are_marked=True)
    _COMMITTED.put(os.path.realpath(path), ((nbytes, tail[-_STAMP_NBYTES:]), committed))
