"""A data file of an earlier checkpoint, and which ranges of a new file are likely to hold the same bytes.

This module finds the file by its name, and compares checksums. Equal checksums prove nothing: they only say where it is
worth to look. ``shared_extents`` proves. ``engine`` opens these files, ``steps`` and ``large_record`` ask them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from robust_dcp.errors import StorageError
from robust_dcp.storage.files.disk import Disk, OpenFile
from robust_dcp.storage.files.paths import holds_raw_bytes, writer_of
from robust_dcp.storage.layouts.footer import SumColumns
from robust_dcp.storage.layouts.protocol import FileName
from robust_dcp.storage.layouts.stored_sums import stored_sums
from robust_dcp.storage.records.block_sums import SUM_NBYTES, block_counts, cuts

__all__ = ["EarlierFile", "Range", "open_earlier_files"]

Int64 = npt.NDArray[np.int64]

Range = tuple[int, int]
"""Bytes of a file: from the first one to behind the last one."""

_NO_RANGES: Final[tuple[Range, ...]] = ()


class EarlierFile:
    """An open data file of an earlier checkpoint.

    Args:
        file: the file, open for reading.
        sums: the checksums of its blocks.
    """

    def __init__(self, file: OpenFile, sums: SumColumns) -> None:
        self.file = file
        self._sums = sums
        counts = block_counts(sums.nbytes)
        self._first = np.concatenate(([0], np.cumsum(counts)))

    def likely_in_payload(self, at: int, nbytes: int, begin: int, end: int, sums: Sequence[int]) -> tuple[Range, ...]:
        """The ranges of a file in which a part of one item's data is likely to be as in this file.

        A part seldom begins and ends where a block does. The pieces of blocks at both ends have no checksum to compare
        with, so they count as their neighbours do.

        Args:
            at: where all data of the item begins in the file.
            nbytes: the length of all data of the item.
            begin, end: which bytes of the data the part consists of.
            sums: the CRC-32s of the part, from ``block_sums.sums_of``.
        """
        row = int(np.searchsorted(self._sums.offset, at, side="left"))
        while row < len(self._sums.offset) and self._sums.offset[row] == at and self._sums.nbytes[row] != nbytes:
            row += 1  # an empty item may lie at the same place
        if row == len(self._sums.offset) or self._sums.offset[row] != at:
            return _NO_RANGES
        earlier = self._sums.crcs[self._first[row] : self._first[row + 1]].tolist()
        pieces = list(cuts(begin, end))
        found: list[Range] = []
        for (first, stop), crc in zip(pieces, sums, strict=True):
            is_whole = first % SUM_NBYTES == 0 and (stop % SUM_NBYTES == 0 or stop == nbytes)
            if is_whole and earlier[first // SUM_NBYTES] == crc:
                if found and found[-1][1] == first:
                    first = found.pop()[0]
                found.append((first, stop))
        return tuple((at + first, at + stop) for first, stop in _with_ends(found, pieces, nbytes))

    def likely_in_block(self, at: Int64, nbytes: Int64, sums: npt.NDArray[np.uint32]) -> tuple[Range, ...]:
        """The ranges of a file in which whole items are likely to be as in this file.

        Args:
            at: int64 ``[n]``, where the data of each item begins in the file, ascending.
            nbytes: int64 ``[n]``, the length of each.
            sums: uint32 ``[m]``, the CRC-32s of the blocks of all items, one item after the other.
        """
        stored = self._sums
        if not len(stored.offset) or not len(at):
            return _NO_RANGES
        # Several items lie at one offset only if all but the last of them are empty.
        row = np.maximum(np.searchsorted(stored.offset, at, side="right") - 1, 0)
        is_equal = (stored.offset[row] == at) & (stored.nbytes[row] == nbytes)
        counts = block_counts(nbytes)
        behind = np.cumsum(counts)
        item = np.repeat(np.arange(len(at)), counts)
        earlier = self._first[row][item] + np.arange(len(item)) - (behind - counts)[item]
        known = is_equal[item]
        differs = np.ones(len(item), dtype=np.bool_)
        differs[known] = stored.crcs[earlier[known]] != sums[known]
        is_equal[item[differs]] = False
        edges = np.flatnonzero(np.diff(np.concatenate(([False], is_equal, [False])).astype(np.int8)))
        return tuple((int(at[a]), int(at[b - 1] + nbytes[b - 1])) for a, b in edges.reshape(-1, 2).tolist())


def _with_ends(found: list[Range], pieces: Sequence[Range], nbytes: int) -> list[Range]:
    """Add the pieces of blocks at both ends of a part, where their neighbours are in ``found``."""
    if found:
        first, last = pieces[0], pieces[-1]
        if first[0] % SUM_NBYTES and found[0][0] == first[1]:
            found[0] = first[0], found[0][1]
        if last[1] % SUM_NBYTES and last[1] < nbytes and found[-1][1] == last[0]:
            found[-1] = found[-1][0], last[1]
    return found


def open_earlier_files(
    disk: Disk, directory: str, rank: int, names: Sequence[FileName], mark: str
) -> list[EarlierFile | str]:
    """Open the files of a checkpoint that lie where a rank's new files will lie.

    Args:
        directory: the directory of the checkpoint.
        names: the plain names of the new files.
        mark: the mark of the new save, whose own files do not count.

    Returns:
        For each new file the earlier one, or in words why there is none. A repeated save of the same structure gives
        the n-th file of a rank the same items at the same offsets. If the earlier checkpoint has another structure, its
        checksums do not fit, and that is all.
    """
    listed: list[str] = []

    def find(number: int, name: str) -> EarlierFile | str:
        path: str | None = os.path.join(directory, name)
        try:
            if not disk.exists(os.path.join(directory, name)):
                listed[:] = listed or disk.list_directory(directory)
                path = _newest(disk, directory, listed, rank, number, holds_raw_bytes(name), mark)
            return f"{directory} has no {name}" if path is None else _opened(disk, path)
        except StorageError as error:
            return error.message

    return [find(number, name.committed) for number, name in enumerate(names)]


def _newest(
    disk: Disk, directory: str, listed: Sequence[str], rank: int, number: int, is_raw: bool, mark: str
) -> str | None:
    """The path of the file with this number, under a name with a mark. A killed save may have left a second one."""
    paths = []
    for name in listed:
        writer = writer_of(name)
        if writer is None or name.endswith(".part") or holds_raw_bytes(name) != is_raw:
            continue
        if (writer.rank, writer.number) == (rank, number) and writer.mark not in ("", mark):
            paths.append(os.path.join(directory, name))
    return max(paths, key=disk.modified_seconds, default=None)


def _opened(disk: Disk, path: str) -> EarlierFile | str:
    file = disk.open_read(path)
    try:
        sums = stored_sums(disk, file)
    except BaseException:
        disk.close(file)
        raise
    if sums is not None and len(sums.crcs):
        return EarlierFile(file, sums)
    disk.close(file)
    return f"{path} holds no checksums of blocks"
