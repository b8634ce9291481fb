"""Reads one large item with several threads at once. Each thread reads a piece and computes its checksum.

This module owns where an item is cut, and combines the checksums of the pieces into the checksum of the whole. It never
starts a thread: ``reading_threads`` runs the pieces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from robust_dcp.staging import BlockLease, DeviceCopies
from robust_dcp.storage.reading.item_bytes import ItemInFile
from robust_dcp.storage.reading.stored_tensor import StoredBox
from robust_dcp.storage.reading.verification import damaged
from robust_dcp.storage.records.checksum import crc32, crc32_of_both
from robust_dcp.storage.records.torch_zip import payload_view

__all__ = ["PiecewiseRead", "cut", "shares_of"]


def cut(offset: int, nbytes: int, piece_nbytes: int) -> list[tuple[int, int]]:
    """Cut ``nbytes`` bytes at ``offset`` of a file at the multiples of ``piece_nbytes`` in that file.

    Returns:
        For each piece its start, counted from ``offset``, and its length. None is longer than ``piece_nbytes``.
    """
    pieces = []
    start = 0
    while start < nbytes:
        end = min(nbytes, start + piece_nbytes - (offset + start) % piece_nbytes)
        pieces.append((start, end - start))
        start = end
    return pieces


def shares_of(nbytes: Sequence[int], share_nbytes: int) -> list[list[int]]:
    """Put neighbours together, up to ``share_nbytes``. Handing a short piece to a thread takes longer than reading
    it.
    """
    shares: list[list[int]] = []
    filled = share_nbytes
    for number, piece_nbytes in enumerate(nbytes):
        if filled + piece_nbytes > share_nbytes:
            shares.append([])
            filled = 0
        shares[-1].append(number)
        filled += piece_nbytes
    return shares


class PiecewiseRead:
    """A box of a stored tensor that is being read in pieces.

    Args:
        stored: the item.
        box: the part of it that is wanted.
        verified: the range of the item that is read to verify the box; ``None`` if the box is not verified.
        into: the tensor to read into, as for ``read_tensor`` of ``stored_tensor``. It may be on a device only if
            ``copies`` is given.
        blocks: memory for bytes that cannot be read into the tensor itself. Each block holds a piece, wherever it
            begins in the file.
        piece_nbytes: the longest piece.
        copies: if given, pieces are read into blocks and copied from there into ``into``.
        done: called once with what ``read_tensor`` would return, by the thread that has read the last piece.
    """

    def __init__(
        self,
        stored: ItemInFile,
        box: StoredBox,
        verified: tuple[int, int] | None,
        into: torch.Tensor | None,
        blocks: BlockLease,
        piece_nbytes: int,
        *,
        copies: DeviceCopies | None = None,
        done: Callable[[Any], None],
    ) -> None:
        self._stored = stored
        self._box = box
        self._into = into
        self._buffer = box.buffer_for(into)
        self._blocks = blocks
        self._on_device: tuple[torch.Tensor, DeviceCopies] | None = None
        if copies is not None and self._buffer is into:
            self._on_device = into.as_strided((into.numel(),), (1,)).view(torch.uint8), copies
        else:
            self._view = payload_view(self._buffer)
        self._verified = verified
        self._done = done
        begin, end = box.offset, box.offset + box.nbytes
        first, last = verified or (begin, end)
        stored.check_bounds(first, last - first)
        # Bytes beyond the box are read only for their checksum.
        self._pieces = [
            (low + start, nbytes)
            for low, high in ((first, begin), (begin, end), (end, last))
            for start, nbytes in cut(stored.offset + low, high - low, piece_nbytes)
        ]
        self._shares = shares_of([nbytes for _, nbytes in self._pieces], piece_nbytes)
        self._crc32s = [0] * len(self._pieces)
        self._shares_left = len(self._shares)
        self._lock = threading.Lock()

    @property
    def shares(self) -> Sequence[Sequence[int]]:
        """The pieces that one thread reads, by number. Each share goes to :meth:`read` once, on any thread."""
        return self._shares

    def read(self, share: Sequence[int]) -> None:
        """Read some pieces.

        Raises:
            CorruptCheckpoint: the file ends too early. With the last share: a checksum does not match.
            StorageError: the read failed.
        """
        for number in share:
            self._stored.check_stop()
            offset, nbytes = self._pieces[number]
            start = offset - self._box.offset
            if 0 <= start < self._box.nbytes:
                self._crc32s[number] = (
                    self._read_in_place(start, nbytes)
                    if self._on_device is None
                    else self._read_through_block(start, nbytes, *self._on_device)
                )
            else:
                self._crc32s[number] = self._read_beyond(offset, nbytes)
        with self._lock:
            self._shares_left -= 1
            if self._shares_left:
                return
        self._finish()

    def _read_beyond(self, offset: int, nbytes: int) -> int:
        """Read bytes outside of the box, for their checksum."""
        stored = self._stored
        with self._blocks.lent() as block:
            at, found = stored.opened.read_block(block, stored.offset + offset, nbytes)
            stored.check_found(offset, nbytes, found)
            return crc32(block.view[at : at + nbytes])

    def _read_in_place(self, start: int, nbytes: int) -> int:
        """Read a piece into the tensor; returns its checksum, if one is needed."""
        stored, offset = self._stored, self._box.offset + start
        view = self._view[start : start + nbytes]
        address = self._buffer.data_ptr() + start
        needed = self._verified is not None
        place = stored.offset + offset
        found, checksum = stored.opened.read_piece(view, address, place, self._blocks, checksum=needed)
        stored.check_found(offset, nbytes, found)
        return checksum

    def _read_through_block(self, start: int, nbytes: int, flat: torch.Tensor, copies: DeviceCopies) -> int:
        """Read a piece into a block and copy it from there into ``flat``; returns the same as
        :meth:`_read_in_place`.
        """
        stored, offset = self._stored, self._box.offset + start
        with self._blocks.lent() as block:
            at, found = stored.opened.read_block(block, stored.offset + offset, nbytes)
            stored.check_found(offset, nbytes, found)
            checksum = self._checksum(block.view[at : at + nbytes])
            copies.fill(flat[start : start + nbytes], block, at)
        return checksum

    def _checksum(self, view: memoryview) -> int:
        return 0 if self._verified is None else crc32(view)

    def _finish(self) -> None:
        sums = self._box.sums
        if self._verified is not None and sums is not None:
            found = 0
            for (_, nbytes), piece_crc32 in zip(self._pieces, self._crc32s, strict=True):
                found = crc32_of_both(found, piece_crc32, nbytes)
            if found != sums.expected(*self._verified):
                raise damaged(self._stored, sums, *self._verified)
        self._done(self._box.tensor_in(self._buffer, self._into))
