"""docs/formats.md suffices to read an index: 60 lines of NumPy that import nothing of ours find a tensor's bytes."""

from __future__ import annotations

import hashlib
import inspect
import json
import zlib
from pathlib import Path

import numpy as np
import torch

import robust_dcp


def read_chunk(directory: Path, name: str, offsets: tuple[int, ...]) -> tuple[str, tuple[int, ...], Path, int, int]:
    """Dtype and sizes of the chunk of ``name`` at ``offsets``, its file, and where in it its record lies."""
    data = (directory / ".robust_dcp.index").read_bytes()
    head = np.frombuffer(data, "<u4", 6, 8)
    assert data[:8] == b"RDCPIDX\n" and head[0] == 3 and int.from_bytes(data[16:24], "little") == len(data)
    metadata = (directory / ".metadata").read_bytes()
    assert data[32:64] == hashlib.sha256(len(metadata).to_bytes(8, "little") + metadata[-4096:]).digest()
    kind = np.dtype([("name", "S16"), ("type", "S4"), ("zero", "<u4"), ("start", "<u8"), ("nbytes", "<u8")])
    entries = np.frombuffer(data, kind, head[1], 64)
    assert zlib.crc32(data[: 64 + 40 * head[1]]) == int.from_bytes(data[64 + 40 * head[1] :][:4], "little")
    sections, sums = {}, []
    for entry in entries:
        nbytes, start = int(entry["nbytes"]), int(entry["start"])
        dtype = np.dtype(entry["type"].decode())
        sections[entry["name"].decode()] = np.frombuffer(data, dtype, nbytes // dtype.itemsize, start)
        slabs = range(start, start + nbytes, int(head[4]))
        sums += [zlib.crc32(data[at : min(at + head[4], start + nbytes)]) for at in slabs]
    assert sums[: len(sections["checksums"])] == sections["checksums"].tolist()

    def part(heap: str, ends: str, number: int) -> bytes:
        start = int(sections[ends][number - 1]) if number else 0
        return sections[heap][start : int(sections[ends][number])].tobytes()

    low, high = 0, len(sections["name_ends"])
    while low < high:  # the names are sorted
        middle = (low + high) // 2
        low, high = (middle + 1, high) if part("names", "name_ends", middle) < name.encode() else (low, middle)
    assert part("names", "name_ends", low) == name.encode()
    number, first = low, int(sections["name_chunks"][low - 1]) if low else 0
    writers = sections["writers"][int(sections["name_writers"][low]) :][: int(sections["name_chunks"][low]) - first]
    for rank in dict.fromkeys(writers.tolist()):
        begin, end = (int(sections["block_ends"][rank - 1]) if rank else 4096), int(sections["block_ends"][rank])
        n, n_jumps, n_sizes, n_values = np.frombuffer(data, "<u4", 7, begin)[[1, 2, 3, 6]].tolist()
        assert zlib.crc32(data[begin + 4 : end]) == int.from_bytes(data[begin : begin + 4], "little")
        columns, at = [], begin + 32
        lengths = (n, n, n_values, 2 * n_jumps, n, n, n_sizes, n)
        for kind, length in zip(("<q", "<q", "<q", "<i", "<i", "<i", "<i", "<i"), lengths, strict=True):
            columns.append(np.frombuffer(data, kind, length, at))
            at += columns[-1].nbytes
        start, nbytes, values, jumps, offset, size, ndim, of_rank = columns
        names = np.repeat(jumps[1::2] - jumps[::2], np.diff(jumps[::2], append=n)) + np.arange(n)
        sizes = [tuple(each.tolist()) for each in np.split(values, np.cumsum(ndim)[:-1])]
        for row in np.flatnonzero(names == number).tolist():
            if sizes[offset[row]] == offsets:
                file = (int(sections["rank_files"][rank - 1]) if rank else 0) + int(of_rank[row])
                path = directory / part("files", "file_ends", file).decode()
                dtype_name = json.loads(sections["properties"].tobytes())[int(sections["name_properties"][number])][0]
                return dtype_name, sizes[size[row]], path, int(start[row]), int(nbytes[row])
    raise KeyError(name)


def test_the_document_is_enough_to_find_a_tensor(tmp_path: Path) -> None:
    assert len(inspect.getsource(read_chunk).splitlines()) <= 60
    state = {f"layer.{n}": {"w": torch.full((3, n + 1), float(n))} for n in range(12)} | {"step": 7}
    robust_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    dtype, sizes, file, start, nbytes = read_chunk(tmp_path, "layer.7.w", (0, 0))
    assert (dtype, sizes) == ("float32", (3, 8))
    record = file.read_bytes()[start : start + nbytes]
    (tmp_path / "record").write_bytes(record)
    assert torch.equal(torch.load(tmp_path / "record", weights_only=True), state["layer.7"]["w"])
    values = torch.full((3, 8), 7.0).numpy().tobytes()
    assert values in record
