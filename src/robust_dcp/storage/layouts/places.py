"""What a layout is, and the places of the layout ``torch``: file, offset and length of every item of fixed size.

A layout decides how the items of a checkpoint lie in files. Everything else (engine, commit, reader, plan) is the same
for all. ``torch`` has ``.distcp`` files of torch-save records, as DCP's ``FileSystemWriter`` makes them. The layout
``safetensors`` is in the module of that name. Places are a pure function of lengths and the writer's options. So
the coordinator and the rank compute the same ones, and nobody needs to send them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.items import Form, ItemKind, Items, distinct
from robust_dcp.storage.files.paths import data_file_name, is_data_file
from robust_dcp.storage.records.record import framed_record

RECORD_ALIGNMENT = 64
"""Records begin at multiples of this, which aligns payloads as ``torch.load(mmap=True)`` prefers."""

PAGE_NBYTES = 4096
LARGE_NBYTES = 1 << 20
"""Payloads of this size or more begin at an offset of 64 modulo 4096. PyTorch's CPU allocator puts a tensor's data at
the same place within its page, so direct I/O can write it without a copy.
"""

APART: Final = -1
"""In the place of the length of a file's head: see :func:`separated`."""

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


class Places(NamedTuple):
    """Where n items of a checkpoint lie, in columns.

    Attributes:
        files: paths of files, relative to the checkpoint.
        file: int64 ``[n]``, the number of each item's file.
        start, nbytes: int64 ``[n]``, its first byte there, and its length in bytes.
    """

    files: Sequence[str]
    file: Int64
    start: Int64
    nbytes: Int64

    def followed_by(self, others: Places) -> Places:
        """These items, and then others."""
        columns = zip(self[1:], (others.file + len(self.files), *others[2:]), strict=True)
        return Places([*self.files, *others.files], *map(np.concatenate, columns))

    def sorted(self) -> tuple[Int64, Places]:
        """The order of the items by file and by where they begin, and their places in it. Each file is there once."""
        files, number = np.unique(np.array(self.files, dtype=object), return_inverse=True)
        file = number[self.file]
        order: Int64 = np.lexsort((self.start, file))
        return order, Places(files.tolist(), file[order], self.start[order], self.nbytes[order])


class Placements(msgspec.Struct, frozen=True, eq=False):
    """Where the n kept items of one rank lie, in the order of its plan.

    Attributes:
        file: int32 ``[n]``, the number of the item's file among the rank's files.
        offset: int64 ``[n]``, start of the record in its file, in bytes; -1 for an item of variable size.
        nbytes: int64 ``[n]``, length of the record; -1 for an item of variable size.
        file_nbytes: the length of each file, without items of variable size.
        head_nbytes: for each file the length of its head, 0 for a file of records, and ``APART`` for one of records
            that are kept apart from the others.
    """

    file: Int32
    offset: Int64
    nbytes: Int64
    file_nbytes: tuple[int, ...]
    head_nbytes: tuple[int, ...]

    @property
    def n_files(self) -> int:
        return len(self.file_nbytes)

    @property
    def variable(self) -> npt.NDArray[np.intp]:
        """Places of the items of variable size."""
        return np.flatnonzero(self.offset < 0)


def place_records(measures: Int64, files: int) -> Placements:
    """Spread records over files so that the files have about the same size, and give each record its place.

    Args:
        measures: as :func:`record_measures` makes them.
        files: number of files for items of fixed size. There are fewer files if there are fewer items. Items of
            variable size get one more file, so that their lengths do not move other items.
    """
    record_nbytes, header_nbytes, payload_nbytes = measures.T
    fixed = np.flatnonzero(record_nbytes >= 0)
    n_files = max(1, min(files, len(fixed))) if len(fixed) else 0
    file = np.zeros(len(record_nbytes), dtype=np.int32)
    offset = np.full(len(record_nbytes), -1, dtype=np.int64)
    file[fixed] = balanced(record_nbytes[fixed], n_files)
    file_nbytes = []
    for number in range(n_files):
        members = fixed[file[fixed] == number]
        offset[members], end = _consecutive(
            record_nbytes[members], header_nbytes[members], payload_nbytes[members] >= LARGE_NBYTES
        )
        file_nbytes.append(end)
    if len(fixed) < len(record_nbytes):
        file[record_nbytes < 0] = n_files
        file_nbytes.append(0)
    return Placements(file, offset, record_nbytes, tuple(file_nbytes), (0,) * len(file_nbytes))


