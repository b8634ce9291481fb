"""Which files belong to a checkpoint, whoever has written it: robust_dcp, stock or Megatron.

This module reads ``.metadata`` and names of files. It decides what is copied, and which names data files get at a
target where theirs are taken. It never copies anything.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from robust_dcp.drain.record import DRAIN_RECORD_NAME
from robust_dcp.drain.stores import Store
from robust_dcp.errors import StorageError
from robust_dcp.storage.files.paths import (
    INDEX_NAME,
    JOURNAL_PREFIX,
    LOCK_NAME,
    METADATA_NAME,
    REMOVING_PREFIX,
    committed_name,
    data_file_name,
    is_data_file,
    parse_data_file_name,
)
from robust_dcp.storage.metadata.metadata_file import decode_metadata, encode_metadata, referenced_files
from robust_dcp.storage.metadata.stored_pickle import files_are_marked, pickle_in

__all__ = [
    "COPYING_PREFIX",
    "Inventory",
    "mark_of_metadata",
    "named_by",
    "read_inventory",
    "renamed",
]

COPYING_PREFIX: Final = ".robust_dcp.copying."
"""The mark of a save follows. This file says that a copy of the save has begun and is not over."""

_METADATA_OF_A_RANK: Final = re.compile(r"__\d+\.metadata")
_NOT_COPIED: Final = (JOURNAL_PREFIX, COPYING_PREFIX, REMOVING_PREFIX)


@dataclass(frozen=True)
class Inventory:
    """What belongs to a checkpoint.

    Attributes:
        metadata: ``.metadata`` and its bytes. A save without collectives has ``__{rank}.metadata`` instead.
        mark: 16 hexadecimal digits that tell this save from others.
        data: the data files that the metadata names, with their sizes where they are known.
        extras: all other files, such as Megatron's ``common.pt``, with their sizes.
        has_index: whether there is an index.
        save_ids: those that the metadata has.
    """

    metadata: Mapping[str, bytes]
    mark: str
    data: Mapping[str, int | None]
    extras: Mapping[str, int]
    has_index: bool
    save_ids: tuple[str, ...] = ()


def read_whole(store: Store, name: str) -> bytes | None:
    """The bytes of a small file; ``None`` if it does not exist."""
    try:
        return store.read_whole(name)
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def mark_of_metadata(metadata: Mapping[str, bytes]) -> str:
    """The mark of a save for copies of it: a digest of its metadata."""
    digest = hashlib.blake2b(digest_size=8)
    for name, data in sorted(metadata.items()):
        digest.update(f"{name} {len(data)} ".encode())
        digest.update(data)
    return digest.hexdigest()


def read_metadata(store: Store, files: Collection[str]) -> dict[str, bytes]:
    """The metadata files that are at a place, and their bytes.

    Args:
        files: what is there.
    """
    names = [METADATA_NAME] if METADATA_NAME in files else sorted(filter(_METADATA_OF_A_RANK.fullmatch, files))
    found = {name: read_whole(store, name) for name in names}
    return {name: data for name, data in found.items() if data is not None}


def named_by(metadata: Mapping[str, bytes], url: str) -> set[str]:
    """The data files that metadata files name.

    Raises:
        CorruptCheckpoint, UnsafeCheckpoint: one cannot be used.
    """
    return {
        name for path, data in metadata.items() for name in referenced_files(decode_metadata(data, f"{url}/{path}"))
    }


def read_inventory(store: Store, files: Mapping[str, int]) -> Inventory:
    """What belongs to the checkpoint at a place.

    Args:
        files: what is there, with sizes. Data files of other nodes may be missing in it.

    Raises:
        StorageError: there is no checkpoint.
        CorruptCheckpoint, UnsafeCheckpoint: its metadata cannot be used.
    """
    metadata = read_metadata(store, files)
    if not metadata:
        raise StorageError(
            f"no {METADATA_NAME} in {store.url}: no checkpoint was committed there, so there is nothing to copy",
            path=store.path_of(METADATA_NAME),
            operation="copy",
        )
    decoded = [decode_metadata(data, store.path_of(name)) for name, data in metadata.items()]
    data = {name for each in decoded for name in referenced_files(each)}
    save_ids = [getattr(each.storage_meta, "save_id", None) for each in decoded]
    extras = {
        name: nbytes
        for name, nbytes in files.items()
        if name not in metadata and name not in data and name != INDEX_NAME and _is_copied(name)
    }
    return Inventory(
        metadata,
        mark_of_metadata(metadata),
        {name: files.get(name) for name in data},
        extras,
        INDEX_NAME in files,
        tuple(each for each in save_ids if isinstance(each, str)),
    )


def _is_copied(name: str) -> bool:
    """Whether a file that no metadata names belongs to the checkpoint: not what saves need while they run."""
    last = name.rpartition("/")[2]
    if last in (LOCK_NAME, DRAIN_RECORD_NAME) or last.startswith(_NOT_COPIED) or last.endswith((".tmp", ".part")):
        return False
    if "/" not in name and METADATA_NAME in (last, last[-len(METADATA_NAME) :]):
        return False  # of another save into the same directory
    # Data files of a save that was killed. Those of a checkpoint in a directory below are its own.
    return "/" in name or not is_data_file(committed_name(last))


def own_name(name: str, mark: str) -> str | None:
    """A name for a data file that no other save gives; ``None`` if readers find it only by the name that it has."""
    parts = name.rpartition("/")
    parsed = parse_data_file_name(parts[2])
    if parsed is None:
        return None
    return f"{parts[0]}{parts[1]}{parsed.hint}{data_file_name(parsed.rank, parsed.number, mark)}"


def renamed(metadata: Mapping[str, bytes], names: Mapping[str, str], url: str) -> dict[str, bytes]:
    """Metadata files for data files that have got other names.

    Args:
        names: new names by old ones.

    Raises:
        StorageError: the metadata holds objects of a program that is not here, so it cannot be written anew.
    """
    return {name: _renamed(data, names, f"{url}/{name}") for name, data in metadata.items()}


def _renamed(data: bytes, names: Mapping[str, str], path: str) -> bytes:
    decoded = decode_metadata(data, path)
    places: dict[Any, Any] = {
        index: replace(info, relative_path=names.get(info.relative_path, info.relative_path))
        for index, info in (decoded.storage_data or {}).items()
    }
    decoded.storage_data = places
    encoded = encode_metadata(decoded)
    if not files_are_marked(data):  # what we write behind the pickle says that all data files have the mark of a save
        encoded = bytes(pickle_in(encoded, path))
    if b"robust_dcp" in encoded.partition(b"RDCPMD")[0] and b"robust_dcp" not in data:  # a stand-in for such an object
        raise StorageError(
            f"{path} holds objects of a program that is not installed here, so it cannot be written with other names "
            "of data files, and the target holds files of the same names; copy to an empty place",
            path=path,
            operation="copy",
        )
    return encoded
