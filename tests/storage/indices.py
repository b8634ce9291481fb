"""Checkpoints with an index, made from columns, and what stock's metadata of them is."""

from __future__ import annotations

import dataclasses
import struct
import uuid
from pathlib import Path

from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.files.paths import INDEX_NAME, METADATA_NAME
from robust_dcp.storage.index.build import IndexTemplate
from robust_dcp.storage.index.form import HEAD_NBYTES, SECTIONS, SLAB_NBYTES
from robust_dcp.storage.metadata.metadata_file import FORMAT_VERSION
from robust_dcp.storage.metadata.pickled import MetadataPickle
from robust_dcp.storage.reader import RobustReader
from robust_dcp.storage.records.checksum import crc32
from tests.storage.test_metadata_pickle import Content, Entry, contents, names_of

META = StorageMeta("/a/checkpoint", str(uuid.UUID(int=7)))


def _indexed(content: Content) -> Content:
    entries = sorted(content.entries, key=lambda entry: entry.name)
    return dataclasses.replace(
        content, entries=tuple(dataclasses.replace(entry, path=tuple(entry.name.split("."))) for entry in entries)
    )


indexed_contents: st.SearchStrategy[Content] = contents().map(_indexed)
"""As a plan gives them: sorted, and paths that spell their names."""


def sorted_content(*entries: Entry, n_files: int = 1) -> Content:
    """The content of a checkpoint with these entries."""
    return _indexed(Content(entries, n_files))


def put(directory: Path, content: Content, meta: StorageMeta | None = META) -> tuple[Path, Path]:
    """Write ``.metadata`` and the index of ``content`` there."""
    columns, places, files = content.columns(), content.variable_places(), names_of(content.n_files)
    metadata = MetadataPickle(columns).encode(files, places, meta)
    index = IndexTemplate(columns).encode(metadata, files, places, meta, FORMAT_VERSION, {})
    (directory / METADATA_NAME).write_bytes(b"".join(metadata))
    (directory / INDEX_NAME).write_bytes(b"".join(index))
    return directory / METADATA_NAME, directory / INDEX_NAME


def lazy(directory: Path, disk: Disk | None = None) -> Metadata | None:
    """What the index there says; ``None`` if it is not used."""
    reader = RobustReader(directory, disk=disk)
    identity = reader.source.find_index()
    metadata = reader.source.indexed_metadata(identity) if identity else None
    if metadata is not None and metadata.storage_meta is not None:
        metadata.storage_meta.load_id = None  # the reader's own
    return metadata


def with_fixed_checksums(data: bytes | bytearray) -> bytes:
    """The same index with the CRC-32s that its bytes have now, as who forges one would write them."""
    data = bytearray(data)
    places = [struct.unpack_from("<QQ", data, 64 + 40 * number + 24) for number in range(len(SECTIONS))]
    sums = b"".join(
        struct.pack("<I", crc32(bytes(data[at : min(at + SLAB_NBYTES, start + nbytes)])))
        for start, nbytes in places[:-1]
        if start + nbytes <= len(data)
        for at in range(start, start + nbytes, SLAB_NBYTES)
    )
    start, nbytes = places[-1]
    if nbytes == len(sums) and start + nbytes <= len(data):
        data[start : start + nbytes] = sums
    struct.pack_into("<I", data, 28, crc32(bytes(data[start : start + nbytes])))
    struct.pack_into("<I", data, HEAD_NBYTES - 4, crc32(bytes(data[: HEAD_NBYTES - 4])))
    return bytes(data)
