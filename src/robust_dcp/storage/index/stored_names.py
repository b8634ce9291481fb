"""The names of an index: sorted, one after the other in UTF-8, with the place of each in the nested state dict.

This module finds and decodes names. Only names that are asked for become Python objects. ``stored_index`` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import ge
from typing import Final

from robust_dcp.storage.index.form import MAX_NAME_NBYTES
from robust_dcp.storage.index.index_file import IndexFile

__all__ = ["StoredNames", "text_of"]

_MAX_PARTS: Final = 10_000  # in a path
_NAMES_AT_ONCE: Final = 1 << 12


class StoredNames:
    """The names of a checkpoint.

    Args:
        file: an open index.

    Raises:
        DamagedIndex: all methods raise it if something refers to what does not exist.
    """

    def __init__(self, file: IndexFile) -> None:
        self._file = file
        self._name_ends = file.column("name_ends")
        self._path_parts, self._path_ends = file.column("path_parts"), file.column("path_ends")

    def __len__(self) -> int:
        return len(self._name_ends)

    @property
    def n_paths(self) -> int:
        """How many of the names have a place in a nested state dict."""
        return len(self._path_ends)

    def find_all(self, names: Iterable[str]) -> dict[str, int]:
        """The numbers of those of ``names`` that are in the checkpoint.

        The names are sorted, and the search for each begins where the last one ended. So neighbours cost one or two
        comparisons.
        """
        found = {}
        at, count = 0, len(self)
        for wanted, name in sorted((name.encode("utf-8", "surrogatepass"), name) for name in set(names)):
            # The first stored name that is equal to `wanted` or after it lies in [at, end].
            step, end, stored = 1, at, b""
            while end < count and (stored := self._name_bytes(end)) < wanted:
                at, end, step = end + 1, end + step, 2 * step
            if at == end < count:  # the loop has compared this name last
                if stored == wanted:
                    found[name], at = at, at + 1
                continue
            end = min(end, count)
            while at < end:
                middle = (at + end) // 2
                if self._name_bytes(middle) < wanted:
                    at = middle + 1
                else:
                    end = middle
            if at < count and self._name_bytes(at) == wanted:
                found[name], at = at, at + 1
        return found

    def name(self, number: int) -> str:
        """The name with this number."""
        return text_of(self._file, self._name_bytes(number))

    def __iter__(self) -> Iterator[str]:
        """All names, ascending."""
        before = [""]
        for first in range(0, len(self), _NAMES_AT_ONCE):
            ends = self._name_ends.rows(first, min(first + _NAMES_AT_ONCE, len(self))).tolist()
            start = self._name_ends[first - 1] if first else 0
            data = self._file.read("names", start, ends[-1])
            places = list(pairwise([0, *(end - start for end in ends)]))
            if data.isascii():
                text = data.decode("ascii")
                names = [text[begin:end] for begin, end in places]
            else:
                names = [text_of(self._file, data[begin:end]) for begin, end in places]
            # Comparing texts gives the same order as comparing their bytes in UTF-8.
            next_names = names if first else names[1:]
            if (
                ends[0] < start
                or ends != sorted(ends)
                or any(map(ge, [*before, *names] if first else names, next_names))
            ):
                raise self._file.damaged("its names do not ascend")
            before = names[-1:]
            yield from names

    def _name_bytes(self, number: int) -> bytes:
        start, end = self._name_ends[number - 1] if number else 0, self._name_ends[number]
        if end - start > MAX_NAME_NBYTES:
            raise self._file.damaged(f"name {number} has {end - start} bytes")
        return self._file.read("names", start, end)

    def path(self, number: int) -> tuple[str | int, ...]:
        """The keys that lead to a name in the nested state dict."""
        name, at = self.name(number), 0
        start, end = self._path_ends[number - 1] if number else 0, self._path_ends[number]
        if not 0 < end - start <= _MAX_PARTS:
            raise self._file.damaged(f"the path of {name[:60]!r} has {end - start} parts")
        parts: list[str | int] = []
        for length in self._path_parts.rows(start, end).tolist():
            text = name[at : at + abs(length)]
            is_index = length < 0
            if len(text) != abs(length) or (is_index and not (text.isascii() and text.isdigit() and len(text) < 19)):
                raise self._file.damaged(f"the path of {name[:60]!r} does not spell it")
            parts.append(int(text) if is_index else text)
            at += abs(length) + 1
        return tuple(parts)


def text_of(file: IndexFile, encoded: bytes) -> str:
    """Decode a text of an index."""
    try:
        return encoded.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise file.damaged(f"{encoded[:40]!r} is not a text in UTF-8") from None
