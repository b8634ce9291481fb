"""Tells whether an index belongs to a ``.metadata``, by a digest of the latter.

The digest covers the length of ``.metadata`` and its last 4096 bytes. These hold the id of the save, which the emitter
writes after all items, and the CRC-32 of the whole file. So a ``.metadata`` of another save or another tool has another
digest. And nobody has to read all of a file that grows with the job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.index.form import Fragment

__all__ = ["fit_of", "fit_of_file"]

_TAIL_NBYTES: Final = 4096


def fit_of(metadata: Sequence[Fragment]) -> bytes:
    """The digest (32 bytes) of a ``.metadata`` that consists of these fragments, one after the other."""
    tail = b""
    for fragment in reversed(metadata):
        tail = bytes(fragment[-_TAIL_NBYTES:]) + tail
        if len(tail) >= _TAIL_NBYTES:
            break
    return _digest(sum(map(len, metadata)), tail[-_TAIL_NBYTES:])


def fit_of_file(disk: Disk, path: str) -> bytes:
    """The digest of a ``.metadata`` on disk.

    Raises:
        StorageError: it cannot be read.
    """
    return _digest(*disk.read_end(path, _TAIL_NBYTES))


def _digest(nbytes: int, tail: bytes) -> bytes:
    return hashlib.sha256(nbytes.to_bytes(8, "little") + tail).digest()
