"""Records that are recognised by their frame: the same answer as from parsing each, or none."""

from __future__ import annotations

import io
import mmap
import zlib

import pytest
import torch

from robust_dcp.storage.reading.record_forms import RecordForm, RecordForms
from robust_dcp.storage.records.parse_record import parse_record
from tests.storage.test_torch_zip import record_of, saved_by_torch


def found_in(forms: RecordForms, record: bytes, dtype: torch.dtype, shape: list[int]) -> tuple[RecordForm, int] | None:
    memory = mmap.mmap(-1, len(record) + 100)
    memory[50 : 50 + len(record)] = record
    return forms.find(memory, 50, len(record), dtype, torch.Size(shape))


@pytest.mark.parametrize("make", [record_of, saved_by_torch])
@pytest.mark.parametrize("shape", [[5, 3], [], [0, 3], [3000]])
def test_alike_records_are_recognised(make, shape: list[int]) -> None:  # type: ignore[no-untyped-def]
    forms = RecordForms()
    seen = []
    for seed in range(3):
        value = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        record = make(value)
        found = found_in(forms, record, torch.float32, shape)
        assert found is not None
        form, crc32 = found
        data = record[form.data_offset : form.data_offset + form.data_nbytes]
        assert data == value.numpy().tobytes()
        assert crc32 == zlib.crc32(data)
        seen.append(form)
    assert seen[0] is seen[1] is seen[2]


@pytest.mark.parametrize("make", [record_of, saved_by_torch])
def test_a_record_that_is_recognised_parses_to_the_same(make) -> None:  # type: ignore[no-untyped-def]
    forms = RecordForms()
    record = make(torch.arange(6.0))
    assert found_in(forms, record, torch.float32, [6]) is not None
    for position in range(len(record)):
        for flip in (1 << position % 8, 0xFF):
            damaged = bytearray(record)
            damaged[position] ^= flip
            found = found_in(forms, bytes(damaged), torch.float32, [6])
            if found is None:
                continue
            form, crc32 = found
            parsed = parse_record(lambda offset, count, data=bytes(damaged): data[offset : offset + count], len(record))
            assert parsed is not None, position
            assert (parsed.data_offset, parsed.data_nbytes, parsed.crc32) == (
                form.data_offset,
                form.data_nbytes,
                crc32,
            ), position


def test_other_tensors_than_expected_are_not_recognised() -> None:
    value = torch.rand(4, 3)
    assert found_in(RecordForms(), record_of(value), torch.float32, [3, 4]) is None
    assert found_in(RecordForms(), record_of(value), torch.int32, [4, 3]) is None
    assert found_in(RecordForms(), saved_by_torch(value.t()), torch.float32, [3, 4]) is None
    assert found_in(RecordForms(), b"not a record" * 30, torch.float32, [3]) is None
    buffer = io.BytesIO()
    torch.save({"a": value}, buffer)
    assert found_in(RecordForms(), buffer.getvalue(), torch.float32, [4, 3]) is None


def test_a_load_of_very_many_shapes_forgets_some_and_recognises_all() -> None:
    forms = RecordForms()
    for _ in range(2):
        for numel in range(1, 1200, 7):
            assert found_in(forms, record_of(torch.zeros(numel)), torch.float32, [numel]) is not None
