"""The entries of ``state_dict_metadata`` and ``storage_data``: records that NumPy fills in, a slab of rows at a time.

Called by ``emit``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from robust_dcp.storage.metadata.pickled.columns import MetadataColumns
from robust_dcp.storage.metadata.pickled.memo import Memo
from robust_dcp.storage.metadata.pickled.slabs import SLAB_ROWS, new_slab, slabs_of
from robust_dcp.storage.metadata.pickled.stock_records import StockRecords
from robust_dcp.storage.metadata.pickled.template import Template

__all__ = ["StorageItems", "state_dict_entries"]

Bools = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]
Rows = npt.NDArray[np.intp]


def state_dict_entries(columns: MetadataColumns, memo: Memo, records: StockRecords) -> Iterator[memoryview]:
    """Add each name and its storage metadata to the dict on the stack. Slabs end at any row, since a name may have
    millions: the list of its chunks then goes on in the next slab."""
    begin, end = Template(records.tensor_begin), Template(records.tensor_end)
    chunk, whole = Template(records.chunk), Template(records.object)
    for first in range(0, len(columns.name), SLAB_ROWS):
        name = columns.name[first : first + SLAB_ROWS]
        is_object = columns.name_properties[name] < 0
        is_first, is_last = _ends_of_names(columns.name, first, len(name))
        width = np.where(is_object, whole.width, chunk.width + is_first * begin.width + is_last * end.width)
        behind = np.cumsum(width)
        at = behind - width
        slab, out = new_slab(int(behind[-1]))
        rows = np.flatnonzero(is_object)
        whole.scatter(out, at[rows], {"name": name[rows] + memo.name})
        rows = np.flatnonzero(is_first & ~is_object)
        of_tensor = {
            "name": name[rows] + memo.name,
            "properties": columns.name_properties[name[rows]] + memo.properties,
            "size": memo.size[columns.name_size[name[rows]]],
        }
        begin.scatter(out, at[rows], of_tensor)
        rows = np.flatnonzero(~is_object)
        of_chunk = {
            "offset": memo.size[columns.offset[first + rows]],
            "size": memo.size[columns.size[first + rows]],
        }
        chunk.scatter(out, (at + is_first * begin.width)[rows], of_chunk)
        rows = np.flatnonzero(is_last & ~is_object)
        end.scatter(out, behind[rows] - end.width, {})
        yield slab


def _ends_of_names(name: npt.NDArray[np.int32], first: int, count: int) -> tuple[Bools, Bools]:
    """Whether each of ``count`` rows from ``first`` on is the first of its name, and whether it is the last."""
    end = first + count
    before = name[first - 1] if first else -1
    behind = name[end] if end < len(name) else -1
    changes = np.diff(name[first:end], prepend=before, append=behind) != 0
    return changes[:-1], changes[1:]


class StorageItems:
    """Some rows of the columns, as what their entries of ``storage_data`` refer to.

    Args:
        columns: the columns; not kept.
        memo: where in the memo is what they refer to.
        rows: the rows.
    """

    def __init__(self, columns: MetadataColumns, memo: Memo, rows: Rows) -> None:
        is_object = columns.name_properties[columns.name[rows]] < 0
        self._places = np.flatnonzero(~is_object), np.flatnonzero(is_object)
        offset: UInt32 = np.zeros(len(rows), dtype=np.uint32)
        offset[~is_object] = memo.size[columns.offset[rows[~is_object]]]
        self._references: dict[str, UInt32] = {
            "name": (columns.name[rows] + memo.name).astype(np.uint32),
            "offset": offset,
            "file": (columns.file[rows] + memo.file).astype(np.uint32),
        }

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        places = sum(array.nbytes for array in self._places)
        return places + sum(array.nbytes for array in self._references.values())

    def entries(self, records: StockRecords, start: Int64, nbytes: Int64) -> Iterator[memoryview]:
        """Add the entries of all rows to the dict on the stack, first those of tensors, then those of objects.

        Args:
            records: what they look like.
            start, nbytes: int64, of each row its place in its file.
        """
        for parts, places in zip((records.tensor_item, records.object_item), self._places, strict=True):
            if not len(places):
                continue
            numbers = {"start": start[places], "nbytes": nbytes[places]}
            largest = {name: int(column.max()) for name, column in numbers.items()}
            references = {name: column[places] for name, column in self._references.items()}
            columns: dict[str, npt.NDArray[np.integer]] = {**references, **numbers}
            yield from slabs_of(Template(parts, largest), columns, len(places))
