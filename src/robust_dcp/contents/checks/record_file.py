"""Checks a file of records: ours to the last bit, by its footer, and those of stock by the checksums in the records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from robust_dcp.contents.checks.archives import archive_spans, check_tensor, dtype_named, parsed
from robust_dcp.contents.checks.findings import Findings
from robust_dcp.contents.checks.spans import READ_NBYTES, Span
from robust_dcp.contents.items import Chunk, Item
from robust_dcp.storage.layouts.footer import TAIL_NBYTES, Footer, SumColumns, item_id
from robust_dcp.storage.reading.data_file import DataFile
from robust_dcp.storage.records.block_sums import joined
from robust_dcp.storage.records.torch_zip import RecordTemplate, record_template, template_of

__all__ = ["Placed", "check_footer", "spans_of_others", "spans_of_ours"]


class Placed(NamedTuple):
    """A record: bytes ``begin`` to ``end`` of its file."""

    begin: int
    end: int
    item: Item
    chunk: Chunk


def check_footer(file: DataFile, name: str, mark: str, findings: Findings) -> Footer | None:
    """The footer of a file of ours; ``None`` if it is not there, or not of this save."""
    footer = file.footer
    if footer is None:
        found = f"{file.nbytes} bytes that do not end with a footer: it is cut short, damaged, or another file"
        findings.broken(name, None, "a footer", found)
        return None
    if footer.tail.mark != mark:
        findings.broken(name, None, f"a file of save {mark}", f"a file of save {footer.tail.mark}")
        return None
    return footer


def check_items(file: DataFile, name: str, records: Sequence[Placed], findings: Findings) -> None:
    """Compare which items ``.metadata`` places in records with what the footer says, if there is one."""
    footer = file.footer
    if footer is None or not footer.tail.n_items:
        return
    places = np.array([(each.begin, each.end) for each in records], dtype=np.int64).reshape(-1, 2)
    try:
        found = footer.items_at(places[:, 0], places[:, 1]).tolist()
    except ValueError as error:
        findings.broken(name, None, "a footer with the checksums of its blocks", str(error))
        return
    for each, item in zip(records, found, strict=True):
        if item != item_id(each.item.name, each.chunk.offsets):
            expected = f"this item in bytes {each.begin} to {each.end}, where .metadata places it"
            findings.broken(name, each.item.name, expected, "another item")


def spans_of_others(file: DataFile, name: str, records: Sequence[Placed], findings: Findings) -> Iterator[Span]:
    """The members of all records."""
    for each in records:
        if each.chunk.transforms:
            why = f"it was written with {', '.join(each.chunk.transforms)}, which has no checksum that we know"
            findings.not_verified(why, each.end - each.begin)
            continue
        if each.item.is_tensor:
            found = parsed(file, each.begin, each.end)
            if found is not None:
                check_tensor(found, each.item, each.chunk, name, findings)
        yield from archive_spans(file, name, each.item, each.begin, each.end, findings)


def spans_of_ours(
    file: DataFile, name: str, footer: Footer, records: Sequence[Placed], findings: Findings
) -> Iterator[Span]:
    """All bytes of the file: blocks of data, frames of records, and the zeros in between."""
    try:
        columns = footer.columns()
    except ValueError as error:
        findings.broken(name, None, "a footer with the checksums of its blocks", str(error))
        return
    if not len(columns.offset):
        yield from spans_of_others(file, name, records, findings)
        return
    block_nbytes = footer.tail.block_nbytes
    first_sum = _first_sums(columns, block_nbytes)
    at = row = 0
    for each in records:
        yield from _zeros(at, each.begin)
        at = max(at, each.end)
        if row < len(columns.offset) and int(columns.offset[row]) < each.begin:
            break
        if row == len(columns.offset) or int(columns.offset[row]) >= each.end:
            # Data without bytes may have no checksums. The frame is all that there is.
            _check_frame(file, name, each, each.end, 0, 0, findings)
            continue
        begin, nbytes = int(columns.offset[row]), int(columns.nbytes[row])
        sums = columns.crcs[first_sum[row] : first_sum[row + 1]].tolist()
        row += 1
        if begin + nbytes > each.end:
            findings.broken(name, each.item.name, f"data up to {each.end}", f"checksums up to {begin + nbytes}")
            continue
        if (begin, begin + nbytes) != (each.begin, each.end):
            _check_frame(file, name, each, begin, nbytes, joined(sums, nbytes, block_nbytes), findings)
        for number, value in enumerate(sums):
            start = begin + number * block_nbytes
            stop = min(start + block_nbytes, begin + nbytes)
            yield Span(start, stop, each.item.name, value)
    if row < len(columns.offset):
        found = f"checksums of {len(columns.offset)} items, one of them at {int(columns.offset[row])}"
        findings.broken(name, None, f"checksums of the {len(records)} items that .metadata places there", found)
        return
    yield from _zeros(at, file.nbytes - TAIL_NBYTES - footer.tail.columns_nbytes)


def _first_sums(columns: SumColumns, block_nbytes: int) -> list[int]:
    counts = -(-columns.nbytes // block_nbytes)
    return [0, *np.cumsum(counts).tolist()]


def _zeros(begin: int, end: int) -> Iterator[Span]:
    """The gap between two records."""
    while begin < end:
        stop = min(begin + READ_NBYTES // 4, end)
        yield Span(begin, stop, None, None)
        begin = stop


def _check_frame(
    file: DataFile, name: str, each: Placed, begin: int, nbytes: int, crc: int, findings: Findings
) -> None:
    """Compare what lies around the data of a record with what belongs there. ``crc`` is the CRC-32 of the data."""
    dtype = dtype_named(each.item.dtype)
    template = None if dtype is None else record_template(dtype, each.chunk.sizes)
    header_nbytes = begin - each.begin
    if begin == each.end and template is not None:
        header_nbytes = template.header_nbytes
    header = _read(file, each.begin, header_nbytes)
    trailer_at = each.begin + len(header) + nbytes
    trailer = _read(file, trailer_at, each.end - trailer_at)
    if _is_framed_by(template, header, trailer, crc):
        return
    if dtype is not None and _is_framed_by(template_of(header, dtype, each.chunk.sizes), header, trailer, crc):
        found = parsed(file, each.begin, each.end)  # another version of torch pickles in another way
        if found is not None:
            check_tensor(found, each.item, each.chunk, name, findings)
            return
    what = each.item.dtype if each.item.is_tensor else "object"
    expected = f"the frame of a record with {what} {list(each.chunk.sizes)} at bytes {each.begin} to {each.end}"
    findings.broken(name, each.item.name, expected, "other bytes around the data")


def _is_framed_by(template: RecordTemplate | None, header: bytes, trailer: bytes, crc: int) -> bool:
    return template is not None and (header, trailer) == (template.header(crc), template.trailer(crc))


def _read(file: DataFile, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(max(0, nbytes))
    return bytes(buffer[: file.read_into(memoryview(buffer), offset)]) if nbytes > 0 else b""
