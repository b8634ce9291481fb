"""The pickle of ``.metadata`` as fragments: what a plan determines once, what a save determines at each emission.

Owns the order of the fragments. ``plan.metadata`` keeps a :class:`MetadataPickle` with the plan, the commit writes what
:meth:`MetadataPickle.encode` gives.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import StorageMeta

from robust_dcp.storage.metadata.metadata_file import FORMAT_VERSION, trailer_of
from robust_dcp.storage.metadata.pickled.columns import MetadataColumns
from robust_dcp.storage.metadata.pickled.entries import StorageItems, state_dict_entries
from robust_dcp.storage.metadata.pickled.memo import Memo, memoized_properties, memoized_sizes, memoized_texts
from robust_dcp.storage.metadata.pickled.opcodes import PROTOCOL_4, spliced, text
from robust_dcp.storage.metadata.pickled.planner_data import planner_data_items
from robust_dcp.storage.metadata.pickled.slabs import SLAB_ROWS
from robust_dcp.storage.metadata.pickled.stock_records import stock_records
from robust_dcp.storage.records.checksum import crc32, crc32_of_both

__all__ = ["EncodedMetadata", "MetadataPickle"]

Fragment = bytes | memoryview
Fragments = tuple[Fragment, ...]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class EncodedMetadata:
    """The bytes of a ``.metadata`` file, to be written one fragment after the other."""

    fragments: Fragments

    @cached_property
    def nbytes(self) -> int:
        """The length of the file."""
        return sum(map(len, self.fragments))


class MetadataPickle:
    """The pickle of all checkpoints that are written by one plan. Any number of threads may use it at once.

    Args:
        columns: what the plan determines; not kept.

    Raises:
        ValueError: the columns do not fit together.
        NotImplementedError: this torch pickles a class of metadata in a way that cannot be emitted.
    """

    def __init__(self, columns: MetadataColumns) -> None:
        columns.check()
        self._n_files = columns.n_files
        memo = Memo.of(columns, stock_records())
        self.variable: npt.NDArray[np.intp] = np.flatnonzero(columns.start < 0)
        """intp ``[V]``: the rows of the columns whose places are told at each emission, in that order."""
        self._variable = StorageItems(columns, memo, self.variable)
        self._constant = tuple(_constant_fragments(columns, memo))
        self._constant_nbytes = sum(map(len, self._constant))
        self._constant_crc = _crc32_of(self._constant)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are kept."""
        return self._constant_nbytes + self.variable.nbytes + self._variable.nbytes

    def encode(
        self,
        file_names: Sequence[str],
        places: Int64,
        storage_meta: StorageMeta | None,
        *,
        version: str | None = FORMAT_VERSION,
    ) -> EncodedMetadata:
        """The ``.metadata`` of one checkpoint, trailer included. Costs nothing for items whose places are known.

        Args:
            file_names: the data files, relative to the checkpoint.
            places: int64 ``[V, 2]``, start and length in its file of each row in ``variable``, in bytes.
            storage_meta: goes into the file as it is.
            version: that of DCP's format.

        Raises:
            ValueError: other numbers of file names or places than the columns have, or a place that cannot be.
        """
        if len(file_names) != self._n_files:
            raise ValueError(f"a .metadata of {self._n_files} data files was given {len(file_names)} file names")
        if places.shape != (len(self.variable), 2):
            raise ValueError(
                f"a .metadata with {len(self.variable)} items of variable size was given places of shape "
                f"{places.shape}: expected a start and a length for each"
            )
        if places.size and int(places.min()) < 0:
            raise ValueError(f"places in a .metadata: expected starts and lengths in bytes, found {int(places.min())}")
        records = stock_records()
        before: Fragments = (PROTOCOL_4 + records.constants, *memoized_texts(file_names))
        behind: Fragments = (
            *self._variable.entries(records, places[:, 0], places[:, 1]),
            pickle.SETITEM
            + (records.attribute("storage_meta") + spliced(storage_meta) + pickle.SETITEM)
            + (records.attribute("version") + spliced(version) + pickle.SETITEM)
            + (pickle.BUILD + pickle.STOP),
        )
        # The bulk's checksum is kept, so a bit that flips in memory between two saves is noticed when the file is read.
        crc = crc32_of_both(_crc32_of(before), self._constant_crc, self._constant_nbytes)
        pickled: Fragments = (*before, *self._constant, *behind)
        nbytes = self._constant_nbytes + sum(map(len, before)) + sum(map(len, behind))
        return EncodedMetadata((*pickled, trailer_of(nbytes, _crc32_of(behind, crc))))


def _constant_fragments(columns: MetadataColumns, memo: Memo) -> Iterator[Fragment]:
    """From behind the file names up to the entries of ``storage_data`` whose places change with each save."""
    records = stock_records()
    yield from memoized_texts(columns.names)
    yield from memoized_sizes(columns, records)
    yield memoized_properties(columns) + records.metadata + records.attribute("state_dict_metadata") + pickle.EMPTY_DICT
    yield from state_dict_entries(columns, memo, records)
    has_paths = columns.paths is not None
    yield pickle.SETITEM + records.attribute("planner_data") + (pickle.EMPTY_DICT if has_paths else pickle.NONE)
    yield from planner_data_items(columns, memo)
    for name, value in columns.attributes.items():
        yield pickle.SETITEM + text(name) + spliced(value)
    yield pickle.SETITEM + records.attribute("storage_data") + pickle.EMPTY_DICT
    for first in range(0, len(columns.name), SLAB_ROWS):
        rows = first + np.flatnonzero(columns.start[first : first + SLAB_ROWS] >= 0)
        yield from StorageItems(columns, memo, rows).entries(records, columns.start[rows], columns.nbytes[rows])


def _crc32_of(fragments: Sequence[Fragment], value: int = 0) -> int:
    for fragment in fragments:
        value = crc32(fragment, value)
    return value
