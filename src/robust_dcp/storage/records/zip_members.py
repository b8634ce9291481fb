"""Finds the members of a zip archive as ``torch.save`` writes it, in the archive's directory.

This module reads archives that need not be in memory, by two small reads if they are usual ones. It refuses what
``torch.save`` does not write: compressed members, say, or two of one name. Records and whole files of torch are such
archives.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple

__all__ = ["NotTorchZip", "ReadRange", "ZipArchive", "ZipEntry", "ZipMember", "zip_members", "zip_members_in"]

ReadRange = Callable[[int, int], bytes]
"""``read(offset, nbytes)``: bytes of the archive; fewer, or none, past its end."""

_AHEAD_NBYTES: Final = 1024  # enough for data.pkl and the small members of a usual record, and for its directory
_MAX_CONTENTS_NBYTES: Final = 1 << 16

_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_CENTRAL_HEADER: Final = struct.Struct("<4s4xHH4xIIIHHH8xI")
_LOCAL_CRC32_AT: Final = 14
_CENTRAL_CRC32_AT: Final = 16
_END64: Final = struct.Struct("<4s28xQQQ")
_END64_LOCATOR: Final = struct.Struct("<4s4xQ4x")
_END: Final = struct.Struct("<4s6xHIIH")


class NotTorchZip(ValueError):
    """This is no archive as ``torch.save`` writes it."""


class ZipMember(NamedTuple):
    """A member of a zip archive: where its bytes lie, and their CRC-32 (0 if none was computed)."""

    offset: int
    nbytes: int
    crc32: int


def zip_members(data: bytes) -> dict[str, ZipMember]:
    """The members of a ``torch.save`` archive by name, without the archive's own folder.

    Raises:
        ValueError: ``torch.save`` does not write such archives: members are compressed or encrypted, lie outside of the
            archive, overlap, or have the same name.
    """
    return zip_members_in(lambda offset, nbytes: data[offset : offset + nbytes], len(data))


def zip_members_in(read: ReadRange, nbytes: int) -> dict[str, ZipMember]:
    """As :func:`zip_members`, of an archive of ``nbytes`` bytes that need not be in memory."""
    try:
        archive = ZipArchive(read, nbytes, max_directory_nbytes=nbytes)
        members = {
            name: ZipMember(archive.data_offset(entry), entry.nbytes, entry.crc32)
            for name, entry in archive.entries.items()
        }
    except (NotTorchZip, struct.error, IndexError) as error:
        text = str(error) or "it is cut off, or its directory is damaged"
        raise ValueError(f"no zip archive as torch.save writes it: {text}") from None
    end = 0
    for member in sorted(members.values()):
        if member.offset < end or member.offset + member.nbytes > nbytes:
            raise ValueError(
                "no zip archive as torch.save writes it: its members lie over each other, or outside of it"
            )
        end = member.offset + member.nbytes
    return members


class ZipEntry(NamedTuple):
    """A member as the archive's directory has it.

    Attributes:
        header_at: where the member begins, with its local header.
        nbytes, crc32: of its bytes.
        crc32_at: where the CRC-32 is in the directory: 4 bytes, little-endian.
    """

    header_at: int
    nbytes: int
    crc32: int
    crc32_at: int

    @property
    def local_crc32_at(self) -> int:
        """Where the CRC-32 is in the local header."""
        return self.header_at + _LOCAL_CRC32_AT


class ZipArchive:
    """An archive of ``nbytes`` bytes whose directory was read.

    Args:
        max_directory_nbytes: refuse a longer directory.

    Attributes:
        entries: the members by name, without the archive's own folder.
        directory_at: where the directory begins. It extends to the end of the archive.

    Raises:
        NotTorchZip, struct.error, IndexError, UnicodeDecodeError: this is not such an archive, or it is damaged.
    """

    def __init__(self, read: ReadRange, nbytes: int, max_directory_nbytes: int) -> None:
        self.nbytes = nbytes
        self._window = _Window(read, nbytes)
        self.entries, self.directory_at = _entries(self._window, max_directory_nbytes)

    def data_offset(self, entry: ZipEntry) -> int:
        """Where the bytes of a member begin. It is known from the member's local header only."""
        header = self._window.bytes_at(entry.header_at, 30)
        magic, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
        if magic != b"PK\x03\x04":
            raise NotTorchZip
        return int(entry.header_at + 30 + name_nbytes + extra_nbytes)

    def contents(self, entry: ZipEntry) -> bytes:
        """The bytes of a small member, which have its CRC-32."""
        if entry.nbytes > _MAX_CONTENTS_NBYTES:
            raise NotTorchZip
        data = self._window.bytes_at(self.data_offset(entry), entry.nbytes)
        if entry.crc32 and zlib.crc32(data) != entry.crc32:
            raise NotTorchZip
        return data


