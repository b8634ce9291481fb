"""The layout ``safetensors``: files as torch's ``HuggingFaceStorageWriter`` makes them, and one more file for the rest.

This module decides which tensor goes into which file, in which order, and what the files are called. Objects and some
dtypes do not fit into safetensors. They go to one file of torch-save records for each rank, which only readers of
``.metadata`` know. ``safetensors_head`` knows what a head looks like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.errors import PlanConflict
from robust_dcp.storage.files.paths import data_file_name, shard_file_name, temporary_name
from robust_dcp.storage.layouts.balance import deal
from robust_dcp.storage.layouts.places import PAGE_NBYTES, Placements, place_records
from robust_dcp.storage.layouts.protocol import FileName, Frame, Head, ItemColumns, PlacedTensor
from robust_dcp.storage.layouts.raw_frame import raw_frame
from robust_dcp.storage.layouts.safetensors_head import (
    DTYPES,
    LENGTH_NBYTES,
    MAX_HEADER_NBYTES,
    METADATA_KEY,
    ShardHead,
    entry_nbytes,
    head_nbytes_for,
)
from robust_dcp.storage.layouts.torch_records import record_measures
from robust_dcp.storage.records.torch_zip import record_template

__all__ = ["SAFETENSORS", "Safetensors"]

Int64 = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]

# The columns that measure() gives: first those for the torch-save record of an item, then those for a file of raw
# bytes.
_RECORD, _HEADER, _PAYLOAD, _IS_RAW, _NAME, _ITEMSIZE, _ENTRY = range(7)


class Safetensors:
    """:class:`~robust_dcp.storage.layouts.protocol.Layout` ``safetensors``."""

    name: Final = "safetensors"
    version: Final = "safetensors-2"
    may_share_directory: Final = False
    plans_places: Final = True

    def measure(self, items: ItemColumns) -> Int64:
        sizes = [(dtype in DTYPES, getattr(torch, dtype).itemsize) for dtype, _ in items.kinds]
        is_raw, itemsize = np.array([*sizes, (False, 0)], dtype=np.int64)[items.kind_ids].T
        if METADATA_KEY in items.names:  # the header uses this name itself
            is_raw = is_raw & (items.name_ids != items.names.index(METADATA_KEY))
        return np.column_stack(
            [record_measures(items), is_raw, items.name_ids.astype(np.int64), itemsize, entry_nbytes(items)]
        )

    def place(self, measures: Int64, *, files: int) -> Placements:
        is_raw = measures[:, _IS_RAW] == 1
        raw, side = np.flatnonzero(is_raw), np.flatnonzero(~is_raw)
        offset = np.full(len(measures), -1, dtype=np.int64)
        nbytes = measures[:, _RECORD].copy()
        nbytes[raw] = measures[raw, _PAYLOAD]
        in_files, heads = _spread(measures[raw], files)
        n_raw = len(heads)
        file = np.full(len(measures), n_raw, dtype=np.int32)
        file[raw] = in_files
        file_nbytes = []
        for number, head in enumerate(heads):
            members = raw[_in_order(measures[raw], np.flatnonzero(in_files == number))]
            ends = head + np.cumsum(measures[members, _PAYLOAD])
            offset[members] = ends - measures[members, _PAYLOAD]
            file_nbytes.append(int(ends[-1]))
        if len(side):
            beside = place_records(*measures[side, : _PAYLOAD + 1].T, files=1)
            offset[side] = beside.offset
            file_nbytes.append(max(beside.file_nbytes))
            heads.append(0)
        has_variable = bool((nbytes < 0).any())
        return Placements(
            file=file,
            offset=offset,
            nbytes=nbytes,
            file_nbytes=tuple(file_nbytes),
            variable_file=n_raw if has_variable else None,
            heads=tuple(heads),
        )

    def file_names(self, rank: int, head_nbytes: Sequence[int], mark: str) -> list[FileName]:
        count = sum(nbytes > 0 for nbytes in head_nbytes)
        names = []
        for number, nbytes in enumerate(head_nbytes):
            if nbytes:
                name = shard_file_name(rank, number, count, mark)
                names.append(FileName(temporary_name(name), name))
            else:
                name = data_file_name(rank, number, mark)
                names.append(FileName(name, name))
        return names

    def frame(self, dtype: torch.dtype, shape: tuple[int, ...], head_nbytes: int) -> Frame | None:
        return raw_frame(dtype, shape) if head_nbytes else record_template(dtype, shape)

    def head(self, tensors: Sequence[PlacedTensor], nbytes: int) -> Head:
        return ShardHead(tensors, nbytes)


SAFETENSORS: Final = Safetensors()


def _spread(measures: Int64, files: int) -> tuple[npt.NDArray[np.int32], list[int]]:
    """Choose a file for each tensor. A file has each name only once, and no head is longer than readers accept.

    Returns:
        (file of each tensor, length of each file's head).
    """
    if not len(measures):
        return np.zeros(0, dtype=np.int32), []
    _, which, counts = np.unique(measures[:, _NAME], return_inverse=True, return_counts=True)
    times = counts[which.reshape(-1)]  # how often a tensor's name occurs
    n_files = max(min(files, len(measures)), int(times.max()))
    while True:
        file = _dealt(measures, times > 1, n_files)
        heads = [
            head_nbytes_for(int(entries), int(count), int(payload))
            for entries, count, payload in zip(
                np.bincount(file, weights=measures[:, _ENTRY]),
                np.bincount(file),
                np.bincount(file, weights=measures[:, _PAYLOAD]),
                strict=True,
            )
        ]
        if max(heads) - LENGTH_NBYTES <= MAX_HEADER_NBYTES:
            return file, heads
        if n_files >= len(measures):
            raise PlanConflict(f"a name of {int(measures[:, _ENTRY].max())} bytes does not fit into a safetensors file")
        n_files = min(2 * n_files, len(measures))


def _dealt(measures: Int64, is_repeated: npt.NDArray[np.bool_], n_files: int) -> npt.NDArray[np.int32]:
    file = np.zeros(len(measures), dtype=np.int32)
    # Sorted by name, the chunks of one name are neighbours. They go to the files in turn, so no two of them get the
    # same file as long as there are as many files as chunks of that name.
    repeated = np.flatnonzero(is_repeated)
    repeated = repeated[np.argsort(measures[repeated, _NAME], kind="stable")]
    file[repeated] = np.arange(len(repeated)) % n_files
    nbytes = measures[:, _PAYLOAD] + measures[:, _ENTRY]
    load = np.zeros(n_files, dtype=np.int64)
    np.add.at(load, file[repeated], nbytes[repeated])
    others = np.flatnonzero(~is_repeated)
    if len(others):
        chosen, _ = deal(nbytes[others], load)
        file[others] = chosen
    # A file may get nothing, if others have more than their share. Such a file does not exist.
    return np.unique(file, return_inverse=True)[1].reshape(-1).astype(np.int32)


def _in_order(measures: Int64, members: Places) -> Places:
    """``members`` in the order of the file.

    First come tensors that fill whole pages, so that all of them lie at 64 modulo 4096, where direct I/O needs no copy.
    The others are sorted by element size, because readers want data at a multiple of it. In each group the largest
    comes first.
    """
    payload, itemsize = measures[members, _PAYLOAD], measures[members, _ITEMSIZE]
    is_whole = payload % PAGE_NBYTES == 0
    return members[np.lexsort((-payload, np.where(is_whole, 0, -itemsize), ~is_whole))]
