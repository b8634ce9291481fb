"""What a check of a checkpoint has found: problems, notes, and how many bytes were compared with a checksum."""

from __future__ import annotations

import threading
from typing import Final, NamedTuple

__all__ = ["Findings", "Problem"]

_MOST_PROBLEMS: Final = 10_000


class Problem(NamedTuple):
    """Something that is broken.

    Attributes:
        file: relative to the checkpoint.
        item: the name of the item; ``None`` if the whole file is meant.
        expected: what should be there.
        found: what is there.
    """

    file: str
    item: str | None
    expected: str
    found: str


class Findings:
    """Several threads add to it.

    Attributes:
        problems: at most one for each item of a file, and at most 10,000.
        n_problems: how many there are.
        notes: what a user should know, and is no damage.
        verified_nbytes: bytes of data that have the checksum that was written with them.
        checked_nbytes: bytes that were read, to show progress.
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.n_problems = 0
        self.notes: list[str] = []
        self.verified_nbytes = 0
        self.checked_nbytes = 0
        self._unverified: dict[str, list[int]] = {}
        self._seen: set[tuple[str, str | None]] = set()
        self._lock = threading.Lock()

    @property
    def unverified(self) -> list[tuple[str, int, int]]:
        """(why, number of items, bytes) of data that has no checksum."""
        return [(why, n_items, nbytes) for why, (n_items, nbytes) in sorted(self._unverified.items())]

    @property
    def unverified_nbytes(self) -> int:
        """How many bytes of data have no checksum."""
        return sum(nbytes for _, _, nbytes in self.unverified)

    def broken(self, file: str, item: str | None, expected: str, found: str) -> None:
        """Note a problem. The first one of an item in a file counts, because the others follow from it."""
        with self._lock:
            if (file, item) in self._seen:
                return
            self.n_problems += 1
            if len(self.problems) < _MOST_PROBLEMS:
                self._seen.add((file, item))
                self.problems.append(Problem(file, item, expected, found))

    def not_verified(self, why: str, nbytes: int) -> None:
        """Note an item whose data has no checksum."""
        with self._lock:
            entry = self._unverified.setdefault(why, [0, 0])
            entry[0] += 1
            entry[1] += nbytes

    def note(self, text: str) -> None:
        """Note what is no damage."""
        with self._lock:
            self.notes.append(text)

    def checked(self, nbytes: int, *, verified: int = 0) -> None:
        """Count bytes that were read, and those of them that have their checksum."""
        with self._lock:
            self.checked_nbytes += nbytes
            self.verified_nbytes += verified
