"""What the records of ``.metadata`` refer to by number: strings, sizes and properties, put into the pickle's memo.

Owns their opcodes and the order of the memo: classes and attribute names, file names, names, sizes, properties, parts
of paths. Called by ``emit``.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from robust_dcp.storage.metadata.pickled.columns import MetadataColumns
from robust_dcp.storage.metadata.pickled.opcodes import memoized, tuple_of
from robust_dcp.storage.metadata.pickled.slabs import SLAB_ROWS, new_slab, slabs_of
from robust_dcp.storage.metadata.pickled.stock_records import StockRecords, properties_state
from robust_dcp.storage.metadata.pickled.template import Gap, Parts, Template

__all__ = ["Memo", "memoized_properties", "memoized_sizes", "memoized_texts"]

UInt32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Memo:
    """The memo indices of what the columns refer to.

    Attributes:
        file, name, properties: of the first file name, name, and state of properties; the others follow.
        size: uint32 ``[S]``, of each row of ``sizes``.
        end: the next index.
    """

    file: int
    name: int
    size: UInt32
    properties: int
    end: int

    @classmethod
    def of(cls, columns: MetadataColumns, records: StockRecords) -> Memo:
        """The indices that :func:`memoized_texts` and the others give, one after the other."""
        name = records.n_constants + columns.n_files
        first_size = name + len(columns.names)
        properties = first_size + len(columns.sizes)
        size: UInt32 = np.empty(len(columns.sizes), dtype=np.uint32)
        size[_by_ndim(columns)] = np.arange(first_size, properties, dtype=np.uint32)
        return cls(records.n_constants, name, size, properties, properties + len(columns.properties))


def memoized_texts(values: Sequence[str]) -> Iterator[memoryview]:
    """Give each of ``values`` a memo index."""
    for first in range(0, len(values), SLAB_ROWS):
        yield _texts(values[first : first + SLAB_ROWS])


def _texts(values: Sequence[str]) -> memoryview:
    characters: npt.NDArray[np.uint8] = np.frombuffer("".join(values).encode("utf-8", "surrogatepass"), dtype=np.uint8)
    nbytes = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
    if len(characters) != nbytes.sum():
        first_bytes = np.flatnonzero((characters & 0xC0) != 0x80)
        bounds = np.append(first_bytes, len(characters))[np.concatenate(([0], np.cumsum(nbytes)))]
        nbytes = np.diff(bounds)
    begin, end = 5, 2  # bytes: opcode and length, opcodes
    slab, out = new_slab(len(characters) + len(values) * (begin + end))
    behind = np.cumsum(nbytes + (begin + end))
    at = behind - nbytes - (begin + end)
    out[at] = ord(pickle.BINUNICODE)
    out[at[:, None] + np.arange(1, begin)] = nbytes.astype("<u4").view(np.uint8).reshape(-1, 4)
    out[behind - 2], out[behind - 1] = ord(pickle.MEMOIZE), ord(pickle.POP)
    is_text = np.ones(len(out), dtype=np.bool_)
    is_text[at[:, None] + np.arange(begin)] = False
    is_text[behind[:, None] - np.arange(1, end + 1)] = False
    out[is_text] = characters
    return slab


def memoized_sizes(columns: MetadataColumns, records: StockRecords) -> Iterator[memoryview]:
    """Give each ``torch.Size`` a memo index, those of fewest dimensions first."""
    order = _by_ndim(columns)
    ends = np.cumsum(np.bincount(columns.size_ndims, minlength=1)).tolist()
    for ndim, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if first == end:
            continue
        values = columns.sizes[order[first:end], :ndim]
        before, behind = tuple_of(ndim)
        gaps = [Gap(str(dimension), is_number=True) for dimension in range(ndim)]
        parts: Parts = (records.size + before, *gaps, memoized(behind + pickle.TUPLE1 + pickle.REDUCE))
        largest = values.max(axis=0).tolist()
        template = Template(parts, {gap.name: value for gap, value in zip(gaps, largest, strict=True)})
        by_gap = {gap.name: values[:, dimension] for dimension, gap in enumerate(gaps)}
        yield from slabs_of(template, by_gap, end - first)


def _by_ndim(columns: MetadataColumns) -> npt.NDArray[np.intp]:
    """The order in which sizes are emitted: by number of dimensions, since those have records of one width."""
    return np.argsort(columns.size_ndims, kind="stable")


def memoized_properties(columns: MetadataColumns) -> bytes:
    """Give the state of each ``TensorProperties`` a memo index."""
    return b"".join(memoized(properties_state(*properties)) for properties in columns.properties)
