"""Where each name of a structure is in the nested state dict, as columns of part lengths.

Example: the path ``("model", "layers", 0)`` has the name ``model.layers.0`` and the lengths 5, 6 and -1. A name is its
path joined by dots (``torch.distributed.checkpoint._nested_dict``), so the lengths of the parts are enough. This module
owns that encoding. ``global_plan.conflicts`` compares paths between ranks. ``.metadata`` holds them as DCP's
``planner_data``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

__all__ = ["Path", "Paths"]

Path = tuple[str | int, ...]
Int32 = npt.NDArray[np.int32]

_INDEX_DIGITS = 20
"""More digits than a list index can have."""


@dataclass(frozen=True, eq=False)
class Paths:
    """The paths of N names; ``paths[n]`` is the path of ``names[n]``. Call :meth:`check` on paths from other processes.

    Attributes:
        names: the names.
        counts: int32 ``[N]``, the number of parts of each path, at least one.
        lengths: int32 ``[sum(counts)]``, the number of characters of each part, negative if the part is a list index.
    """

    names: tuple[str, ...]
    counts: Int32
    lengths: Int32

    @classmethod
    def of(cls, names: tuple[str, ...], paths: Iterable[Path]) -> Paths:
        """The columns for ``paths``, which are in the order of ``names``."""
        paths = list(paths)
        return cls(
            names=names,
            counts=np.fromiter(map(len, paths), dtype=np.int32, count=len(paths)),
            lengths=np.array(
                [
                    -len(str(part)) if isinstance(part, int) else len(part)
                    for part in chain.from_iterable(paths)  # one pass over all parts, without a list for each name
                ],
                dtype=np.int32,
            ),
        )

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[Path]:
        lengths, at = self.lengths.tolist(), 0
        for name, count in zip(self.names, self.counts.tolist(), strict=True):
            yield _split(name, lengths[at : at + count])
            at += count

    def __getitem__(self, place: int) -> Path:
        return _split(self.names[place], self.lengths[self._starts[place] : self._starts[place + 1]].tolist())

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.concatenate(([0], np.cumsum(self.counts, dtype=np.int64)))

    def taken(self, places: npt.NDArray[np.intp]) -> Paths:
        """The paths of the names at ``places``, which ascend."""
        is_taken = np.zeros(len(self), dtype=np.bool_)
        is_taken[places] = True
        names = tuple(map(self.names.__getitem__, places.tolist()))
        return Paths(names, self.counts[places], self.lengths[np.repeat(is_taken, self.counts)])

    def check(self) -> None:
        """Check that each path spells its name.

        Raises:
            ValueError: a path does not. The message names it.
        """
        if len(self.counts) != len(self.names) or int(self.counts.sum()) != len(self.lengths):
            raise ValueError(f"{len(self.counts)} paths of {len(self.lengths)} parts for {len(self.names)} names")
        if not len(self.names):
            return
        if int(self.counts.min()) < 1:
            raise ValueError("a path without parts")
        lengths = np.abs(self.lengths.astype(np.int64))
        name_lengths = np.fromiter(map(len, self.names), dtype=np.int64, count=len(self.names))
        wrong = np.add.reduceat(lengths, self._starts[:-1]) + self.counts - 1 != name_lengths
        if not wrong.any():
            # Every part must end where the next begins. One character is between two parts, and between two names.
            text = ".".join((*self.names, "")).encode("utf-32-le", "surrogatepass")
            characters = np.frombuffer(text, dtype="<u4")
            ends = np.cumsum(lengths + 1)
            is_wrong = characters[ends - 1] != ord(".")
            indices = np.flatnonzero(self.lengths < 0)
            if len(indices):
                is_wrong[indices] |= _are_no_indices(characters, (ends - 1 - lengths)[indices], lengths[indices])
            wrong = np.logical_or.reduceat(is_wrong, self._starts[:-1])
        if wrong.any():
            raise ValueError(f"the path of {self.names[int(wrong.argmax())]!r} does not spell it")


def _are_no_indices(
    characters: npt.NDArray[np.uint32], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """For each part: whether it is not a decimal number as ``str(int)`` writes it, or too long for a list index."""
    is_digit = (characters >= ord("0")) & (characters <= ord("9"))
    digits = np.concatenate(([0], np.cumsum(is_digit)))
    leading_zero = (characters[starts] == ord("0")) & (lengths > 1)
    is_no_index: npt.NDArray[np.bool_] = digits[starts + lengths] - digits[starts] != lengths
    is_no_index |= leading_zero | (lengths >= _INDEX_DIGITS)
    return is_no_index


def _split(name: str, lengths: Sequence[int]) -> Path:
    parts = name.split(".")
    if len(parts) != len(lengths):  # some part contains a dot
        ends = list(accumulate(abs(length) + 1 for length in lengths))
        parts = [name[end - 1 - abs(length) : end - 1] for end, length in zip(ends, lengths, strict=True)]
    if min(lengths) >= 0:
        return tuple(parts)
    return tuple(int(part) if length < 0 else part for part, length in zip(parts, lengths, strict=True))
