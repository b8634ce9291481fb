"""What a copy is told, notes at its target, and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

__all__ = ["CopyPlan", "CopyResult", "Marker", "Progress"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CopyResult:
    """What a copy has done.

    Attributes:
        source, target: from where, and to where.
        files, nbytes: how much was sent.
        skipped_files, skipped_nbytes: how much was there already, and was verified.
        seconds: how long it took.
        retries: how many calls were made once more.
        verified_by_store, verified_by_reading: how many files were verified by the store's own checksum, and how many
            by reading them back.
        renamed: new names of data files by old ones, where a name was taken at the target.
        removed: files of the replaced checkpoint that were removed.
    """

    source: str
    target: str
    files: int
    nbytes: int
    skipped_files: int
    skipped_nbytes: int
    seconds: float
    retries: int
    verified_by_store: int
    verified_by_reading: int
    renamed: Mapping[str, str]
    removed: tuple[str, ...]


class CopyPlan(msgspec.Struct, frozen=True):
    """What the rank that commits tells those that send.

    Attributes:
        mark: of the save.
        renamed: new names of data files by old ones.
        there: sizes of data files that are at the target, by their names there.
    """

    mark: str
    renamed: dict[str, str]
    there: dict[str, int]


class Marker(msgspec.Struct, frozen=True):
    """The content of the file that says that a copy has begun.

    Attributes:
        source: from where.
        renamed: new names of data files by old ones.
        begun_seconds: when, in seconds since 1970.
        is_decided: whether ``renamed`` is final. Before, another copy only has to know that this one has begun.
        replaces: the files that are removed after the commit. A copy that goes on removes them as well.
    """

    source: str
    renamed: dict[str, str]
    begun_seconds: float
    is_decided: bool = False
    replaces: tuple[str, ...] = ()