class _Window:
    """The archive's bytes. Its beginning and its end are each read only once."""

    def __init__(self, read: ReadRange, nbytes: int) -> None:
        self.nbytes = nbytes
        self._read = read
        self._tail_at = max(0, nbytes - _AHEAD_NBYTES)
        self._tail = read(self._tail_at, nbytes - self._tail_at)
        self._head = read(0, min(nbytes, _AHEAD_NBYTES)) if self._tail_at else self._tail

    def bytes_at(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise NotTorchZip
        if offset + nbytes <= len(self._head):
            return self._head[offset : offset + nbytes]
        if offset >= self._tail_at:
            return self._tail[offset - self._tail_at : offset - self._tail_at + nbytes]
        data = self._read(offset, nbytes)
        if len(data) != nbytes:
            raise NotTorchZip
        return data


def _entries(window: _Window, max_directory_nbytes: int) -> tuple[dict[str, ZipEntry], int]:
    """The members in the archive's directory, by name without the archive's own folder, and where the directory
    begins.
    """
    end_at = window.nbytes - _END.size
    magic, count, directory_nbytes, directory_at, comment = _END.unpack(window.bytes_at(end_at, _END.size))
    if magic != b"PK\x05\x06" or comment:
        raise NotTorchZip
    locator_at = end_at - _END64_LOCATOR.size
    if locator_at >= 0:
        magic, end64_at = _END64_LOCATOR.unpack(window.bytes_at(locator_at, _END64_LOCATOR.size))
        if magic == b"PK\x06\x07":
            end64 = _END64.unpack(window.bytes_at(end64_at, _END64.size))
            magic, count, directory_nbytes, directory_at = end64
            if magic != b"PK\x06\x06":
                raise NotTorchZip
    if directory_nbytes > max_directory_nbytes:
        raise NotTorchZip
    directory = window.bytes_at(directory_at, directory_nbytes)
    entries: dict[str, ZipEntry] = {}
    at = 0
    for _ in range(count):
        name, entry, at = _directory_entry(directory, at, directory_at)
        if name in entries:  # some readers take the first, some the last
            raise NotTorchZip("two members have one name")
        entries[name] = entry
    return entries, directory_at


def _directory_entry(directory: bytes, at: int, directory_at: int) -> tuple[str, ZipEntry, int]:
    fields = _CENTRAL_HEADER.unpack_from(directory, at)
    magic, flags, method, crc32, stored_nbytes, nbytes, name_nbytes, extra_nbytes, comment_nbytes, header_at = fields
    if magic != b"PK\x01\x02" or method != 0 or flags & 1:  # stored, not compressed; not encrypted
        raise NotTorchZip("a member is compressed or encrypted")
    crc32_at = directory_at + at + _CENTRAL_CRC32_AT
    at += _CENTRAL_HEADER.size
    name = directory[at : at + name_nbytes].decode("ascii").partition("/")[2]
    at += name_nbytes
    large = _zip64_values(directory[at : at + extra_nbytes])
    nbytes, stored_nbytes, header_at = (
        large.pop(0) if value == 0xFFFFFFFF else value for value in (nbytes, stored_nbytes, header_at)
    )
    if nbytes != stored_nbytes:
        raise NotTorchZip
    return name, ZipEntry(header_at, nbytes, crc32, crc32_at), at + extra_nbytes + comment_nbytes


def _zip64_values(extra: bytes) -> list[int]:
    """The 8-byte numbers of the zip64 extra field: those of size, stored size and offset that did not fit into 4
    bytes.
    """
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            return list(struct.unpack_from(f"<{nbytes // 8}Q", extra, at + 4))
        at += 4 + nbytes
    return []
