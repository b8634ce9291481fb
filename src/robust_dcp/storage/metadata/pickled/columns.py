"""The contents of a ``.metadata`` as columns.

This module owns the columns and checks that they fit together: a wrong place would silently give a tensor another
tensor's size. ``plan.metadata`` makes them, ``emit`` writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["MetadataColumns", "Path"]

Path = tuple[str | int, ...]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class Paths(Sized, Iterable[Path], Protocol):
    """The path of each name, in order: a list, or an object that makes them one by one."""


@dataclass(frozen=True, eq=False)
class MetadataColumns:
    """N names, and K items that are written for them. Each item is a row; rows are sorted by (name, offsets).

    Attributes:
        names: the distinct names, in the order of ``state_dict_metadata``.
        paths: for each name its place in the nested state dict (DCP's ``planner_data``), or ``None``.
        properties: the P distinct ``(dtype, layout, requires_grad)``.
        name_properties: int32 ``[N]``, place in ``properties``; -1 for an object (``BytesStorageMetadata``).
        name_size: int32 ``[N]``, place in ``sizes`` of the tensor's global size; -1 for objects.
        sizes: int64 ``[S, D]``, values of ``torch.Size``. Only the first ``size_ndims`` entries of a row count.
        size_ndims: uint8 ``[S]``.
        name: int32 ``[K]``, place in ``names``; ascending. Each name has at least one row, an object exactly one.
        offset, size: int32 ``[K]``, places in ``sizes`` of the chunk's offsets and sizes; -1 for objects.
        file: int32 ``[K]``, place among the file names. These are given for each checkpoint.
        start: int64 ``[K]``, where in its file the item begins, in bytes; -1 if this is given for each checkpoint.
        nbytes: int64 ``[K]``, its length there in bytes; -1 where ``start`` is -1.
        n_files: how many file names there will be.
        attributes: attributes of ``Metadata`` that DCP does not know, with plain values.
    """

    names: Sequence[str]
    paths: Paths | None
    properties: Sequence[tuple[torch.dtype, torch.layout, bool]]
    name_properties: Int32
    name_size: Int32
    sizes: Int64
    size_ndims: npt.NDArray[np.uint8]
    name: Int32
    offset: Int32
    size: Int32
    file: Int32
    start: Int64
    nbytes: Int64
    n_files: int
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Make sure that the lengths of columns fit together, and that each place exists.

        Raises:
            ValueError: the message says which column is wrong, and where.
        """
        n_names, n_sizes = len(self.names), len(self.sizes)
        for column, rows in (("name_properties", n_names), ("name_size", n_names), ("size_ndims", n_sizes)):
            self._expect(len(getattr(self, column)) == rows, column, f"{rows} rows", len(getattr(self, column)))
        for column in ("offset", "size", "file", "start", "nbytes"):
            found = len(getattr(self, column))
            self._expect(found == len(self.name), column, f"{len(self.name)} rows", found)
        n_paths = n_names if self.paths is None else len(self.paths)
        self._expect(n_paths == n_names, "paths", f"{n_names} paths", n_paths)
        steps = np.diff(self.name, prepend=-1, append=n_names)
        self._expect(
            bool(((steps == 0) | (steps == 1)).all()) and steps[-1] == 1, "name", "each name, ascending", steps
        )
        is_object = self.name_properties < 0
        self._expect(not (is_object[self.name[1:]] & (steps[1:-1] == 0)).any(), "name", "one row for an object", "more")
        self._expect(int(self.size_ndims.max(initial=0)) <= self.sizes.shape[1], "size_ndims", "at most D", "more")
        self._check_places("name_properties", len(self.properties), is_object)
        self._check_places("name_size", n_sizes, is_object)
        self._check_places("offset", n_sizes, is_object[self.name])
        self._check_places("size", n_sizes, is_object[self.name])
        self._check_places("file", self.n_files, None)
        self._expect(bool(((self.start < 0) == (self.nbytes < 0)).all()), "nbytes", "-1 where start is", "others")

    def _check_places(self, column: str, end: int, is_object: npt.NDArray[np.bool_] | None) -> None:
        """Make sure that ``column`` holds numbers below ``end``, and -1 exactly for objects."""
        places: Int32 = getattr(self, column)
        wrong = (places >= end) | ((places < 0) if is_object is None else ((places < 0) != is_object))
        if wrong.any():
            row = int(wrong.argmax())
            self._expect(False, f"{column}[{row}]", f"a place below {end}, or -1 for an object", int(places[row]))

    def _expect(self, valid: bool, column: str, expected: str, found: object) -> None:
        if not valid:
            raise ValueError(f"columns of a .metadata: {column}: expected {expected}, found {found}")
