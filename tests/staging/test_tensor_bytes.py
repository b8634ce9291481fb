"""Ranges of a tensor's bytes, wherever its elements lie, are those of a contiguous copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robust_dcp.staging.blocks import Block, memory_at
from robust_dcp.staging.tensor_bytes import TensorBytes
from robust_dcp.storage.records.record import bytes_of
from tests.promises.test_mixes import tensors


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@given(tensors(), st.data())
def test_any_range_is_copied_to_anywhere(tensor: torch.Tensor, data: st.DataObject) -> None:
    expected = bytes(bytes_of(tensor.detach().resolve_conj().resolve_neg().contiguous()))
    found = TensorBytes(tensor)
    assert found.nbytes == len(expected)
    begin = data.draw(st.integers(0, found.nbytes))
    end = data.draw(st.integers(begin, found.nbytes))
    at = data.draw(st.integers(0, 70))
    block = Block(at + end - begin + 1)
    block.data[:] = 0xA5
    found.copy(begin, end, block, at)
    assert bytes(block.data) == b"\xa5" * at + expected[begin:end] + b"\xa5"
    assert found.address is None or bytes(memory_at(found.address, found.nbytes)) == expected


def test_a_contiguous_tensor_is_where_it_is_and_another_nowhere() -> None:
    tensor = torch.arange(10.0)[2:]
    assert TensorBytes(tensor).address == tensor.data_ptr()
    assert TensorBytes(torch.nn.Parameter(tensor)).address == tensor.data_ptr()
    for elsewhere in (tensor[::2], torch.zeros(3, 2).t(), torch.zeros(2, dtype=torch.complex64).conj()):
        assert TensorBytes(elsewhere).address is None


@pytest.mark.parametrize("view", [lambda tensor: tensor, lambda tensor: tensor[3:], lambda tensor: tensor[:, ::2]])
def test_memory_that_was_freed_is_not_read(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.zeros(100, 100))
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"holds 0 bytes where its data ends at byte \d+: its memory was freed"):
        TensorBytes(tensor)
    assert TensorBytes(torch.zeros(0, 7)).nbytes == 0
