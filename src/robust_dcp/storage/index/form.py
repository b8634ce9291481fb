"""The format of ``.robust_dcp.index``: its head, the order of its sections, and the checksums of its slabs.

This module owns the bytes that docs/formats.md describes, and the error for a damaged index. It does not know what a
section means: ``build`` makes the sections, ``index_file`` reads them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from robust_dcp.errors import CorruptCheckpoint
from robust_dcp.storage.records.checksum import crc32

__all__ = [
    "MAX_NAME_NBYTES",
    "SECTIONS",
    "SLAB_NBYTES",
    "DamagedIndex",
    "Fragment",
    "Head",
    "Section",
    "encode_sections",
    "first_slabs",
    "head_nbytes",
]

Fragment = bytes | memoryview

_MAGIC: Final = b"RDCPIDX\n"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sIIQII32s")
"""Magic, version, number of sections, bytes of the file, bytes of a slab, CRC-32 of the checksums, fit."""
_ENTRY: Final = struct.Struct("<16s4sIQQ")
"""For each section: name, type of its numbers, 0, where it begins, its length in bytes."""
_CRC: Final = struct.Struct("<I")

SLAB_NBYTES: Final = 1 << 16
MAX_NAME_NBYTES: Final = 1 << 14
"""A checkpoint with a longer name has no index. So a damaged or hostile index cannot make us read very long names."""

_ALIGNMENT: Final = 64

SECTIONS: Final[Mapping[str, str]] = {
    "names": "|u1",
    "name_ends": "<u8",
    "name_chunks": "<u8",
    "name_properties": "<i4",
    "name_size": "<i4",
    "name_reach": "<i8",
    "path_parts": "<i4",
    "path_ends": "<u8",
    "size_counts": "<u8",
    "sizes": "<i8",
    "chunk_offset": "<i4",
    "chunk_size": "<i4",
    "chunk_file": "<i4",
    "chunk_start": "<i8",
    "chunk_nbytes": "<i8",
    "variable_rows": "<i8",
    "variable_places": "<i8",
    "files": "|u1",
    "file_ends": "<u8",
    "file_ids": "|u1",
    "properties": "|u1",
    "meta": "|u1",
    "attributes": "|u1",
    "ranks": "<i8",
    "signatures": "|u1",
    "shares": "|u1",
    "share_ends": "<u8",
    "structures": "|u1",
    "checksums": "<u4",
}
"""The sections of version 1 in their order, and the type of the numbers in each. The last one holds the CRC-32 of each
slab.
"""


class DamagedIndex(CorruptCheckpoint):
    """An index that cannot be used. Code that also has the ``.metadata`` reads that instead, so users do not see this
    error.
    """

    def __init__(self, file: str, what: str) -> None:
        super().__init__(
            f"{file} is not used: {what}; the checkpoint itself is not affected",
            file=file,
            expected="an index as it was written",
            found=what,
        )


class Section(NamedTuple):
    """The bytes of one section, and the CRC-32 of each of its slabs."""

    data: Fragment
    checksums: tuple[int, ...]

    @classmethod
    def of(cls, name: str, values: Fragment | npt.NDArray[Any]) -> Section:
        """Make the section called ``name`` from its bytes or its numbers."""
        if isinstance(values, np.ndarray):
            values = np.ascontiguousarray(values, dtype=SECTIONS[name]).reshape(-1).view(np.uint8).data
        view = memoryview(values)
        slabs = range(0, len(view), SLAB_NBYTES)
        return cls(values, tuple(crc32(view[first : first + SLAB_NBYTES]) for first in slabs))


def head_nbytes() -> int:
    """Length of the head, the directory of sections, and their checksum."""
    return _HEAD.size + len(SECTIONS) * _ENTRY.size + _CRC.size


def encode_sections(sections: Mapping[str, Section], fit: bytes) -> tuple[Fragment, ...]:
    """The whole file, in parts that follow each other.

    Args:
        sections: all sections but the checksums. A missing section is empty.
        fit: the result of :func:`~robust_dcp.storage.index.fit.fit_of` for the ``.metadata`` that the index belongs to.
    """
    found = {name: sections.get(name, Section(b"", ())) for name in SECTIONS}
    checksums = np.array([each for section in found.values() for each in section.checksums], dtype="<u4").tobytes()
    found["checksums"] = Section(checksums, ())
    at = head_nbytes()
    entries, fragments = [], list[Fragment]()
    for name, section in found.items():
        gap = -at % _ALIGNMENT
        at += gap
        entries.append(_ENTRY.pack(name.encode(), SECTIONS[name].encode(), 0, at, len(section.data)))
        fragments += (bytes(gap), section.data)
        at += len(section.data)
    head = _HEAD.pack(_MAGIC, _VERSION, len(entries), at, SLAB_NBYTES, crc32(checksums), fit) + b"".join(entries)
    return (head + _CRC.pack(crc32(head)), *(fragment for fragment in fragments if len(fragment)))


class Head(NamedTuple):
    """The head of an index.

    Attributes:
        fit: the digest of the ``.metadata`` that the index belongs to.
        checksum: CRC-32 of the section ``checksums``.
        places: where each section begins, and its length in bytes.
    """

    fit: bytes
    checksum: int
    places: Mapping[str, tuple[int, int]]

    @classmethod
    def decode(cls, data: bytes, nbytes: int, file: str) -> Head:
        """Read the first :func:`head_nbytes` bytes of a file of ``nbytes`` bytes.

        Raises:
            DamagedIndex: the file is not an index of this version, or a section lies where it cannot be.
        """
        if len(data) != head_nbytes() or not data.startswith(_MAGIC):
            raise DamagedIndex(file, f"it begins with {data[:8]!r}")
        _, version, n_sections, expected_nbytes, slab_nbytes, checksum, fit = _HEAD.unpack_from(data)
        if version != _VERSION:
            raise DamagedIndex(file, f"it is of version {version}, and this robust_dcp reads version {_VERSION}")
        if _CRC.unpack(data[-_CRC.size :])[0] != crc32(data[: -_CRC.size]):
            raise DamagedIndex(file, "its head does not have its CRC-32")
        if (n_sections, slab_nbytes, expected_nbytes) != (len(SECTIONS), SLAB_NBYTES, nbytes):
            raise DamagedIndex(
                file, f"it has {n_sections} sections, slabs of {slab_nbytes} bytes, and {nbytes} bytes in all"
            )
        end, places = len(data), {}
        for number, (name, kind) in enumerate(SECTIONS.items()):
            entry = _ENTRY.unpack_from(data, _HEAD.size + number * _ENTRY.size)
            found_name, found_kind, _, start, section_nbytes = entry
            named = (found_name.rstrip(b"\0"), found_kind.rstrip(b"\0")) == (name.encode(), kind.encode())
            fits = end <= start and start % _ALIGNMENT == 0 and start + section_nbytes <= nbytes
            if not (named and fits) or section_nbytes % int(kind[-1]):
                raise DamagedIndex(file, f"its section {name} is not where it can be")
            places[name], end = (start, section_nbytes), start + section_nbytes
        return cls(fit, checksum, places)


def first_slabs(places: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """For each section, where the checksum of its first slab is among the checksums. Under ``checksums``, how many
    there are.
    """
    found, at = {}, 0
    for name, (_, nbytes) in places.items():
        found[name] = at
        at += -(-nbytes // SLAB_NBYTES)
    return found
