"""Checks ``.metadata`` against itself: chunks cover each tensor exactly once, and no two items share bytes of a file.

It reads no data and needs no torch.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict

from robust_dcp.contents.checks.findings import Findings
from robust_dcp.contents.items import Chunk, Contents, Item, itemsize
from robust_dcp.storage.files.paths import METADATA_NAME, holds_raw_bytes, is_data_file

__all__ = ["check_structure", "unnamed_data_files"]


def check_structure(contents: Contents, findings: Findings) -> None:
    """Add what is wrong with names, chunks, places, and sizes of files."""
    home = METADATA_NAME if contents.written_by != "safetensors" else ""
    places: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for item in contents:
        for chunk in item.chunks:
            _check_place(item, chunk, home, findings)
            if chunk.file is not None and chunk.start is not None and chunk.stored_nbytes:
                places[chunk.file].append((chunk.start, chunk.start + chunk.stored_nbytes, item.name))
        if item.is_tensor:
            _check_cover(item, home, findings)
    for file in contents.files:
        if file.nbytes is None:
            findings.broken(
                file.name, None, f"a file with {file.n_chunks} chunk{'' if file.n_chunks == 1 else 's'}", "no such file"
            )
        elif file.nbytes < file.needed_nbytes:
            findings.broken(file.name, None, f"at least {file.needed_nbytes} bytes", f"{file.nbytes} bytes")
        _check_overlap(file.name, places.get(file.name, []), findings)


def _check_place(item: Item, chunk: Chunk, home: str, findings: Findings) -> None:
    if chunk.file is None:
        where = f"its chunk at {list(chunk.offsets)}" if item.is_tensor else "it"
        findings.broken(home, item.name, f"a file for {where}", "none")
        return
    size = itemsize(item.dtype) if item.dtype is not None else None
    if size is not None and chunk.stored_nbytes is not None and not chunk.transforms:
        needed = math.prod(chunk.sizes) * size
        is_exact = holds_raw_bytes(chunk.file)
        if chunk.stored_nbytes < needed or (is_exact and chunk.stored_nbytes != needed):
            expected = f"{'' if is_exact else 'at least '}{needed} bytes for {item.dtype} {list(chunk.sizes)}"
            findings.broken(home, item.name, expected, f"{chunk.stored_nbytes} bytes in {chunk.file}")


def _check_cover(item: Item, home: str, findings: Findings) -> None:
    """The chunks lie in the tensor, do not overlap, and have as many elements as the tensor: so they cover it once."""
    for chunk in item.chunks:
        fits = len(chunk.offsets) == len(chunk.sizes) == len(item.shape) and all(
            offset + size <= whole for offset, size, whole in zip(chunk.offsets, chunk.sizes, item.shape, strict=True)
        )
        if not fits:
            found = f"a chunk {list(chunk.sizes)} at {list(chunk.offsets)}"
            findings.broken(home, item.name, f"chunks within {list(item.shape)}", found)
            return
    twice = _overlapping([chunk for chunk in item.chunks if 0 not in chunk.sizes])
    if twice is not None:
        first, second = (f"{list(chunk.sizes)} at {list(chunk.offsets)}" for chunk in twice)
        findings.broken(home, item.name, "chunks that do not overlap", f"{first} and {second}")
        return
    found_elements = sum(math.prod(chunk.sizes) for chunk in item.chunks)
    if found_elements != math.prod(item.shape):
        expected = f"chunks with all {math.prod(item.shape)} elements of {list(item.shape)}"
        findings.broken(home, item.name, expected, f"chunks with {found_elements}")


def _overlapping(chunks: list[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Two chunks that share an element. It sweeps along the dimension in which the chunks begin at most places."""
    if len(chunks) < 2 or not chunks[0].offsets:
        return (chunks[0], chunks[1]) if len(chunks) > 1 else None
    along = max(range(len(chunks[0].offsets)), key=lambda d: len({chunk.offsets[d] for chunk in chunks}))
    active: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda each: each.offsets[along]):
        begin = chunk.offsets[along]
        active = [each for each in active if each.offsets[along] + each.sizes[along] > begin]
        for each in active:
            if all(
                a < b + b_size and b < a + a_size
                for a, a_size, b, b_size in zip(each.offsets, each.sizes, chunk.offsets, chunk.sizes, strict=True)
            ):
                return each, chunk
        active.append(chunk)
    return None


def _check_overlap(file: str, ranges: list[tuple[int, int, str]], findings: Findings) -> None:
    end, last = 0, ""
    for begin, stop, item in sorted(ranges):
        if begin < end:
            findings.broken(file, item, f"bytes of its own from {begin} on", f"bytes up to {end} are of {last!r}")
        if stop > end:
            end, last = stop, item


def unnamed_data_files(contents: Contents, names: list[str]) -> list[str]:
    """Data files beside the checkpoint that do not belong to it."""
    named = {os.path.basename(file.name) for file in contents.files}
    return [name for name in names if is_data_file(name) and name not in named]
