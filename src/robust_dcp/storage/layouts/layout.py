"""What differs between layouts: places, names of files, and heads. Here is also the layout ``torch``.

A layout decides how the items of a checkpoint lie in files. Everything else (engine, commit, reader, plan) is the same
for all. ``torch`` has ``.distcp`` files of torch-save records, as DCP's ``FileSystemWriter`` makes them. The layout
``safetensors`` is in the file of that name. ``places`` has the arithmetic of places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.storage.files.paths import data_file_name
from robust_dcp.storage.layouts.places import Placements, place_records
from robust_dcp.storage.records.record import framed_record

__all__ = ["TORCH", "FileName", "ItemColumns", "Layout", "TorchRecords", "record_measures"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


class FileName(NamedTuple):
    """The names of a data file, relative to the checkpoint's directory. No other save has files of these names.

    Attributes:
        written: its name before the commit.
        committed: its name after the commit, and in ``.metadata``.
    """

    written: str
    committed: str


@dataclass(frozen=True, eq=False)
class ItemColumns:
    """What a layout may know of n items when it places them.

    Attributes:
        names: the distinct FQNs. ``name_ids``, int32 ``[n]``, holds the place of each item's name in them.
        kinds: the distinct pairs (dtype, shape of the chunk). The dtype is a string such as ``"float32"``.
        kind_ids: int32 ``[n]``, the place of each item's kind in them; -1 for an item of variable size.
        ndims: uint8 ``[n]``, the number of dimensions.
        offsets: int64 ``[n, D]``, the offsets of the chunks in their tensors. Columns from ``ndims`` on mean nothing.
    """

    names: Sequence[str]
    name_ids: Int32
    kinds: Sequence[tuple[str, tuple[int, ...]]]
    kind_ids: Int32
    ndims: npt.NDArray[np.uint8]
    offsets: Int64


class Layout(Protocol):
    """How the items of a checkpoint lie in files. A layout has no state: all ranks compute the same.

    Attributes:
        name: its name in the options of ``RobustWriter``.
        version: part of the signature of every plan, so that a plan made for another layout is never used.
        may_share_directory: whether files of two checkpoints may lie in one directory, so that the next save can
            replace a committed checkpoint there.
        plans_places: whether all places come from a plan, so that only ``RobustPlanner`` can plan for it.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def may_share_directory(self) -> bool: ...
    @property
    def plans_places(self) -> bool: ...

    def measure(self, items: ItemColumns) -> Int64:
        """What :meth:`place` needs to know of each item: int64 ``[n, c]``, one row for each. The columns are the
        layout's own.

        Each row depends on its item alone. So the rows of all ranks may be computed in one call.
        """

    def place(self, measures: Int64, *, files: int) -> Placements:
        """The places of the items that one rank writes, in the order of its plan.

        Args:
            measures: the rows of these items.
            files: how many files the rank's tensors are spread over. A layout may need more.

        Raises:
            PlanConflict: the items cannot lie in files of this layout.
        """

    def file_names(self, rank: int, head_nbytes: Sequence[int], mark: str) -> list[FileName]:
        """The names of a rank's files. Each holds the mark of the save.

        Args:
            head_nbytes: the length of each file's head, as in :class:`~robust_dcp.storage.layouts.places.Placements`.
            mark: the mark of the save.
        """


class TorchRecords:
    """:class:`Layout` ``torch``.

    Its measures are three lengths in bytes: of a record, of the header before the payload, and of the payload. A record
    of -1 bytes is an item of variable size.
    """

    name: Final = "torch"
    version: Final = "torch-2"
    may_share_directory: Final = True
    plans_places: Final = False

    def measure(self, items: ItemColumns) -> Int64:
        return record_measures(items)

    def place(self, measures: Int64, *, files: int) -> Placements:
        return place_records(measures[:, 0], measures[:, 1], measures[:, 2], files=files)

    def file_names(self, rank: int, head_nbytes: Sequence[int], mark: str) -> list[FileName]:
        names = [data_file_name(rank, number, mark) for number in range(len(head_nbytes))]
        return [FileName(name, name) for name in names]


TORCH: Final = TorchRecords()


def record_measures(items: ItemColumns) -> Int64:
    """int64 ``[n, 3]``: the lengths of each item's torch-save record, its header, and its payload.

    Items of variable size have -1, 0, 0. Items of one dtype and shape share one template.
    """
    rows = []
    for dtype, shape in items.kinds:
        template = framed_record(getattr(torch, dtype), shape)
        if template is None:
            raise TypeError(f"items of {dtype} are not of fixed size")
        rows.append((template.nbytes, template.data_offset, template.data_nbytes))
    return np.array([*rows, (-1, 0, 0)], dtype=np.int64)[items.kind_ids]  # the last row for -1
