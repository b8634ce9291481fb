"""The protocol of a layout: all that differs between layouts, which is places, names of files, frames and heads.

Everything else (engine, commit, reader, plan) is the same for all layouts. ``torch_records`` and ``safetensors``
implement it. ``plan`` calls it for places and names, and ``write_order`` for frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from robust_dcp.storage.layouts.footer import SumColumns
from robust_dcp.storage.layouts.places import Placements

__all__ = ["FileName", "Frame", "Head", "ItemColumns", "Layout", "PlacedTensor"]

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


class Frame(Protocol):
    """The bytes around the data of one tensor. All tensors of one dtype and shape share it.

    Attributes:
        dtype, shape: those of the tensor.
        header_nbytes, payload_nbytes: bytes before the data, and bytes of data.
        blank_header, blank_trailer: the bytes before and after the data, with 0 in place of its CRC-32.
        crc_at: where the CRC-32 goes, in bytes from the start of the record. Each is a 4-byte little-endian number.
            Empty if the head of the file holds the checksums.
        nbytes: length of the whole record.
    """

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def header_nbytes(self) -> int: ...
    @property
    def payload_nbytes(self) -> int: ...
    @property
    def blank_header(self) -> bytes: ...
    @property
    def blank_trailer(self) -> bytes: ...
    @property
    def crc_at(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...

    def header(self, crc32: int) -> bytes:
        """The bytes before the data, if the CRC-32 of the data is ``crc32``."""

    def trailer(self, crc32: int) -> bytes:
        """The bytes after the data, if the CRC-32 of the data is ``crc32``."""


class PlacedTensor(NamedTuple):
    """A tensor in a file with a head.

    Attributes:
        place: the place of the item in the plan.
        name: its FQN.
        dtype, shape: those of the chunk.
        chunk_offset: the offset of the chunk in its tensor.
        offset: where the data begins in the file, in bytes.
    """

    place: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunk_offset: tuple[int, ...]
    offset: int


class Head(Protocol):
    """The head of a file. It is written last, because it holds the checksums of the data after it.

    A file with a head has no footer: the head holds the same information.
    """

    def encode(self, mark: str, sums: SumColumns | None) -> bytes:
        """The bytes of the head.

        Args:
            mark: the mark of the save; empty for a file that is not part of a save.
            sums: the checksums of the tensors of the file; ``None`` if none were computed.
        """


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

    def frame(self, dtype: torch.dtype, shape: tuple[int, ...], head_nbytes: int) -> Frame | None:
        """The frame of a tensor in a file with a head of that length; ``None`` if its length is not fixed."""

    def head(self, tensors: Sequence[PlacedTensor], nbytes: int) -> Head:
        """The head of a file, which has the planned length ``nbytes``."""
