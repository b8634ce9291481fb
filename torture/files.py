"""Writes forged objects, ``.metadata`` and indices into files with valid checksums.

Owns how a forged file gets into a valid checkpoint, so that everything else in it still fits.
"""

from __future__ import annotations

import copy
import io
import os
import struct
import zipfile
import zlib

from isal import isal_zlib

from robust_dcp.storage.files.paths import INDEX_NAME
from robust_dcp.storage.index.form import Head, Section, encode_sections, head_nbytes
from robust_dcp.storage.metadata.metadata_file import decode_metadata, encode_metadata
from robust_dcp.storage.metadata.stored_pickle import TRAILER_NBYTES, trailer_of

__all__ = [
    "archive",
    "framed",
    "metadata_with",
    "put_file",
    "put_index_bomb",
    "put_metadata",
    "put_object",
    "put_places",
]

_ITEM = "objects.args"


def framed(opcodes: bytes) -> bytes:
    """A whole pickle: the opcodes between a protocol and an end."""
    return b"\x80\x04" + opcodes + b"."


def archive(pickled: bytes, *, compressed: bool = False) -> bytes:
    """An archive with this pickle, as ``torch.save`` writes it, and with two small storages."""
    buffer = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", b"A" * 16)
        archive.writestr("archive/version", b"3\n")
    return buffer.getvalue()


def put_object(directory: str, data: bytes) -> str:
    """Make ``data`` the item of the sample, in its own file, as a stock writer does: without marks of a save."""
    path = os.path.join(directory, ".metadata")
    with open(path, "rb") as file:
        metadata = decode_metadata(file.read(), path)
    for index, info in metadata.storage_data.items():
        if index.fqn == _ITEM:
            place = copy.copy(info)
            place.relative_path, place.offset, place.length = "__0_9.distcp", 0, len(data)
            metadata.storage_data[index] = place
    put_file(directory, ".metadata", encode_metadata(metadata)[:-TRAILER_NBYTES])
    put_file(directory, "__0_9.distcp", data)
    return directory


def put_metadata(directory: str, pickled: bytes, *, checksum: bool) -> str:
    """Make ``pickled`` the ``.metadata``."""
    trailer = trailer_of(len(pickled), zlib.crc32(pickled)) if checksum else b""
    return put_file(directory, ".metadata", pickled + trailer)


def put_file(directory: str, name: str, data: bytes) -> str:
    """Write a file of the checkpoint. Returns its path."""
    path = os.path.join(directory, name)
    with open(path, "wb") as file:
        file.write(data)
    return path


def metadata_with(value: bytes) -> bytes:
    """The pickle of a ``Metadata``. The opcodes ``value`` make its ``state_dict_metadata``."""
    named = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}("
    attribute = b"X" + struct.pack("<I", 19) + b"state_dict_metadata"
    return framed(named + attribute + value + b"ub")


def _deflated_zeros(nbytes: int) -> bytes:
    return struct.pack("<BQ", 3, nbytes) + bytes(isal_zlib.compress(bytes(nbytes), 3))


def put_index_bomb(directory: str, *names: str) -> str:
    """Make these sections of the index announce a GiB each, and really have it, with valid checksums."""
    path = os.path.join(directory, INDEX_NAME)
    with open(path, "rb") as file:
        data = file.read()
    head = Head.decode(data[: head_nbytes()], len(data), path)
    bomb = _deflated_zeros(1 << 30)
    sections = {
        name: Section.of(name, bomb if name in names else data[start : start + nbytes])
        for name, (start, nbytes) in head.places.items()
        if name != "checksums"
    }
    if "shares" in names:  # the share of the only rank
        sections["share_ends"] = Section.of("share_ends", struct.pack("<Q", len(bomb)))
    return put_file(directory, INDEX_NAME, b"".join(encode_sections(sections, head.fit)))


def put_places(directory: str, offset: int, length: int) -> str:
    """Change the metadata to say that every item is at ``offset`` and has ``length`` bytes."""
    path = os.path.join(directory, ".metadata")
    with open(path, "rb") as file:
        metadata = decode_metadata(file.read(), path)
    for info in metadata.storage_data.values():
        info.offset, info.length = offset, length
    put_file(directory, ".metadata", encode_metadata(metadata))
    return directory
