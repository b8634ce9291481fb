"""A copy in one pass over memory is the whole copy, and its checksum that of all of it."""

from __future__ import annotations

import pytest
import torch

from robust_dcp.staging import Block, TensorBytes
from robust_dcp.storage.records.block_sums import SUM_NBYTES, sums_of
from robust_dcp.storage.records.torch_zip import payload_view
from robust_dcp.storage.writing.copy_checked import copy_checked


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, SUM_NBYTES - 1, SUM_NBYTES, SUM_NBYTES + 1, 3 * SUM_NBYTES + 5])
def test_any_length_is_copied_whole(nbytes: int, in_order: bool, checksums: bool) -> None:
    memory = torch.arange(2 * nbytes + 100, dtype=torch.int64).to(torch.uint8) * 3
    tensor = memory[: nbytes + 50] if in_order else memory[::2]
    begin, at = 9, 64
    block = Block(at + nbytes + 1)
    block.data[:] = 0xA5
    found = copy_checked(TensorBytes(tensor), begin, begin + nbytes, block, at, checksums=checksums)
    expected = bytes(payload_view(tensor.contiguous()))[begin : begin + nbytes]
    assert bytes(block.data) == b"\xa5" * at + expected + b"\xa5"
    assert found == (sums_of(memoryview(expected), begin) if checksums else [])
