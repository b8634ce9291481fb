"""What differs between the layouts of a checkpoint, and nothing else: places, names of files, frames, heads.

Owns the protocol. Everything else (engine, commit, reader, plan) is the same for all layouts. Implemented by
``torch_records`` and ``safetensors``; called by ``plan`` for places and names, and by ``write_order`` for frames.
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
    """What a data file is called, relative to the checkpoint's directory.

    Attributes:
        written: until the commit. No other save has files of this name.
        committed: from the commit on, and in ``.metadata``.
    """

    written: str
    committed: str


@dataclass(frozen=True, eq=False)
class ItemColumns:
    """What a layout may know of n items when it places them.

    Attributes:
        names: distinct FQNs, and ``name_ids`` int32 ``[n]``: places in them.
        kinds: distinct (dtype, shape of the chunk), the dtype as ``"float32"``.
        kind_ids: int32 ``[n]``, places in them; -1 for an item whose length dtype and shape do not determine.
        ndims: uint8 ``[n]``.
        offsets: int64 ``[n, D]``, of the chunks within their tensors; beyond ``ndims`` they mean nothing.
    """

    names: Sequence[str]
    name_ids: Int32
    kinds: Sequence[tuple[str, tuple[int, ...]]]
    kind_ids: Int32
    ndims: npt.NDArray[np.uint8]
    offsets: Int64


class Frame(Protocol):
    """What stands around the data of one tensor, for all tensors of one dtype and shape.

    Attributes:
        dtype, shape: of the tensor.
        header_nbytes, payload_nbytes: bytes before the data, and of the data.
        blank_header, blank_trailer: what stands there, with 0 where the CRC-32 of the data belongs.
        crc_at: where that is, in bytes from the start of the record; each a 4-byte little-endian number. Empty where
            checksums stand in the head of the file.
        nbytes: all of the record.
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
        """The bytes before the data, whose CRC-32 is ``crc32``."""

    def trailer(self, crc32: int) -> bytes:
        """The bytes after the data."""


class PlacedTensor(NamedTuple):
    """A tensor in a file with a head.

    Attributes:
        place: of the item in the plan.
        name: FQN.
        dtype, shape: of the chunk.
        chunk_offset: of the chunk within its tensor.
        offset: of the data within the file, in bytes.
    """

    place: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunk_offset: tuple[int, ...]
    offset: int


class Head(Protocol):
    """What stands at the head of a file; written last, since it holds the checksums of what follows.

    It holds what the footer of other files does.
    """

    def encode(self, mark: str, sums: SumColumns | None) -> bytes:
        """The bytes.

        Args:
            mark: of the save; empty for a file that is no part of one.
            sums: of the tensors of the file; ``None`` if none were computed.
        """


class Layout(Protocol):
    """How the items of a checkpoint lie in files. A layout has no state: all ranks compute the same.

    Attributes:
        name: as ``RobustWriter`` takes it.
        version: part of every signature: a plan made for another layout is never used.
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
        """What :meth:`place` needs of each item: int64 ``[n, c]``, a row for each; the columns are the layout's own.

        Each row depends on its item alone, so the rows of all ranks may be computed at once."""

    def place(self, measures: Int64, *, files: int) -> Placements:
        """The places of the items that one rank writes, in the order of its plan.

        Args:
            measures: the rows of these items.
            files: that the rank's tensors are spread over; a layout may need more.

        Raises:
            PlanConflict: the items cannot lie in files of this layout.
        """

    def file_names(self, rank: int, head_nbytes: Sequence[int], mark: str, *, plain: bool) -> list[FileName]:
        """The names of a rank's files.

        Args:
            head_nbytes: of each file, as in :class:`~robust_dcp.storage.layouts.places.Placements`.
            mark: of the save.
            plain: whether files are called as stock would call them, without the mark.
        """

    def frame(self, dtype: torch.dtype, shape: tuple[int, ...], head_nbytes: int) -> Frame | None:
        """The frame of a tensor in a file with a head of that length; ``None`` if its length is not fixed."""

    def head(self, tensors: Sequence[PlacedTensor], nbytes: int) -> Head:
        """The head of a file; of ``nbytes`` bytes, as it was planned."""
