"""What a copy is: the files that belong to a checkpoint, whoever has written it. And what a copy says at its target.

This is the central data of a copy. A :class:`Manifest` is made from the ``.metadata`` and the names at the source. A
:class:`Claim` lies at the target while the copy is not over, and names what it may put there. A file has arrived if the
target holds bytes with the checksum of those that were read at the source (``content``). The checkpoint has arrived if
``.metadata`` is at the target, which comes last.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from robust_dcp.drain.places import Place
from robust_dcp.drain.record import DRAIN_RECORD_NAME
from robust_dcp.errors import StorageError
from robust_dcp.storage.files.paths import (
    METADATA_NAME,
    REMOVING_PREFIX,
    SAVING_PREFIX,
    committed_name,
    is_data_file,
)
from robust_dcp.storage.metadata.metadata_file import decode_metadata, referenced_files

__all__ = ["CLAIM_PREFIX", "Claim", "Manifest", "read_manifest", "read_metadata"]

CLAIM_PREFIX: Final = ".robust_dcp.copying."
"""The mark of the checkpoint follows."""

_METADATA_OF_A_RANK: Final = re.compile(r"__\d+\.metadata")
_NOT_COPIED: Final = (SAVING_PREFIX, CLAIM_PREFIX, REMOVING_PREFIX)


@dataclass(frozen=True)
class Manifest:
    """What belongs to a checkpoint.

    Attributes:
        metadata: ``.metadata`` and its bytes. A save without collectives has ``__{rank}.metadata`` instead.
        data: the data files that the metadata names, with their sizes where they are known.
        extras: all other files, such as the index or Megatron's ``common.pt``, with their sizes.
    """

    metadata: Mapping[str, bytes]
    data: Mapping[str, int | None]
    extras: Mapping[str, int]

    @property
    def mark(self) -> str:
        """16 hexadecimal digits that tell this checkpoint from others."""
        digest = hashlib.blake2b(digest_size=8)
        for name, data in sorted(self.metadata.items()):
            digest.update(f"{name} {len(data)} ".encode())
            digest.update(data)
        return digest.hexdigest()

    @property
    def names(self) -> set[str]:
        """The names of all its files."""
        return {*self.metadata, *self.data, *self.extras}


class Claim(msgspec.Struct, frozen=True):
    """The content of the file at the target that says that a copy has begun and is not over.

    Attributes:
        host, source: from where.
        names: the files that it may put there.
    """

    host: str
    source: str
    names: tuple[str, ...]


def read_metadata(place: Place, files: Collection[str]) -> dict[str, bytes]:
    """The metadata files at a place, and their bytes.

    Args:
        files: what is there.
    """
    names = [METADATA_NAME] if METADATA_NAME in files else sorted(filter(_METADATA_OF_A_RANK.fullmatch, files))
    contents = {name: place.read(name) for name in names}
    return {name: data for name, data in contents.items() if data is not None}


def read_manifest(place: Place) -> Manifest:
    """What belongs to the checkpoint at a place.

    Raises:
        StorageError: there is no checkpoint.
        CorruptCheckpoint, UnsafeCheckpoint: its metadata cannot be used.
    """
    files = place.files()
    metadata = read_metadata(place, files)
    if not metadata:
        raise StorageError(
            f"no {METADATA_NAME} in {place.url}: no checkpoint was committed there, so there is nothing to copy",
            path=place.path_of(METADATA_NAME),
            operation="copy",
        )
    data = {
        name for path, each in metadata.items() for name in referenced_files(decode_metadata(each, place.path_of(path)))
    }
    # Data files of other nodes may be missing in the list.
    extras = {
        name: nbytes for name, nbytes in files.items() if name not in metadata and name not in data and _is_copied(name)
    }
    return Manifest(metadata, {name: files.get(name) for name in data}, extras)


def _is_copied(name: str) -> bool:
    """Whether a file that no metadata names belongs to the checkpoint: not what saves need while they run."""
    last = name.rpartition("/")[2]
    if last == DRAIN_RECORD_NAME or last.startswith(_NOT_COPIED) or last.endswith((".tmp", ".part")):
        return False
    if "/" in name:  # a checkpoint in a directory below
        return True
    # Not those of other saves into the same directory.
    return not last.endswith(METADATA_NAME) and not is_data_file(committed_name(last))
