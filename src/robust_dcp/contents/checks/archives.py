"""Checks records that ``torch.save`` has written, in files by stock, Megatron or us: by the CRC-32 of each member.

A record that we framed is checked more closely, in ``record_file``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from robust_dcp.contents.checks.findings import Findings
from robust_dcp.contents.checks.spans import Span, Whole, pieces
from robust_dcp.contents.items import Chunk, Item
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.records.parse_record import ParsedRecord, parse_record
from robust_dcp.storage.records.zip_members import zip_members_in

__all__ = ["archive_spans", "check_tensor", "parsed"]

_ZIP = b"PK\x03\x04"


def archive_spans(
    file: DataFile, name: str, item: Item | None, begin: int, end: int, findings: Findings
) -> Iterator[Span]:
    """The members of an archive at bytes ``begin`` to ``end`` of a file, with their checksums in the zip."""
    label = None if item is None else item.name
    try:
        members = zip_members_in(lambda offset, nbytes: _read(file, begin + offset, nbytes), end - begin)
    except ValueError as error:
        findings.broken(name, label, f"a record of torch.save at bytes {begin} to {end}", str(error))
        return
    for member_name, member in sorted(members.items(), key=lambda entry: entry[1].offset):
        first = begin + member.offset
        if first + member.nbytes > end:
            found = f"{member_name} ends at {first + member.nbytes}"
            findings.broken(name, label, f"a record of torch.save that ends at {end}", found)
            return
        if not member.nbytes:
            continue
        if not member.crc32:
            findings.not_verified("torch.save wrote no CRC-32 with it", member.nbytes)
        else:
            yield from pieces(Whole(label, member_name, first, first + member.nbytes, member.crc32))


def check_tensor(found: ParsedRecord, item: Item, chunk: Chunk, name: str, findings: Findings) -> None:
    """Compare what a record says about its tensor with ``.metadata``."""
    dtype = str(found.dtype).removeprefix("torch.")
    if (dtype, tuple(found.shape)) != (item.dtype, chunk.sizes):
        expected = f"{item.dtype} {list(chunk.sizes)}"
        findings.broken(name, item.name, expected, f"{dtype} {list(found.shape)}: another item's record")


def parsed(file: DataFile, begin: int, end: int) -> ParsedRecord | None:
    """The tensor in a record; ``None`` if it is not a plain one."""
    return parse_record(lambda offset, nbytes: _read(file, begin + offset, nbytes), end - begin)


def dtype_named(name: str | None) -> torch.dtype | None:
    """The dtype of that name; ``None`` if this torch has none."""
    found = getattr(torch, name, None) if name else None
    return found if isinstance(found, torch.dtype) else None


def _read(file: DataFile, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    return bytes(buffer[: file.read_into(memoryview(buffer), offset)])
