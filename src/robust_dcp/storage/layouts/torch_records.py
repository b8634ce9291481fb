"""The layout ``torch``: ``.distcp`` files of torch-save records, as DCP's ``FileSystemWriter`` makes them.

This module decides which records go to which file, and names the files. ``torch_zip`` knows what a record looks like;
``places`` has the arithmetic of places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.storage.files.paths import data_file_name
from robust_dcp.storage.layouts.places import Placements, place_records
from robust_dcp.storage.layouts.protocol import FileName, Frame, Head, ItemColumns, PlacedTensor
from robust_dcp.storage.records.torch_zip import RecordTemplate, record_template

__all__ = ["TORCH", "TorchRecords", "record_measures"]

Int64 = npt.NDArray[np.int64]


class TorchRecords:
    """:class:`~robust_dcp.storage.layouts.protocol.Layout` ``torch``.

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

    def frame(self, dtype: torch.dtype, shape: tuple[int, ...], head_nbytes: int) -> Frame | None:
        return record_template(dtype, shape)

    def head(self, tensors: Sequence[PlacedTensor], nbytes: int) -> Head:
        raise ValueError("files of torch records have no head")


TORCH: Final = TorchRecords()


def record_measures(items: ItemColumns) -> Int64:
    """int64 ``[n, 3]``: the lengths of each item's torch-save record, its header, and its payload.

    Items of variable size have -1, 0, 0. Items of one dtype and shape share one template.
    """
    templates = [_template_of(dtype, shape) for dtype, shape in items.kinds]
    rows = [(t.nbytes, t.header_nbytes, t.payload_nbytes) for t in templates]
    return np.array([*rows, (-1, 0, 0)], dtype=np.int64)[items.kind_ids]  # the last row for -1


def _template_of(dtype: str, shape: tuple[int, ...]) -> RecordTemplate:
    template = record_template(getattr(torch, dtype), shape)
    if template is None:
        raise TypeError(f"items of {dtype} are not of fixed size")
    return template