def place_as_they_come(nbytes: Sequence[int], *, files: int) -> Placements:
    """Choose files for records of unknown lengths. Each gets its place when it is written.

    Args:
        nbytes: the approximate size of each, to balance the files.
    """
    sizes = np.maximum(np.array(nbytes, dtype=np.int64), 1)
    n_files = max(1, min(files, len(sizes))) if len(sizes) else 0
    unknown = np.full(len(sizes), -1, dtype=np.int64)
    return Placements(balanced(sizes, n_files), unknown, unknown, (0,) * n_files, (0,) * n_files)


def balanced(nbytes: Int64, bins: int) -> Int32:
    """Choose a file for each record, so that the files have about the same size."""
    if bins <= 1:
        return np.zeros(len(nbytes), dtype=np.int32)
    chosen, _ = deal(nbytes, np.zeros(bins, dtype=np.int64))
    return chosen.astype(np.int32)


def _consecutive(record_nbytes: Int64, header_nbytes: Int64, large: npt.NDArray[np.bool_]) -> tuple[Int64, int]:
    """Offsets of records one after the other, large ones first, and the length of the file."""
    offset = np.zeros(len(record_nbytes), dtype=np.int64)
    end = 0
    first = np.flatnonzero(large)
    if len(first):
        offset[first] = _page_aligned(record_nbytes[first], header_nbytes[first])
        end = int(offset[first[-1]] + record_nbytes[first[-1]])
    small = np.flatnonzero(~large)
    if len(small):
        strides = round_up(record_nbytes[small], RECORD_ALIGNMENT)
        starts = -(-end // RECORD_ALIGNMENT) * RECORD_ALIGNMENT + np.cumsum(strides) - strides
        offset[small] = starts
        end = int(starts[-1] + record_nbytes[small[-1]])
    return offset, end


def _page_aligned(record_nbytes: Int64, header_nbytes: Int64) -> Int64:
    """Offsets of records that follow each other, each payload at ``RECORD_ALIGNMENT`` modulo ``PAGE_NBYTES``."""
    # From one payload to the next there is the rest of this record and the header of the next one, rounded up to whole
    # pages.
    gaps = round_up((record_nbytes - header_nbytes)[:-1] + header_nbytes[1:], PAGE_NBYTES)
    start = round_up(header_nbytes[:1] - RECORD_ALIGNMENT, PAGE_NBYTES) + RECORD_ALIGNMENT
    return np.cumsum(np.concatenate((start, gaps))) - header_nbytes


def round_up(values: Int64, multiple: int) -> Int64:
    """Round each of ``values`` up to a multiple of ``multiple``."""
    return -(-values // multiple) * multiple


# --- layouts


Kinds = list[tuple[str, tuple[int, ...]]]
"""Distinct pairs (dtype, shape of a chunk). The dtype is a string such as ``"float32"``."""


def kinds_of(items: Items, rows: npt.NDArray[np.intp]) -> tuple[Kinds, Int32]:
    """The distinct kinds of some items, and for each of ``rows`` the place of its kind in them; -1 for an item of
    variable size.
    """
    kind_ids: Int32 = np.full(len(rows), -1, dtype=np.int32)
    fixed = np.flatnonzero((items.form[rows] == Form.FIXED) & (items.kind[rows] != ItemKind.BYTES))
    rows, n_sizes = rows[fixed], len(items.sizes)
    both = items.properties_of[rows].astype(np.int64) * n_sizes + items.size[rows]
    kinds, kind_ids[fixed] = distinct(both, len(items.properties) * n_sizes)
    return [(items.properties[kind // n_sizes].dtype, items.sizes[kind % n_sizes]) for kind in kinds.tolist()], kind_ids


class Layout(msgspec.Struct, frozen=True):
    """How the items of a checkpoint lie in files. A layout has no state: all ranks compute the same.

    Attributes:
        name: its name in the options of ``RobustWriter``.
        version: part of the signature of every plan, so that a plan made for another layout is never used.
        may_share_directory: whether files of two checkpoints may lie in one directory, so that the next save can
            replace a committed checkpoint there.
        plans_places: whether all places come from a plan, so that only ``RobustPlanner`` can plan for it.
        measure: ``measure(items, rows)``: what ``place`` needs to know of each of these items: int64 ``[n, c]``, one
            row for each. The columns are the layout's own. Each row depends on its item alone, so the rows of all ranks
            may be computed in one call.
        place: ``place(measures, files)``: the places of the items that one rank writes, in the order of its plan,
            from the rows of these items and the number of files that the rank's tensors are spread over. A layout may
            need more. It raises ``PlanConflict`` if the items cannot lie in files of this layout.
        file_names: ``file_names(rank, head_nbytes, mark)``: the names of a rank's files after the commit, from the
            length of each file's head, as in :class:`Placements`, and the mark of the save, which each name holds. So
            no other save has files of these names.
    """

    name: str
    version: str
    may_share_directory: bool
    plans_places: bool
    measure: Callable[[Items, npt.NDArray[np.intp]], Int64]
    place: Callable[[Int64, int], Placements]
    file_names: Callable[[int, Sequence[int], str], list[str]]


def record_measures(kinds: Kinds, kind_ids: Int32) -> Int64:
    """int64 ``[n, 3]``: the lengths of each item's torch-save record, its header, and its payload.

    Items of variable size have -1, 0, 0. Items of one dtype and shape share one template.
    """
    rows = []
    for dtype, shape in kinds:
        template = framed_record(getattr(torch, dtype), shape)
        if template is None:
            raise TypeError(f"items of {dtype} are not of fixed size")
        rows.append((template.nbytes, template.data_offset, template.data_nbytes))
    return np.array([*rows, (-1, 0, 0)], dtype=np.int64)[kind_ids]  # the last row for -1


def _file_names(rank: int, head_nbytes: Sequence[int], mark: str) -> list[str]:
    return [data_file_name(rank, number, mark) for number in range(len(head_nbytes))]


def _measure(items: Items, rows: npt.NDArray[np.intp]) -> Int64:
    return record_measures(*kinds_of(items, rows))


TORCH: Final = Layout("torch", "torch-2", True, False, _measure, place_records, _file_names)


def separated(prefix: str) -> Layout:
    """The layout ``torch``, with tensors whose names begin with ``prefix`` in files of their own, whose names do, too.

    ``optimizer__0_1.….distcp``: these files can be removed, with what ``.metadata`` says of their tensors, and the rest
    is still a checkpoint. Items of variable size stay with the others.

    Raises:
        ValueError: ``prefix`` is empty, or cannot begin the name of a file.
    """
    if not is_data_file(data_file_name(0, 0, "0" * 16, prefix)):
        raise ValueError(f"{prefix!r} cannot begin the name of a file: expected letters, digits, '_', '-' and '.'")

    def measure(items: Items, rows: npt.NDArray[np.intp]) -> Int64:
        is_apart = np.array([name.startswith(prefix) for name in items.names], dtype=np.int64)
        return np.column_stack([_measure(items, rows), is_apart[items.name[rows]]])

    def place(measures: Int64, files: int) -> Placements:
        is_apart = (measures[:, -1] == 1) & (measures[:, 0] >= 0)
        apart, rest = np.flatnonzero(is_apart), np.flatnonzero(~is_apart)
        groups = [place_records(measures[rows, :-1], files) for rows in (rest, apart)]
        file, offset = np.empty(len(measures), dtype=np.int32), np.empty(len(measures), dtype=np.int64)
        for rows, placed, first in zip((rest, apart), groups, (0, groups[0].n_files), strict=True):
            file[rows], offset[rows] = placed.file + first, placed.offset
        heads = groups[0].head_nbytes + (APART,) * groups[1].n_files
        return Placements(file, offset, measures[:, 0], groups[0].file_nbytes + groups[1].file_nbytes, heads)

    def file_names(rank: int, head_nbytes: Sequence[int], mark: str) -> list[str]:
        return [
            data_file_name(rank, number, mark, prefix if head == APART else "")
            for number, head in enumerate(head_nbytes)
        ]

    return Layout(TORCH.name, f"{TORCH.version}, apart: {prefix}", True, False, measure, place, file_names)


# Sizes in bins that end up about equally full. The bins are files, or ranks that write or read replicas.

_LARGEST_PER_BIN = 64
"""This many of the largest sizes for each bin are placed one by one. The rest is too small to unbalance the bins."""


def deal(sizes: Int64, load: Int64) -> tuple[npt.NDArray[np.intp], Int64]:
    """Choose a bin for each of ``sizes``, given how full the bins are.

    The largest sizes go one by one into the least filled bin. This is Graham's LPT rule: the fullest bin holds at most
    4/3 of the best possible maximum. The others are sorted by size, and each bin takes a row of neighbours, up to the
    level that all bins then have.

    Args:
        sizes: int64 ``[n]``.
        load: int64 ``[bins]``, how full the bins are; not changed.

    Returns:
        (bin of each size, how full the bins are afterwards).
    """
    load = load.copy()
    chosen = np.zeros(len(sizes), dtype=np.intp)
    order = np.argsort(-sizes, kind="stable")
    n_large = min(len(order), _LARGEST_PER_BIN * len(load))
    heap = [(filled, number) for number, filled in enumerate(load.tolist())]
    heapq.heapify(heap)
    for place, size in zip(order[:n_large].tolist(), sizes[order[:n_large]].tolist(), strict=True):
        filled, number = heap[0]
        chosen[place] = number
        heapq.heapreplace(heap, (filled + size, number))
    for filled, number in heap:
        load[number] = filled
    rest = order[n_large:]
    if len(rest):
        chosen[rest] = fill_up(sizes[rest], load)
        np.add.at(load, chosen[rest], sizes[rest])
    return chosen, load


def fill_up(sizes: Int64, load: Int64) -> npt.NDArray[np.intp]:
    """Choose a bin for each of ``sizes``, such that each bin takes a row of neighbours.

    The running total of the sizes is cut where a bin has reached the common level.
    """
    total = int(sizes.sum())
    room = np.cumsum(np.maximum(_level(load, total) - load, 0.0))
    middle = np.cumsum(sizes) - sizes / 2
    scale = room[-1] / max(float(total), 1.0)
    bins: npt.NDArray[np.intp] = np.minimum(np.searchsorted(room, middle * scale, side="right"), len(load) - 1)
    return bins


def _level(load: Int64, total: int) -> float:
    """How full the bins are once ``total`` has been spread over them. Bins that are fuller than that already get
    nothing.
    """
    filled = np.sort(load).astype(np.float64)
    levels = (np.cumsum(filled) + total) / np.arange(1, len(filled) + 1)
    # If the k least filled bins share the total, their level is levels[k - 1]. It must reach all k bins, and not the
    # next.
    reaches = np.flatnonzero(levels >= filled)
    return float(levels[reaches[-1]])
