"""Records of fixed width: opcodes with gaps, broadcast over rows and filled in by NumPy.

Owns the gaps and their widths; never knows what the opcodes mean. Called by the modules that emit records.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Gap", "Parts", "Template"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Gap:
    """Where a record differs from row to row; filled from the column ``name``.

    Attributes:
        name: of the column.
        is_number: whether an integer is pushed, or the value with that memo index.
    """

    name: str
    is_number: bool = False


Parts = Sequence[bytes | Gap]
"""Opcodes and gaps, in turn."""


class Template:
    """A record of fixed width.

    Args:
        parts: its opcodes and gaps; no two gaps have one name.
        largest: for each gap that is a number the largest that will be filled in, which decides its width.
    """

    def __init__(self, parts: Parts, largest: Mapping[str, int] | None = None) -> None:
        fields: dict[str, tuple[str, int]] = {}
        blank = b""
        for part in parts:
            if isinstance(part, bytes):
                blank += part
                continue
            if not part.is_number:
                opcode, format_, width = pickle.LONG_BINGET, "<u4", 4
            elif (largest or {})[part.name] < 1 << 31:
                opcode, format_, width = pickle.BININT, "<i4", 4
            else:
                opcode, format_, width = pickle.LONG1 + b"\x08", "<i8", 8
            blank += opcode
            fields[part.name] = (format_, len(blank))
            blank += bytes(width)
        self.width = len(blank)
        """Bytes of a record."""
        self._blank = np.frombuffer(blank, dtype=np.dtype((np.void, self.width)))
        self._names = tuple(fields)
        self._record = np.dtype(
            {
                "names": list(fields),
                "formats": [format_ for format_, _ in fields.values()],
                "offsets": [offset for _, offset in fields.values()],
                "itemsize": self.width,
            }
        )

    def write(self, out: Bytes, columns: Mapping[str, npt.NDArray[np.integer]]) -> None:
        """Write a record for each row of ``columns`` into ``out``, uint8 ``[rows * width]``, contiguous."""
        out.view(self._blank.dtype)[:] = self._blank
        records = out.view(self._record)
        for name in self._names:
            records[name] = columns[name]

    def scatter(self, out: Bytes, at: npt.NDArray[np.intp], columns: Mapping[str, npt.NDArray[np.integer]]) -> None:
        """Write a record for each row of ``columns`` into ``out``, uint8, contiguous, beginning at byte ``at[row]``."""
        if not len(at):
            return
        records: Bytes = np.empty(len(at) * self.width, dtype=np.uint8)
        self.write(records, columns)
        # Each byte of `out` as the first of a record: these overlap, but those at `at` do not.
        starts = np.ndarray(len(out) - self.width + 1, dtype=self._blank.dtype, buffer=out, strides=(1,))
        starts[at] = records.view(self._blank.dtype)
