"""The bytes of one stored item, in a file or in memory.

This module reads them, and makes sure that nothing beyond the item or the file is read. It never knows what the bytes
mean. Several threads call it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.storage.layouts.footer import Footer
from robust_dcp.storage.layouts.read_head import StoredTensor
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.records.block_sums import BlockSums

__all__ = ["ItemBytes", "ItemInFile", "ItemInMemory", "corrupt_item", "damaged_footer"]


class ItemBytes(Protocol):
    """The ``nbytes`` bytes of an item as they are stored. ``file`` and ``item`` name them in errors.

    ``raw`` is the item's entry in the head of its file, if the item holds only the bytes of a tensor. It is ``None``
    for a record.

    ``offset`` is where the item begins in the file; it is used in errors. ``find_sums`` gives the checksums of the
    blocks that hold bytes ``begin`` to ``end`` of the item, if the footer of the file has them.

    ``read`` and ``read_into`` take offsets from the start of the item. They raise :class:`CorruptCheckpoint` if the
    item or the file ends too early.
    """

    file: str
    item: str
    nbytes: int
    offset: int
    raw: StoredTensor | None

    def find_sums(self, begin: int, end: int) -> BlockSums | None: ...

    def read(self, offset: int, nbytes: int) -> bytes: ...

    def read_into(self, view: memoryview, offset: int) -> None: ...


class ItemInFile:
    """An item at ``offset`` of an open file. ``check_stop`` is called before each read; it raises to end the load."""

    def __init__(
        self,
        opened: DataFile,
        item: str,
        offset: int,
        nbytes: int,
        check_stop: Callable[[], None],
        raw: StoredTensor | None = None,
    ) -> None:
        self.file = opened.path
        self.item = item
        self.nbytes = nbytes
        self.opened = opened
        self.offset = offset
        self.check_stop = check_stop
        self.raw = raw

    def read(self, offset: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def read_into(self, view: memoryview, offset: int) -> None:
        self.check_stop()
        self.check_bounds(offset, view.nbytes)
        self.check_found(offset, view.nbytes, self.opened.read_into(view, self.offset + offset))

    def find_sums(self, begin: int, end: int) -> BlockSums | None:
        return _find_sums(self, self.opened.footer, begin, end)

    def check_bounds(self, offset: int, nbytes: int) -> None:
        """Raise unless these bytes lie in the item."""
        _check_bounds(self, offset, nbytes)

    def check_found(self, offset: int, nbytes: int, found: int) -> None:
        """Raise unless a read of ``nbytes`` bytes ``found`` all of them."""
        if found != nbytes:
            raise _file_ends(self, self.offset + offset, nbytes, found)


class ItemInMemory:
    """An item that has been read as a whole.

    Args:
        nbytes: its length. ``data`` may be shorter if the file ends inside the item.
        offset: where the item begins in the file; ``None`` if the bytes are no longer those of the file.
        footer: that of the file, if there is one.
    """

    def __init__(
        self,
        file: str,
        item: str,
        data: bytes | memoryview,
        nbytes: int | None = None,
        offset: int | None = None,
        raw: StoredTensor | None = None,
        footer: Footer | None = None,
    ) -> None:
        self.file = file
        self.item = item
        self.nbytes = len(data) if nbytes is None else nbytes
        self._data = memoryview(data)
        self.offset = offset or 0
        self.raw = raw
        self._footer = footer

    def find_sums(self, begin: int, end: int) -> BlockSums | None:
        return _find_sums(self, self._footer, begin, end)

    def read(self, offset: int, nbytes: int) -> bytes:
        self._check(offset, nbytes)
        return bytes(self._data[offset : offset + nbytes])

    def read_into(self, view: memoryview, offset: int) -> None:
        self._check(offset, view.nbytes)
        view[:] = self._data[offset : offset + view.nbytes]

    def _check(self, offset: int, nbytes: int) -> None:
        _check_bounds(self, offset, nbytes)
        if offset + nbytes > len(self._data):
            raise _file_ends(self, self.offset + offset, nbytes, max(0, len(self._data) - offset))


def _find_sums(stored: ItemBytes, footer: Footer | None, begin: int, end: int) -> BlockSums | None:
    if footer is None:
        return None
    try:
        return footer.find(stored.offset + begin, stored.offset + end, stored.offset)
    except ValueError as error:
        raise damaged_footer(stored.file, stored.item, error) from error


def _check_bounds(stored: ItemBytes, offset: int, nbytes: int) -> None:
    if offset < 0 or offset + nbytes > stored.nbytes:
        raise corrupt_item(stored, f"{nbytes} bytes at {offset}", f"an item of {stored.nbytes} bytes")


def _file_ends(stored: ItemBytes, offset: int, nbytes: int, found: int) -> CorruptCheckpoint:
    return corrupt_item(stored, f"{nbytes} bytes at offset {offset}", f"a file that ends after {found} of them")


def damaged_footer(file: str, item: str, error: ValueError) -> CorruptCheckpoint:
    """The error for a footer that is not what was written."""
    return CorruptCheckpoint(
        f"the footer of {file} is damaged: {error}; take another checkpoint, restore the file, or load with "
        "verify_checksums=False, which does not look at it",
        file=file,
        item=item,
        expected="the footer that was written",
        found=str(error),
    )


def corrupt_item(stored: ItemBytes, expected: str, found: str) -> CorruptCheckpoint:
    """The error for an item that is not what it should be."""
    return CorruptCheckpoint(
        f"item {stored.item!r} in {stored.file} is damaged: expected {expected}, found {found}",
        file=stored.file,
        item=stored.item,
        expected=expected,
        found=found,
    )
