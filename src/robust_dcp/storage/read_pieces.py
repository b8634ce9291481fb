"""One large item, read by several threads at once: a piece each, with its checksum.

Owns where an item is cut, and the checksum of the whole from those of its pieces. Never starts a thread: ``read_items``
runs the pieces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from robust_dcp.storage.checksum import crc32, crc32_of_both
from robust_dcp.storage.read_buffers import ReadBuffers
from robust_dcp.storage.stored_item import ItemInFile, StoredBox, damaged
from robust_dcp.storage.torch_zip import payload_view

__all__ = ["PiecewiseRead", "cut"]


def cut(offset: int, nbytes: int, piece_nbytes: int) -> list[tuple[int, int]]:
    """Cut ``nbytes`` bytes at ``offset`` of a file where multiples of ``piece_nbytes`` lie in it.

    Returns:
        Start, from ``offset`` on, and length of each piece. None is longer than ``piece_nbytes``.
    """
    pieces = []
    start = 0
    while start < nbytes:
        end = min(nbytes, start + piece_nbytes - (offset + start) % piece_nbytes)
        pieces.append((start, end - start))
        start = end
    return pieces


class PiecewiseRead:
    """A box of a stored tensor that is being read.

    Args:
        stored: the item.
        box: the part of it that is wanted.
        into: the tensor to read into, as for :func:`~robust_dcp.storage.stored_item.read_tensor`.
        buffers: for direct reads that cannot go into the tensor itself; they bound the pieces.
        done: called once with what ``read_tensor`` would return, by the thread that has read the last piece.
    """

    def __init__(
        self,
        stored: ItemInFile,
        box: StoredBox,
        into: torch.Tensor | None,
        buffers: ReadBuffers,
        *,
        verify_checksum: bool,
        done: Callable[[Any], None],
    ) -> None:
        self._stored = stored
        self._box = box
        self._into = into
        self._buffer = box.buffer_for(into)
        self._view = payload_view(self._buffer)
        self._address = self._buffer.data_ptr()
        self._buffers = buffers
        self._expected_crc32 = box.crc32 if verify_checksum else None
        self._done = done
        stored.check_bounds(box.offset, box.nbytes)
        self._pieces = cut(stored.offset + box.offset, box.nbytes, buffers.nbytes)
        self._crc32s = [0] * len(self._pieces)
        self._pieces_left = len(self._pieces)
        self._lock = threading.Lock()

    @property
    def numbers(self) -> Sequence[int]:
        """The number of each piece; :meth:`read` is to be called once with each, by any thread."""
        return range(len(self._pieces))

    def read(self, number: int) -> None:
        """Read a piece.

        Raises:
            CorruptCheckpoint: the file ends too early; or, with the last piece, the checksum is another.
            StorageError: the read failed.
        """
        stored = self._stored
        stored.check_stop()
        start, nbytes = self._pieces[number]
        view = self._view[start : start + nbytes]
        offset = self._box.offset + start
        found = stored.opened.read_piece(view, self._address + start, stored.offset + offset, self._buffers)
        stored.check_found(offset, nbytes, found)
        if self._expected_crc32 is not None:
            self._crc32s[number] = crc32(view)
        with self._lock:
            self._pieces_left -= 1
            if self._pieces_left:
                return
        self._finish()

    def _finish(self) -> None:
        if self._expected_crc32 is not None:
            found = 0
            for (_, nbytes), piece_crc32 in zip(self._pieces, self._crc32s, strict=True):
                found = crc32_of_both(found, piece_crc32, nbytes)
            if found != self._expected_crc32:
                raise damaged(self._stored, self._expected_crc32, found)
        self._done(self._box.tensor_in(self._buffer, self._into))
