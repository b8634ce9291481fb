"""Records framed by us are what stock torch reads; records of either origin are understood without torch.load."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isal import isal_zlib
from msgspec.structs import replace

from robust_dcp.storage.records.record import (
    DATA_ALIGNMENT,
    Record,
    bytes_of,
    contiguous_strides,
    framed_record,
    is_fixed_size,
    parsed_record,
)

DTYPES = sorted(
    (d for d in {v for v in vars(torch).values() if isinstance(v, torch.dtype)} if framed_record(d, (1,))), key=str
)
shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bytes as a tensor; booleans are 0 or 1, as everything else is undefined."""
    tensor = torch.empty(shape, dtype=dtype)
    view = bytes_of(tensor)
    data = torch.randint(
        2 if dtype == torch.bool else 256, (view.nbytes,), generator=torch.Generator().manual_seed(seed)
    )
    view[:] = data.to(torch.uint8).numpy().data
    return tensor


def frame_of(template: Record, crc: int) -> tuple[bytes, bytes]:
    """The bytes before and behind data with this CRC-32."""
    header, trailer = bytearray(template.header), bytearray(template.trailer)
    for part, at in ((header, 0), (trailer, template.nbytes - len(trailer))):
        begin = template.crc32_at[at > 0] - at
        part[begin : begin + 4] = crc.to_bytes(4, "little")
    return bytes(header), bytes(trailer)


def record_of(tensor: torch.Tensor) -> bytes:
    template = framed_record(tensor.dtype, tuple(tensor.shape))
    assert template is not None
    payload = bytes_of(tensor)
    crc = zlib.crc32(payload)
    header, trailer = frame_of(template, crc)
    record = header + payload + trailer
    assert len(record) == template.nbytes
    return record


def facts(record: Record) -> Record:
    """Without what stands around the data."""
    return replace(record, header=b"", trailer=b"", crc32_at=(), unread_at=())


def saved_by_torch(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def parsed(record: bytes) -> Record | None:
    return parsed_record(lambda offset, nbytes: record[offset : offset + nbytes], len(record))


def test_every_dtype_that_torch_can_save_is_framed() -> None:
    assert {torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.complex32, torch.bool} <= set(DTYPES)
    assert framed_record(torch.qint8, (1,)) is None


@settings(max_examples=150)
@given(st.sampled_from(DTYPES), shapes, st.integers(0, 2**32))
def test_stock_torch_reads_a_record(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> None:
    tensor = tensor_of(dtype, shape, seed)
    record = record_of(tensor)
    loaded = torch.load(io.BytesIO(record), weights_only=True)
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (dtype, tensor.shape, tensor.stride())
    assert not loaded.requires_grad
    assert bytes_of(loaded) == bytes_of(tensor)
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stock_torch_maps_a_record_into_memory(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = tensor_of(dtype, (3, 5))
    path = tmp_path / "record.pt"
    path.write_bytes(record_of(tensor))
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert bytes_of(loaded) == bytes_of(tensor)
    assert loaded.data_ptr() % DATA_ALIGNMENT == 0


@settings(max_examples=100)
@given(st.sampled_from(DTYPES), shapes, st.booleans(), st.integers(0, 2**32))
def test_a_record_is_understood_without_torch_load(
    dtype: torch.dtype, shape: tuple[int, ...], transposed: bool, seed: int
) -> None:
    tensor = tensor_of(dtype, shape, seed)
    if transposed and shape:
        tensor = tensor.permute(*reversed(range(len(shape))))
    in_order = tensor if not transposed or not shape else tensor.permute(*reversed(range(len(shape))))
    records = [(saved_by_torch(tensor), tensor.stride())]
    if tensor.is_contiguous():
        records.append((record_of(tensor), contiguous_strides(tuple(tensor.shape))))
    for record, stride in records:
        found = parsed(record)
        assert found is not None
        assert (found.dtype, found.shape, found.stride) == (dtype, tuple(tensor.shape), stride)
        data = record[found.data_offset : found.data_offset + found.data_nbytes]
        assert data == bytes(bytes_of(in_order))
        assert (found.crc32 or 0) == zlib.crc32(data)


@pytest.mark.parametrize(
    "value",
    [
        {"a": torch.ones(2)},
        [1, 2],
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.ones(3).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["dict", "list", "quantized", "sparse", "parameter"],
)
def test_what_is_no_plain_tensor_is_left_to_torch_load(value: object) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    assert parsed(buffer.getvalue()) is None


@pytest.mark.parametrize(
    "record", [record_of(torch.arange(6.0)), saved_by_torch(torch.arange(6.0))], ids=["ours", "stock"]
)
def test_a_damaged_record_is_never_misread(record: bytes) -> None:
    original = parsed(record)
    assert original is not None
    for position in range(len(record)):
        for bit in (0, 3, 7):
            damaged = bytearray(record)
            damaged[position] ^= 1 << bit
            found = parsed(bytes(damaged))
            if found is None or facts(found) == facts(original):
                continue
            # What is left to differ are the checksum itself and where the data starts: a checksum then does not match.
            data = damaged[found.data_offset : found.data_offset + found.data_nbytes]
            assert zlib.crc32(data) != found.crc32, position
    for nbytes in range(0, len(record), 7):
        assert parsed(record[:nbytes]) is None


def test_only_plain_tensors_have_a_fixed_size() -> None:
    plain = torch.ones(2, 3)
    assert is_fixed_size(plain)
    assert is_fixed_size(plain.t())
    assert is_fixed_size(torch.nn.Parameter(plain))
    assert is_fixed_size(torch.tensor(1))

    class Subclass(torch.Tensor):
        pass

    complex_ = torch.ones(2, dtype=torch.complex64)
    for odd in (
        plain.to_sparse(),
        plain.as_subclass(Subclass),
        complex_.conj(),
        complex_.conj().imag,
        torch.empty(2, device="meta"),
        torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8),
    ):
        assert not is_fixed_size(odd)


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [0xFFFFFFFE, 0xFFFFFFFF, (4 << 30) + 5])
def test_a_record_beyond_4_gib_is_read_by_stock_and_by_us(nbytes: int, tmp_path: Path) -> None:
    template = framed_record(torch.uint8, (nbytes,))
    assert template is not None
    crc, block = 0, bytes(64 << 20)
    for start in range(0, nbytes, len(block)):
        crc = isal_zlib.crc32(memoryview(block)[: nbytes - start], crc)
    path = tmp_path / "large.pt"
    with path.open("wb") as file:  # the zeros are a hole: the file takes a few blocks on disk
        header, trailer = frame_of(template, crc)
        file.write(header)
        file.seek(template.data_offset + nbytes)
        file.write(trailer)
    assert path.stat().st_size == template.nbytes

    with path.open("rb") as readable:

        def read(offset: int, count: int) -> bytes:
            return os.pread(readable.fileno(), count, offset)

        found = parsed_record(read, template.nbytes)
    assert found is not None
    # (2**32 - 1 zeros have the CRC-32 0, which is taken for none.)
    assert (found.shape, found.data_nbytes, found.crc32 or 0) == ((nbytes,), nbytes, crc)
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded.shape == (nbytes,)
    assert loaded[-1] == 0
    with zipfile.ZipFile(path) as archive:
        assert [each.CRC for each in archive.infolist() if each.file_size == nbytes] == [crc]
        assert {archive.open(each).name for each in archive.infolist()} == set(archive.namelist())
